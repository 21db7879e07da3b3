"""What happened, written once as events by each worker; everything a person sees is computed from
it.
"""
