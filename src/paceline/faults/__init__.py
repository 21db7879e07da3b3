"""Injected faults, for tests and for studies of stragglers and slow networks. One file each."""
