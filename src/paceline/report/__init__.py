"""A self-contained page made from records only."""
