"""Leaving a run early with a checkpoint: all workers agree on the step after which they leave.

A worker is asked by a signal, or by the clock (--max-time). How the others learn of it depends on
how far the workers may run apart:

    threads     share the request; the first that sees it chooses a step that none has passed
    in step     look every second, all at a step that was agreed on in the look before
    apart       look only when they meet; a worker that was asked waits for the others, and all
                leave after the step of the fastest

So a worker of an asynchronous strategy never waits for a slower one until it is asked to leave.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.common.asked import STAYS, TIME_IS_OVER, Asked
from paceline.common.units import LONG_TIMES, parse_unit

if TYPE_CHECKING:
    from paceline.run.worker import Worker

LOOK_S = 1.0  # between two looks of workers in step
BOUNDED_S = 5.0  # the same where workers may be some steps apart: a look brings them together
LATE_S = 5.0  # the longest that a look waits for the next exchange


class Way(Protocol):
    """One way to agree. `after` is called after every step, and returns why to leave now."""

    def after(self, worker: Worker) -> int: ...


class Leaving:
    """Ends one worker's training after a step, together with all others."""

    def __init__(self, worker: Worker, asked: Asked | None) -> None:
        self.way: Way | None = None
        self.left = False
        if asked is not None:
            limit = worker.config.max_time
            limit_s = parse_unit(limit, LONG_TIMES, "max_time") if limit else float("inf")
            request = Request(asked, worker.job.started + limit_s)
            self.way = _way(worker, request)

    def leaves(self, worker: Worker) -> bool:
        """Whether the run ends here, before its time: then a checkpoint has been written."""
        why = self.way.after(worker) if self.way is not None else STAYS
        if why == STAYS:
            return False
        worker.notify("leaving", {})
        worker.checkpoint()
        self.left = True
        if worker.leads:
            worker.notify("left", {"why": why, "step": worker.step})
        return True


def _way(worker: Worker, request: Request) -> Way:
    traits, transport = worker.strategy.traits, worker.ctx.transport
    if worker.ctx.workers == 1 or transport.traits.take_turns:
        return Sharing(request)
    if traits.in_step:
        return Looking(request, worker.step, LOOK_S, _steps_between_exchanges(worker))
    if traits.bounded:
        return Looking(request, worker.step, BOUNDED_S)
    return Apart(request)


def _steps_between_exchanges(worker: Worker) -> int:
    """How many steps workers make alone: a look after an exchange makes none of them wait."""
    every = str(getattr(worker.strategy, "every", 1))
    return max(1, int(every)) if every.isdecimal() else 1


class Request:
    """Why this worker should leave, as far as it knows itself."""

    def __init__(self, asked: Asked, until: float) -> None:
        self.asked, self._until = asked, until

    @property
    def why(self) -> int:
        over = time.perf_counter() >= self._until
        return self.asked.why or (TIME_IS_OVER if over else STAYS)


class Sharing:
    """For ranks that are threads of one process, and for a single worker.

    Workers report each step before they go on. So the greatest step that another worker has
    reported, plus one, is a step that no worker has passed.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._asked = request, request.asked

    def after(self, worker: Worker) -> int:
        me, asked = worker.ctx.worker_index, self._asked
        with asked.lock:
            asked.steps[me] = worker.step
            if asked.leave_at is None:
                if not (why := self._request.why):
                    return STAYS
                others = [step + 1 for index, step in asked.steps.items() if index != me]
                asked.leave_at, asked.why = max([worker.step, *others]), why
            return asked.why if worker.step >= asked.leave_at else STAYS


class Looking:
    """For workers that are never more than a few steps apart.

    At each look all workers tell each other whether they were asked, and worker 0's clock chooses
    the step of the next look. `every`: the steps between two exchanges.
    """

    def __init__(self, request: Request, step: int, look_s: float, every: int = 1) -> None:
        self._request, self._look_s, self._every = request, look_s, every
        self.next_look = step + 1
        self._since, self._looked = step, time.perf_counter()

    def after(self, worker: Worker) -> int:
        if worker.step < self.next_look:
            return STAYS
        # One word per second is no payload, and no event of the record.
        with worker.meter.during("evaluate"):
            why, self.next_look = worker.gathering.do(lambda: self._look(worker), worker.step)
        return why

    def _look(self, worker: Worker) -> tuple[int, int]:
        said = torch.tensor([self._request.why, 0])
        if worker.leads:
            said[1] = self._next(worker.step)
        worker.ctx.peers.uncounted().control.all_reduce(said, "max")
        return int(said[0]), int(said[1])

    def _next(self, step: int) -> int:
        """The step of the next look; at most twice as far as this one was from the last."""
        now, steps = time.perf_counter(), max(1, step - self._since)
        per_step_s = max(1e-6, (now - self._looked) / steps)
        self._since, self._looked = step, now
        after = step + max(1, min(2 * steps, int(self._look_s / per_step_s)))
        whole = -(-after // self._every) * self._every
        return whole if (whole - step) * per_step_s <= LATE_S else after


class Apart:
    """For workers that wait for each other only in evaluations, checkpoints and at the end.

    A worker that was asked comes to the others' next meeting, and says its step. If all came for
    that reason, all leave after the greatest of these steps. If others came to evaluate, say, this
    worker trains on until it comes there too, and then all leave.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._agreed: tuple[int, int] | None = None  # why, and after which step

    def after(self, worker: Worker) -> int:
        gathering = worker.gathering
        if self._agreed is None and not gathering.expected:
            if not (why := self._request.why):
                return STAYS
            self._agreed = gathering.leave(worker.step, why)
        if self._agreed is not None:
            why, step = self._agreed
            return why if worker.step >= step else STAYS
        return gathering.leaving
