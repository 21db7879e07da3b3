"""What a worker writes after every step, and what worker 0 tells the person who watches."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from paceline.privacy.times import SummedTimes
from paceline.privacy.worker import Private
from paceline.record.machine import boot_id
from paceline.record.sampler import NetBytes, Sampler
from paceline.run.rank import Notify
from paceline.run.timer import StepTimer
from paceline.strategies.base import Context, Strategy
from paceline.transport.base import Traits
from paceline.transport.metered import Meter
from paceline.types import Batch, RecorderLike, Role

if TYPE_CHECKING:
    from paceline.replica.flat import Region

NOTIFY_EVERY_S = 0.2
RATE_OVER_STEPS = 200


class Place(Protocol):
    """Where steps are made: what a log of them looks at."""

    strategy: Strategy
    ctx: Context
    meter: Meter

    @property
    def parts(self) -> int:
        """The workers that hold a copy of the model together."""
        ...

    @property
    def notify(self) -> Notify: ...


class StepLog:
    """Writes step events. The traffic of a step is what the meter counted since the step before."""

    def __init__(
        self,
        rank: Place,
        recorder: RecorderLike,
        timer: StepTimer,
        private: Private | None = None,
        total_steps: int | None = None,
    ) -> None:
        self.rank, self.recorder, self.timer = rank, recorder, timer
        self.private, self.total_steps = private, total_steps
        silent = private is not None and not private.settings.reveal
        self._summed = SummedTimes(total_steps) if silent else None
        self._leads = rank.ctx.worker_index == 0
        self._before = replace(rank.meter.totals["train"])
        self._last_notice = 0.0
        self._inside = 0  # bytes of activations that this worker sent in this step
        # (seconds trained, samples of all workers) of the last steps
        self._recent: deque[tuple[float, float]] = deque(maxlen=RATE_OVER_STEPS)

    def start(self) -> None:
        """Count traffic from now on."""
        self._before = replace(self.rank.meter.totals["train"])

    def computed(self, gradient_bytes: int) -> None:
        """The passes of a step are made: what was sent in them, but for gradients, is activations.

        Only a model that is split sends any.
        """
        sent = self.rank.meter.totals["train"].sent_bytes - self._before.sent_bytes
        self._inside = sent - gradient_bytes

    def write(
        self,
        step: int,
        batch: Batch,
        loss: float | None,
        began: float,
        arrived: float,
        seconds: float,
    ) -> float:
        """Record one step. Returns the seconds that this worker did not wait for others.

        `began` and `arrived`: when the step and when its exchange began, by the transport's `now`.
        """
        strategy, codec = self.rank.strategy, self.rank.ctx.codec
        now, before = self.rank.meter.totals["train"], self._before
        sync_s = now.seconds - before.seconds
        encode_s, decode_s = codec.timer.taken()
        shown = self._shown(batch, loss)
        times = {"compute_s": seconds - sync_s - encode_s - decode_s, "sync_s": sync_s}
        if not codec.lossless:
            times |= {"encode_s": encode_s, "decode_s": decode_s}
        if self._summed is not None:
            told: dict[str, Any] = self._summed.of_step(step, self.timer.total_s, times)
        else:
            waits = strategy.traits.in_step and now.calls > before.calls
            told = {**times, "began": began, "arrived": arrived, "waits": waits}
            told["train_s"] = self.timer.total_s
        self.recorder.write(
            "step",
            step=step,
            epoch=batch.epoch,
            **shown,
            **told,
            sent=now.sent_bytes - before.sent_bytes,
            received=now.received_bytes - before.received_bytes,
            messages=now.messages - before.messages,
            **({"inside": self._inside} if self.rank.parts > 1 else {}),
            **strategy.observed,
        )
        if self._leads:
            self._notify(step, batch, shown["loss"])
        self._before = replace(now)
        return seconds - sync_s

    def _shown(self, batch: Batch, loss: float | None) -> dict[str, Any]:
        if self.private is not None:
            assert loss is not None
            return self.private.revealed(batch, loss)
        parts = self.rank.parts
        # The workers of a copy have the same samples: each counts its share of them.
        own = batch.weight
        if parts > 1:
            own = own / parts if own % parts else own // parts
        return {"n": own, "loss": loss}

    def _notify(self, step: int, batch: Batch, loss: float | None) -> None:
        """Tell the progress a few times a second, and at the last step."""
        self._recent.append((self.timer.total_s, batch.global_weight))
        moment = time.perf_counter()
        if step != self.total_steps and moment - self._last_notice < NOTIFY_EVERY_S:
            return
        self._last_notice = moment
        progress = {
            "step": step,
            "total": self.total_steps,
            "epoch": batch.epoch + 1,
            "loss": loss,
            "samples_per_s": self._rate(),
        }
        if self.private is not None:
            progress["epsilon"] = self.private.epsilon
        self.rank.notify("progress", progress)

    def _rate(self) -> float:
        """Samples per second of all workers over the last steps."""
        (first_s, first), (last_s, _) = self._recent[0], self._recent[-1]
        if last_s > first_s:
            return (sum(samples for _, samples in self._recent) - first) / (last_s - first_s)
        return first / max(1e-9, first_s)


def place_of(role: Role, threads: int, traits: Traits, now: float) -> dict[str, Any]:
    """What the first event of every rank says; `now` is the rank's time."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "role": role,
        "threads": threads,
        "clock": now,
        "over_network": traits.over_network,
    }


def summary_of(sampler: Sampler | None, net: NetBytes, meter: Meter) -> dict[str, Any]:
    """What the last event of every rank says: the resources used, and the traffic."""
    return {
        **(sampler.summary() if sampler else {}),
        "net_sent_bytes": net.sent,
        "net_received_bytes": net.received,
        "setup_sent_bytes": meter.total("setup").sent_bytes,
        "evaluate_sent_bytes": meter.total("evaluate").sent_bytes,
        "finish_sent_bytes": meter.total("finish").sent_bytes,
        "traffic": meter.described(),
    }


def message_bytes(ctx: Context, regions: Sequence[Region]) -> dict[str, int]:
    """The bytes of one encoded message, and of the numbers that it stands for."""
    if ctx.codec.lossless or ctx.workers == 1:
        return {}
    return {
        "message_bytes": sum(ctx.codec.message_bytes(r.grad_layout) for r in regions),
        "plain_bytes": sum(r.grads.nbytes for r in regions),
    }


def mean_message_bytes(ctx: Context, regions: Sequence[Region]) -> dict[str, float]:
    """The mean length of a message, for a codec whose messages differ in length."""
    spent = ctx.codec.timer
    if not spent.messages:
        return {}
    encoded = sum(r.grads.numel() > 0 for r in regions)
    return {"message_bytes": spent.message_bytes / spent.messages * encoded}
