"""Tensors as the `paceline-mpi` backend gives them to MPI: in place where MPI can use their memory,
otherwise as copies, which `fill` copies back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NAME = "paceline-mpi"
# What MPI cannot combine, and what it is combined as.
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}


def checked(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Raise unless all are dense tensors on the CPU."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                f"{NAME} moves dense tensors, not {tensor.layout}: call .to_dense(), or use gloo"
            )
        if tensor.device.type != "cpu":
            raise RuntimeError(f"{NAME} moves CPU tensors, not {tensor.device}: call .cpu()")
    return tensors


def plain(tensor: Tensor) -> Tensor:
    """The tensor if its elements lie in memory one after the other as they are, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def on_wire(tensor: Tensor) -> Tensor:
    """The tensor's numbers as MPI can combine them: `plain`, and wider where it must be."""
    return plain(tensor.to(WIDER.get(tensor.dtype, tensor.dtype)))


def joined(chunks: Sequence[Tensor]) -> Tensor:
    return torch.cat([chunk.reshape(-1) for chunk in chunks])


def deal(flat: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy the n-th chunk into the n-th output."""
    if len(flat):
        for output, chunk in zip(outputs, flat.chunk(len(outputs)), strict=True):
            output.copy_(chunk.view(output.shape))


def fill(tensor: Tensor, wire: Tensor) -> None:
    """Copy the result into the tensor where MPI has worked on a copy of it."""
    if wire.data_ptr() != tensor.data_ptr() or wire.dtype != tensor.dtype:
        tensor.copy_(wire)
