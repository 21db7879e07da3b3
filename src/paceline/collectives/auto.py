"""`collective=auto` measures which all-reduce is fastest for a buffer, and uses that one.

It measures on the buffer itself, so the choice depends on its size, the number of ranks and the
transport. All ranks make the same choice: the slowest rank's times decide. The transport's own
all-reduce is kept unless another one is clearly faster, so that the choice, and with it the order
in which floats are added, is usually the same from run to run.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
from torch import Tensor

from paceline.collectives.base import TRIED, Collective, choose
from paceline.registry import collectives
from paceline.transport.base import Op, Transport

CLEARLY = 0.9  # another collective must take less than this fraction of the first one's time
ROUNDS = 5
BUDGET_S = 1.0  # per size, roughly


class Auto(Collective):
    """`collective=auto`."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        collectives.discover()
        native = ["native"] if "all_reduce" in transport.traits.native else []
        names = [*native, *sorted(TRIED, key=lambda name: (name != "ring", name))]
        self._candidates = {name: choose(name, transport) for name in names}
        self._default = names[0]
        self._chosen: dict[int, str] = {}

    def all_reduce(self, buffer: Tensor, op: Op = "sum") -> None:
        self._candidates[self._chosen.get(buffer.nbytes, self._default)].all_reduce(buffer, op)

    @property
    def choices(self) -> dict[str, str]:
        return {str(size): name for size, name in self._chosen.items()}

    def obey(self, choices: dict[str, str]) -> None:
        self._chosen.update(
            {int(size): name for size, name in choices.items() if name in self._candidates}
        )

    def prepare(self, buffer: Tensor) -> None:
        if self.transport.size == 1 or buffer.nbytes in self._chosen or not buffer.numel():
            return
        names = [n for n in self._candidates if buffer.nbytes <= TRIED.get(n, math.inf)]
        if self.transport.traits.take_turns:  # ranks take turns, so their times say nothing
            names = names[:1]
        kept = buffer.clone()
        times = self._measure(names, buffer) if len(names) > 1 else [0.0]
        buffer.copy_(kept)
        best = min(range(len(names)), key=lambda i: times[i])
        self._chosen[buffer.nbytes] = names[best] if times[best] < CLEARLY * times[0] else names[0]

    def _measure(self, names: list[str], buffer: Tensor) -> list[float]:
        """The median seconds of each collective in interleaved rounds, on the slowest rank."""
        seconds: list[list[float]] = [[] for _ in names]
        rounds = 1 + ROUNDS
        done = 0
        while done < rounds:
            for name, taken in zip(names, seconds, strict=True):
                buffer.zero_()
                self.transport.barrier()
                began = time.perf_counter()
                self._candidates[name].all_reduce(buffer)
                taken.append(time.perf_counter() - began)
            done += 1
            if done == 1:  # the warm-up also tells how many rounds fit into the budget
                total = torch.tensor([sum(t[0] for t in seconds)], dtype=torch.float64)
                self.transport.control.all_reduce(total, "max")
                rounds = 1 + max(1, min(ROUNDS, int(BUDGET_S / max(1e-6, float(total)))))
        slowest = torch.tensor([statistics.median(t[1:]) for t in seconds], dtype=torch.float64)
        self.transport.control.all_reduce(slowest, "max")
        return [float(v) for v in slowest]
