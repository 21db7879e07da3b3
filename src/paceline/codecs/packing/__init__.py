"""Packing numbers into bytes and back, shared by several codecs."""
