"""The worker: one loop, the same for every strategy, transport, model and data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from paceline.common.asked import Asked
from paceline.common.intervals import due, seconds_of
from paceline.data.accumulated import Accumulated
from paceline.data.base import Stream
from paceline.data.batches import Batches, ShardBatches, StreamBatches
from paceline.errors import PeerLost
from paceline.optim.schedules import Plateau
from paceline.privacy.worker import Private
from paceline.record import checkpoint
from paceline.record.keep import Keep
from paceline.record.network import Interface
from paceline.record.profile import Profile
from paceline.record.resources import Task, reset_rss_peak
from paceline.record.sampler import NetBytes, Sampler
from paceline.record.writer import Recorder
from paceline.request.session import Session
from paceline.request.speeds import Speeds
from paceline.run import looking
from paceline.run import state as snapshot
from paceline.run.balance import Balance, look_at_balance
from paceline.run.ema import Ema
from paceline.run.gathering import Gathering
from paceline.run.leaving import Leaving
from paceline.run.minutes import Minutes
from paceline.run.rank import Notify, Rank
from paceline.run.server import run_server
from paceline.run.start import before_the_run
from paceline.run.step_log import (
    StepLog,
    mean_message_bytes,
    message_bytes,
    place_of,
    summary_of,
)
from paceline.run.stopping import Stopping
from paceline.run.timer import StepTimer
from paceline.run.whole import write_weights
from paceline.transport.activity import Activity
from paceline.transport.base import Transport
from paceline.types import Batch, RecorderLike

T = TypeVar("T")


def run_worker(
    session: Session,
    transport: Transport,
    notify: Notify,
    alone_on_host: bool = False,
    asked: Asked | None = None,
) -> None:
    """Everything that one rank does, from its first byte to its last.

    `asked`: tells whether it was asked to leave with a checkpoint; None: it never is.
    """
    job = session.job
    torch.set_num_threads(job.threads)
    reset_rss_peak()
    recorder = Recorder(
        session.out / "events" / f"worker-{transport.rank}.jsonl", transport.rank, session.number
    )
    task = Task.own(alone_in_process=transport.traits.runs_as == "processes")
    sampler = Sampler(recorder, job.config.sample_every_s, task, whole_machine=transport.rank == 0)
    if alone_on_host:
        sampler.sockets = Interface()
    sampler.start()
    try:
        with before_the_run(job.strategy().traits.survives):
            if transport.rank >= job.workers:  # a server ends, or begins again, with worker 0
                run_server(session, transport, recorder, notify, sampler)
                return
            worker = Worker(session, transport, recorder, notify, sampler, asked)
        try:
            worker.train()
            worker.conclude()
        except PeerLost as lost:
            if lost.rank in worker.ctx.servers:
                worker.rescue()
                raise PeerLost(
                    lost.rank,
                    f"it was a server; worker 0's weights are in {session.out / 'checkpoints'}",
                ) from None
            raise
        finally:
            if worker.private is not None:
                worker.private.settle()
    finally:
        sampler.stop()
        recorder.close()


class Worker:
    """One worker of a run: its replica, its batches, its strategy, and the loop over them."""

    def __init__(
        self,
        session: Session,
        transport: Transport,
        recorder: RecorderLike,
        notify: Notify,
        sampler: Sampler | None = None,
        asked: Asked | None = None,
    ) -> None:
        job = session.job
        self.session, self.job, self.config = session, job, job.config
        self.recorder, self.notify = recorder, notify
        self.rank, self.sampler, self.net = transport.rank, sampler, NetBytes(sampler)
        self.profile = Profile() if job.config.profile else None
        place = Rank.of(session, transport, recorder, notify)
        self.meter, self.faults = place.meter, place.faults
        self.strategy, self.ctx, self.along = place.strategy, place.ctx, place.along
        self.leads = self.ctx.worker_index == 0  # this worker notifies, and saves the weights
        self.device = session.device
        self.now = transport.now
        self.timer = StepTimer(now=self.now)
        self.private = (
            Private(session, self.ctx, self.device) if job.protection is not None else None
        )
        drawn = self.private.batches() if self.private is not None else self._batches()
        self.balance = self._balance(drawn)
        several = job.config.accumulate > 1
        self.batches = Accumulated(drawn, job.config.accumulate) if several else drawn
        schedule = job.schedule()
        self.schedule = job.scaled(schedule)
        self.stopping = Stopping(job.config, schedule if isinstance(schedule, Plateau) else None)
        self.ema = Ema(job.config.ema) if job.config.ema is not None else None
        self.keep = Keep.read(job.config.keep)
        self.total_steps = self._total_steps()
        self.step = 0
        self.gathering = Gathering(self.ctx, self.strategy.traits, recorder)
        # for --until-converged: the weights when the epoch began
        self.epoch_start: list[Tensor] = []
        self.log = StepLog(place, recorder, self.timer, self.private, self.total_steps)

        # The step that the run goes on from, as long as later checkpoints may have to be removed.
        self.resumed_at: int | None = None
        self.replica = place.replica()
        self.whole_order = place.whole_order
        snapshot.set_up(self)
        if self.config.compile is not None:
            self.replica.compile(self.config.compile)
        self.looks = looking.Looks(self)
        seconds = seconds_of(self.config.checkpoint_every)
        self.minutes = Minutes(seconds, self.step) if seconds is not None else None
        self.leaving = Leaving(self, asked)
        self.gathering.begin()
        notify("ready" if self.leads else "begins", {})
        recorder.write(
            "start",
            **place_of("worker", job.threads, transport.traits, self.now()),
            from_step=self.step,
            total_steps=self.total_steps,
            parameters=self.replica.parameter_count,
            memory_format="channels_last" if self.replica.channels_last else "contiguous",
            **message_bytes(self.along, self.replica.regions),
            **({"split": self.replica.part.described()} if job.arrangement.form else {}),
        )

    # --- setting up

    def _batches(self) -> Batches:
        job, train = self.job, self.job.data.train
        stand_in = not self.strategy.traits.skips_empty
        if isinstance(train, Stream):
            return StreamBatches(
                train,
                job.batch_sizes[0],
                job.workers,
                self.along.worker_index,
                self.config.seed,
                self.device,
                stand_in,
                job.split,
            )
        # Batches whose sizes change are not known ahead.
        changing = str(self.config.balance or "").startswith("measured")
        shards, seed = self.session.shards(), None if changing else self.config.seed
        me = self.along.worker_index
        return ShardBatches(train, shards, me, self.device, stand_in, seed, job.split)

    def _balance(self, drawn: Batches) -> Balance | None:
        asked = self.config.balance
        every = Speeds.read(asked, self.job.workers).every if asked is not None else None
        if every is None or self.job.workers == 1:
            return None
        assert isinstance(drawn, ShardBatches)
        return Balance(every, drawn.shards, self.ctx.peers.uncounted().control)

    def _total_steps(self) -> int | None:
        """Return the steps of the whole run, or None where only its course decides."""
        known = [self.job.steps]
        if self.private is not None:
            known.append(self.private.protection.until)
        if self.job.epochs is not None and self.batches.steps_per_epoch is not None:
            known.append(self.job.epochs * self.batches.steps_per_epoch)
        return min((k for k in known if k is not None), default=None)

    # --- the loop

    def train(self) -> None:
        """Make steps until the run is over."""
        strategy, replica, timer = self.strategy, self.replica, self.timer
        activity = self.activity
        if self.config.until_converged is not None and not self.epoch_start:
            self.epoch_start = [w.clone() for w in replica.weights()]
        self.meter.phase = "train"
        self.net.start()
        timer.start()
        if self._is_over():
            self.say(
                f"already at step {self.step} after {self.batches.epochs_done} epochs: no step is"
                " left to make"
            )
            return
        self.log.start()
        for batch in self.batches:
            if self.profile is not None:
                self.profile.next_step()
            began = timer.since
            replica.set_lr_factor(self.schedule(batch.step, self.total_steps))
            loss = self._compute(batch)
            self.log.computed(replica.gradient_bytes)
            arrived = self.now()
            activity.enter("exchange")
            if replica.precision.scale is None or looking.all_finite(self):
                strategy.step(replica, batch)
            else:
                strategy.skip(replica, batch)
            if self.ema is not None:
                self.ema.update(replica)

            self.step = batch.step + 1
            activity.enter("load")
            own_s = self.log.write(self.step, batch, loss, began, arrived, timer.lap())
            if self.balance is not None:
                look_at_balance(self, self.balance, batch, own_s)
            if self._look_around(batch.epoch + 1) or self.leaving.leaves(self):
                break
        self.net.stop()
        if self.profile is not None:
            self.profile.pause()
        self.meter.phase = "finish"

    def _look_around(self, epoch: int) -> bool:
        """Evaluate and save where that is due. Returns whether training is over."""
        ended, config, over = self.batches.ended, self.config, self._is_over()
        if ended and config.until_converged is not None and not over:
            over = looking.converged(self)
        # Workers that stop alone do not come together: others may have stopped already.
        if self.strategy.traits.decides_alone and config.until_converged is not None:
            return over
        best = False
        if not over and due(config.evaluate_every, self.step, epoch, ended):
            looking.evaluate(self, epoch)
            over = self.stopping.reason is not None
            best = self.keep.best and self.stopping.improved
            if over:
                self.say(f"stopped after step {self.step}: {self.stopping.reason}")
        if best or due(config.checkpoint_every, self.step, epoch, ended) or self._minutes_passed():
            self.checkpoint(best)
        return over

    def _minutes_passed(self) -> bool:
        if self.minutes is None or not self.minutes.looks(self.step):
            return False
        minutes = self.minutes
        return self.aside("clock", lambda: minutes.due(self.step, self.ctx.peers))

    def say(self, notice: str) -> None:
        if self.leads:
            self.notify("notice", {"text": notice})

    @property
    def activity(self) -> Activity:
        return self.ctx.transport.patience.activity

    def _compute(self, batch: Batch) -> float:
        self.activity.enter("compute", batch.step + 1)
        for fault in self.faults:
            fault.before_step(batch.step + 1, self.ctx.transport.uncounted())
        began = self.now()
        gradients = self.private or self.replica
        self.replica.part.begin(batch.step, batch.first)
        self.strategy.begin(self.replica, batch)
        loss = gradients.forward_backward(batch, self.strategy.scale(batch))
        for fault in self.faults:
            fault.after_compute(self.now() - began, self.ctx.transport.uncounted())
        return loss

    def conclude(self) -> None:
        """Agree on the final weights, save and evaluate them, write the summary.

        Workers that have left with a checkpoint save and evaluate nothing more.
        """
        self.activity.enter("finish")
        self.meter.phase = "finish"
        undone = [*self.replica.held, *self._buffers]
        weights, average = self.gathering.do(self._final_weights, self.step, undone)
        if not self.leaving.left:
            self._save_and_evaluate(weights, average)
        if self.profile is not None:
            self.recorder.write("profile", **self.profile.tables())
        for notice in self.replica.flat.notices if self.replica.flat else ():
            self.notify("notice", {"text": notice})
        self.recorder.write(
            "summary",
            **summary_of(self.sampler, self.net, self.meter),
            times_known=self.meter.times_known,
            **mean_message_bytes(self.along, self.replica.regions),
            **self.replica.part.summary(),
        )
        self.gathering.part(self.step)
        self.strategy.leave()

    def _save_and_evaluate(
        self, weights: Sequence[Tensor] | None, average: Sequence[Tensor]
    ) -> None:
        if self.along.worker_index == 0:  # before the last evaluation, which may fail
            self._save_weights("model.safetensors", weights)
            if average:
                self._save_weights("model-ema.safetensors", average)
        if self.leads and self.resumed_at is not None:
            checkpoint.forget_after(self.session.out / "checkpoints", self.resumed_at)
        looking.evaluate(self, None)
        if self.leads and self.stopping.improved:  # the final weights are the best
            (self.session.out / "checkpoints" / checkpoint.BEST).unlink(missing_ok=True)

    def _final_weights(self) -> tuple[Sequence[Tensor] | None, Sequence[Tensor]]:
        """The consensus weights of all workers after their last step, and their moving average."""
        self.strategy.finish(self.replica)
        weights = self.strategy.consensus(self.replica)
        if self.ema is None:
            return weights, ()
        return weights, self.ema.agreed(self.ctx, self.strategy.traits.replicas_identical)

    def _save_weights(self, name: str, weights: Sequence[Tensor] | None) -> None:
        with self.replica.holding(weights):
            state = self.replica.state_dict()
        write_weights(self.replica.part, state, self.session.out / name)

    def _is_over(self) -> bool:
        steps, epochs = self.job.steps, self.job.epochs
        if self.private is not None and self.step >= self.private.protection.until:
            return True
        if steps is not None and self.step >= steps:
            return True
        return epochs is not None and self.batches.epochs_done >= epochs

    # --- keeping

    def rescue(self) -> None:
        """After a server's death: save worker 0's weights as a checkpoint to resume from."""
        if self.leads:
            snapshot.rescue(self)

    @property
    def _buffers(self) -> list[Tensor]:
        """The batch statistics and the like, which the consensus averages in place."""
        replica = self.replica
        return [*replica.float_buffers, *replica.common_buffers, *replica.integer_buffers]

    def checkpoint(self, best: bool = False) -> None:
        """Write a checkpoint, all workers together."""

        def save() -> Path:
            self.activity.enter("save")
            return snapshot.save(self, best)

        path = self.aside("checkpoint", save)
        if self.leads:
            self.recorder.write("checkpoint", step=self.step, path=str(path), best=best)

    def aside(self, what: str, body: Callable[[], T]) -> T:
        """Do something that is not training, all workers together. It is counted apart."""
        began = self.now()
        self.net.stop()
        if self.profile is not None:
            self.profile.pause()
        with self.meter.during("evaluate"):
            result = self.gathering.do(body, self.step, self._buffers)
        self.recorder.write(
            "aside", what=what, step=self.step, began=began, seconds=self.now() - began
        )
        self.net.start()
        self.timer.start()
        return result
