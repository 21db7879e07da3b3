"""What goes wrong on purpose: for tests, for studies of stragglers and slow networks. One file
each.
"""
