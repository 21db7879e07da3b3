"""Threshold: numbers above a multiple of the root mean square are sent (after Strom, 2015).

    all x with |x| >= times * rms(x) ;  at most the fraction `most` of the vector: the largest

The length of messages differs from step to step and from worker to worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from paceline.codecs.base import State, refuse_nonfinite
from paceline.codecs.packing import sparse
from paceline.codecs.topk import SparseCodec, check_ratio, how_many
from paceline.errors import BadRequest
from paceline.registry import codecs
from paceline.types import Layout


@codecs.register("threshold")
@dataclass
class Threshold(SparseCodec):
    """Numbers that are large compared with the root mean square; the rest is sent later."""

    times: Annotated[float, "send numbers of at least this many times the root mean square"] = 2.0
    most: Annotated[float, "the largest fraction of the numbers that is sent"] = 0.1
    feedback: Annotated[bool, "error feedback: add what is left out to the next message"] = True

    biased = True
    varies = True

    def check(self) -> None:
        check_ratio(self.name, "most", self.most)
        if not 0.0 <= self.times < float("inf"):
            raise BadRequest(f"threshold: times={self.times:g}: it must be 0 or more")

    def message_bytes(self, layout: Layout) -> int:
        return sparse.message_bytes(layout.numel, how_many(self.most, layout.numel))

    def encode(self, values: Tensor, layout: Layout, message: Tensor, state: State) -> int:
        n = values.numel()
        aside = self.scratch("magnitudes", n, values.dtype, values.device)
        rms = torch.linalg.vector_norm(values) / max(1, n) ** 0.5
        refuse_nonfinite(rms, self.name)
        indices = (
            (torch.abs(values, out=aside) >= max(float(rms) * self.times, 1e-38)).nonzero().view(-1)
        )
        most = how_many(self.most, n)
        if indices.numel() > most:
            indices = sparse.largest(values, most, aside)
        return sparse.write(values, indices, message)
