"""PyTorch's own process groups: gloo and NCCL, and the store where ranks meet."""

from paceline.transport.c10d.gloo import GlooTransport
from paceline.transport.c10d.nccl import NcclTransport

__all__ = ["GlooTransport", "NcclTransport"]
