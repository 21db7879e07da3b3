"""Optimizers (PyTorch's own) and learning-rate schedules, by name."""
