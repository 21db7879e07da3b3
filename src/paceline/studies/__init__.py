"""A grid of runs, measured fairly."""
