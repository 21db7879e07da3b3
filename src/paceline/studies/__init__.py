"""Studies: grids of settings, run in a fair order and measured."""
