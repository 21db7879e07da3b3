"""Transports move bytes between ranks: one file or folder each. `Metered` wraps any of them."""
