"""Threshold: what is large compared with the rest travels, however many that are (after Strom,
2015).

    all x with |x| >= times * rms(x) ;  at most the part `most` of the vector, then the largest

Messages differ in length from step to step and from worker to worker.
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
    """Whatever is large compared with the root mean square; the rest is remembered."""

    times: Annotated[float, "the root mean square, this many times, is the least that travels"] = (
        2.0
    )
    most: Annotated[float, "the largest part of the vector that travels"] = 0.1
    feedback: Annotated[bool, "remember what is left out"] = True

    biased = True
    varies = True

    def check(self) -> None:
        check_ratio("threshold: most as a", self.most)
        if not 0.0 <= self.times < float("inf"):
            raise BadRequest(f"threshold: times={self.times:g}: 0 or more")

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
