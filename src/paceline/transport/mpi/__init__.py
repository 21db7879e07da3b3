"""MPI through mpi4py; `torch_backend` offers it to torch.distributed."""

from paceline.transport.mpi.transport import MpiTransport

__all__ = ["MpiTransport"]
