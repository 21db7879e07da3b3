"""Differential privacy: clipped gradients, noise, sampling, and what it all costs in epsilon."""
