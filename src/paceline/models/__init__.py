"""Models of fixed size, so that runs can be compared.

Input shape and number of classes come from the data.
"""
