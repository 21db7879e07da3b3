"""Collectives combine a buffer over all ranks: schedules as data, run by one executor."""
