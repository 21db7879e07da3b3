"""Calls that all workers make together, after the same number of steps: finish, save, consensus."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import BadRequest
from paceline.transport.base import Transport, Work

STEPS_TAG = 97
REMEDY = (
    "Give all workers as many batches (as pace.prepare does), or let all of them stop together: if"
    " pace.any(done): break"
)


def agree_on_steps(transport: Transport, workers: int, steps: int, call: str) -> None:
    """Raise BadRequest unless all workers make this call, after as many steps.

    A worker that is still making steps waits in an exchange for this one, and this one waits here
    for it. It posts its wait, with the number of its step; by that this worker notices.
    """
    line = transport.uncounted().control
    counts = torch.zeros(workers, dtype=torch.int64)
    counts[line.rank] = steps
    if line.rank == 0:
        heard = [torch.zeros_like(counts) for _ in range(workers - 1)]
        awaited = [line.irecv(h, rank, STEPS_TAG) for rank, h in enumerate(heard, start=1)]
        for rank, work in enumerate(awaited, start=1):
            _await(line, work, rank, steps, workers, call)
        counts += sum(heard, torch.zeros_like(counts))
        for rank in range(1, workers):
            line.send(counts, rank, STEPS_TAG)
    else:
        all_counts = torch.zeros_like(counts)
        said, answer = line.isend(counts, 0, STEPS_TAG), line.irecv(all_counts, 0, STEPS_TAG)
        _await(line, answer, 0, steps, workers, call)
        said.wait()
        counts = all_counts
    _compare(counts)


def _compare(counts: Tensor) -> None:
    if len(set(counts.tolist())) > 1:
        told = ", ".join(f"worker {rank} {count}" for rank, count in enumerate(counts.tolist()))
        raise BadRequest(f"the workers have made different numbers of steps: {told}. {REMEDY}")


def _await(line: Transport, work: Work, rank: int, steps: int, workers: int, call: str) -> None:
    patience = line.patience
    with patience.waiting(f"all to call {call}", rank, gives_up=False) as look:
        while line.wait_any([work], patience.post_s) is None:
            look()
            for other, step in patience.steps_of_waiting().items():
                if other < workers and step > steps:
                    raise BadRequest(_apart(call, line.rank, steps, other, step))
    work.wait()


def _apart(call: str, rank: int, steps: int, other: int, step: int) -> str:
    if call == "pace.finish":
        return (
            f"the workers make different numbers of steps: worker {rank} has finished after"
            f" {steps}, and worker {other} waits in step {step}. {REMEDY}"
        )
    return (
        f"worker {rank} called {call} after step {steps}, and worker {other} did not: it waits in"
        f" step {step}. All workers call {call} together; `if pace.leads:` belongs inside"
    )
