"""Shared memory between the processes of one host."""

from paceline.transport.shm.transport import SharedBytes, ShmTransport

__all__ = ["SharedBytes", "ShmTransport"]
