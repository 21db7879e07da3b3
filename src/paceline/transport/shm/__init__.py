"""Shared memory between the processes of one host."""

from paceline.transport.shm.memory import SharedBytes
from paceline.transport.shm.transport import ShmTransport

__all__ = ["SharedBytes", "ShmTransport"]
