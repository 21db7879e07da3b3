"""Losses, which training minimises, and metrics, which evaluations report."""
