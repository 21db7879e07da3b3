"""The record of a run: each worker writes events, and all other figures are computed from them."""
