"""Callbacks see a run's events while it trains; the loggers are callbacks. One file each."""
