"""What works on this machine, by trying it; and a check of its GPUs."""

from paceline.doctor.machine import Finding, examine

__all__ = ["Finding", "examine"]
