"""Strategies keep the workers together. One file each; `parts/` holds what several share."""
