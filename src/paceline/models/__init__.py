"""Models of fixed size, so that figures mean something. Input shape and class count come from the
data.
"""
