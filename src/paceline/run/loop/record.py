"""The record of a loop of the user's own: `join(out=DIR)` writes what `train` writes.

A step begins where the last one ended. What comes between two passes over the batches, evaluations
and checkpoints are not training, and are counted apart. With several pairs of model and optimizer,
the steps of the first pair are the steps of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.data.own import Watcher
from paceline.errors import RunFailed
from paceline.record import checkpoint
from paceline.record.resources import Task
from paceline.record.sampler import NetBytes, Sampler
from paceline.record.writer import Recorder
from paceline.request.config import Config
from paceline.run.loop.conclusion import Conclusion, Failure, collect
from paceline.run.loop.saving import weights_of
from paceline.run.rank import Notify
from paceline.run.server import record_serving
from paceline.run.step_log import (
    StepLog,
    mean_message_bytes,
    message_bytes,
    place_of,
    summary_of,
)
from paceline.run.timer import StepTimer
from paceline.strategies.base import Context, Strategy
from paceline.transport.base import Transport
from paceline.transport.metered import Meter, Metered

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.run.loop.pair import Pair


class Unrecorded:
    """Records nothing: `join` without `out`."""

    train_s = 0.0

    def write(self, kind: str, **fields: Any) -> None:
        return

    def metered(self, transport: Transport) -> Transport:
        return transport

    def watch(self, watcher: Watcher) -> Watcher:
        return watcher

    def preparing(self) -> None:
        return

    def prepared(self, pair: Pair) -> None:
        return

    def add_loss(self, pair: Pair | None, loss: Tensor | float) -> None:
        return

    def arrive(self, pair: Pair) -> None:
        return

    def step(self, pair: Pair) -> None:
        return

    def aside(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def evaluated(self, found: dict[str, Any]) -> None:
        return

    def saved(self, path: Path) -> None:
        return

    def loaded(self, train_s: float) -> None:
        return

    def finishing(self) -> None:
        return

    def finished(self, pairs: Iterable[Pair], agreed: bool) -> None:
        return

    def failed(self, failure: Failure) -> None:
        return

    def serve(self, strategy: Strategy, ctx: Context, replica: Replica) -> None:
        strategy.serve(ctx, replica)


@dataclass
class Place:
    """What a log of steps looks at."""

    strategy: Strategy
    ctx: Context
    meter: Meter
    parts: int = 1
    notify: Notify = lambda kind, content: None


class Recorded:
    """The record of one rank. Rank 0 writes what concerns the run.

    `release` is called when the record is complete, or has been given up.
    """

    def __init__(
        self,
        transport: Transport,
        conclusion: Conclusion,
        session: int = 0,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.out, self.conclusion = transport.rank, conclusion.out, conclusion
        self._release, self.ended = release, False
        self.recorder = Recorder(self._events_of(self.rank), self.rank, session)
        self._traits, self.meter = transport.traits, Meter()
        task = Task.own(alone_in_process=transport.traits.runs_as == "processes")
        self.sampler = Sampler(
            self.recorder, Config().sample_every_s, task, whole_machine=self.rank == 0
        )
        self.net, self.timer = NetBytes(self.sampler), StepTimer()
        self._first: Pair | None = None
        self._log: StepLog | None = None  # of the first pair
        self._begun = False  # the steps of this session have begun
        self._arrived: float | None = None  # when this worker came to the exchange of the step
        self._losses: list[Tensor | float] = []  # since the last step
        self._is_aside = False
        self.sampler.start()

    def _events_of(self, rank: int) -> Path:
        return self.out / "events" / f"worker-{rank}.jsonl"

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def train_s(self) -> float:
        return self.timer.total_s

    def write(self, kind: str, **fields: Any) -> None:
        self.recorder.write(kind, **fields)

    def metered(self, transport: Transport) -> Transport:
        """Return the transport with counters."""
        return Metered(transport, self.meter)

    def watch(self, watcher: Watcher) -> Watcher:
        """Return a watcher that notes where a pass over the batches begins."""
        return _Passes(watcher, self._begin_pass)

    # --- before the loop

    def preparing(self) -> None:
        """Count what follows as setup."""
        self.meter.phase = "setup"

    def prepared(self, pair: Pair) -> None:
        """Count what follows as training. The first pair is the one whose steps are recorded."""
        self.meter.phase = "train"
        if self._first is None:
            self._first = pair
            self._log = StepLog(Place(pair.strategy, pair.ctx, self.meter), self, self.timer)
            if self.leads:
                self.conclusion.know(pair)
        self._start_timer()

    def _start_timer(self) -> None:
        self.net.start()
        self.timer.start()

    def _begin(self) -> None:
        """Write the first event of a session of steps."""
        pair = self._first
        if self._begun or pair is None:
            return
        self._begun = True
        if self.leads:
            self.conclusion.begin()
        self.write(
            "start",
            **place_of("worker", torch.get_num_threads(), self._traits, time.perf_counter()),
            from_step=pair.steps,
            total_steps=None,
            parameters=pair.replica.parameter_count,
            memory_format=None,
            **message_bytes(pair.ctx, pair.replica.regions),
        )

    # --- in the loop

    def _begin_pass(self) -> None:
        if self._begun:
            self._not_training("between passes", self.timer.since)
        self._begin()
        self._start_timer()

    def add_loss(self, pair: Pair | None, loss: Tensor | float) -> None:
        """Note a loss of the next step; several add up, as their gradients do."""
        if pair is None or pair is self._first:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def arrive(self, pair: Pair) -> None:
        """This worker comes to the exchange of a step."""
        if pair is self._first and self._arrived is None:
            self._begin()
            self._arrived = time.perf_counter()

    def step(self, pair: Pair) -> None:
        """Record a step of the first pair, with what happened since its last one."""
        if pair is not self._first or self.ended:
            return
        assert self._log is not None
        loss = sum(float(part) for part in self._losses) if self._losses else None
        began, seconds = self.timer.since, self.timer.lap()
        self._log.write(pair.steps, pair.last, loss, began, self._arrived or began, seconds)
        self._arrived = None
        self._losses.clear()

    def _not_training(self, what: str, began: float) -> None:
        self.net.stop()
        seconds = time.perf_counter() - began
        self.write("aside", what=what, step=self._steps, began=began, seconds=seconds)

    @property
    def _steps(self) -> int:
        return self._first.steps if self._first is not None else 0

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Do something that is not training: its time and its bytes are counted apart."""
        if self._is_aside or self._first is None or self.ended:
            yield
            return
        began, self._is_aside = time.perf_counter(), True
        self.net.stop()
        try:
            with self.meter.during("evaluate"):
                yield
        finally:
            self._is_aside = False
        self._not_training(what, began)
        self._start_timer()

    def evaluated(self, found: dict[str, Any]) -> None:
        """Write the numbers of an evaluation. The time since the last step was the evaluation."""
        found = {"step": self._steps, "train_s": self.timer.total_s, **found}
        if self.ended:
            self._add(found)
            return
        if self._first is not None:
            self._begin()
            self._not_training("evaluation", self.timer.since)
        if self.leads:
            self.write("evaluation", **found)
        self._start_timer()

    def _add(self, found: dict[str, Any]) -> None:
        """Write an evaluation that came after `finish`, and the record once more."""
        if self.leads:
            recorder = Recorder(self._events_of(0), 0, self.recorder.session)
            recorder.write("evaluation", **found)
            recorder.close()
            self.conclusion.conclude(None)

    def saved(self, path: Path) -> None:
        if self.leads and not self.ended:
            self.write("checkpoint", step=self._steps, path=str(path), best=False)

    def loaded(self, train_s: float) -> None:
        """The loop goes on from a checkpoint: steps that were made after it are undone."""
        if self._begun:
            self.recorder.session += 1
            self._begun = False
        self.timer.total_s = train_s

    # --- the end

    def finishing(self) -> None:
        """Count what follows as the end of training."""
        self.net.stop()
        self.meter.phase = "finish"

    def finished(self, pairs: Iterable[Pair], agreed: bool) -> None:
        """Write the weights, the summary of this rank and, on rank 0, the run's record.

        `agreed`: the models hold consensus weights. Otherwise they are written only where all
        workers hold the same.
        """
        pairs = list(pairs)
        agreed = agreed or all(
            pair.strategy.traits.replicas_identical or pair.ctx.workers == 1 for pair in pairs
        )
        if self._first is not None:
            self._begin()
            if self.leads and agreed:
                checkpoint.save_weights(self.out / "model.safetensors", weights_of(pairs))
            regions, ctx = self._first.replica.regions, self._first.ctx
            more = {"times_known": self.meter.times_known, **mean_message_bytes(ctx, regions)}
            self._summarise(more)
            self._close()
            collect(ctx.transport.uncounted().control, self._events_of)
        self._close()
        if self.leads:
            self.conclusion.conclude(None)
        self._end()

    def _summarise(self, more: dict[str, Any]) -> None:
        self.write("summary", **summary_of(self.sampler, self.net, self.meter), **more)

    def failed(self, failure: Failure) -> None:
        """The loop ends before `finish`: write the record of what there is."""
        if self.ended:
            return
        with suppress(ValueError, RunFailed):  # a closed file, a full disk
            self.write("failed", **failure.fields())
        self._close()
        if self.leads:
            self.conclusion.conclude(failure)
        self._end()

    def _close(self) -> None:
        self.sampler.stop()
        self.recorder.close()

    def _end(self) -> None:
        self.ended = True
        self._release()

    # --- a server

    def serve(self, strategy: Strategy, ctx: Context, replica: Replica) -> None:
        """Serve until the workers have left, and record it."""
        record_serving(strategy, ctx, replica, self.recorder, self.sampler, self.meter)
        self._close()
        collect(ctx.transport.uncounted().control, self._events_of)
        self._end()


Record = Unrecorded | Recorded


class _Passes:
    """A watcher that also tells when a pass begins."""

    def __init__(self, inner: Watcher, began: Callable[[], None]) -> None:
        self.begin_batch, self.end_batch = inner.begin_batch, inner.end_batch
        self._inner, self._began = inner, began

    def begin_pass(self) -> None:
        self._inner.begin_pass()
        self._began()
