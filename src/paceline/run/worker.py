"""The worker: one loop, the same for every strategy, transport, model and data set."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.common.intervals import due
from paceline.data.base import Stream
from paceline.data.batches import Batches, ShardBatches, StreamBatches
from paceline.errors import NotFinite, PeerLost
from paceline.privacy.worker import Private
from paceline.record import checkpoint
from paceline.record.machine import boot_id
from paceline.record.network import Interface
from paceline.record.profile import Profile
from paceline.record.resources import Task, reset_rss_peak
from paceline.record.sampler import NetBytes, Sampler
from paceline.record.writer import Recorder
from paceline.request.session import Session
from paceline.request.speeds import Speeds
from paceline.run import state as snapshot
from paceline.run.balance import Balance
from paceline.run.evaluation import Evaluation
from paceline.run.rank import Notify, Rank
from paceline.run.server import run_server
from paceline.transport.base import Transport
from paceline.transport.metered import ALL_PEERS, Tally
from paceline.types import Batch, RecorderLike

NOTIFY_EVERY_S = 0.2


def run_worker(
    session: Session, transport: Transport, notify: Notify, alone_on_host: bool = False
) -> None:
    """Everything that one rank does, from its first byte to its last."""
    job = session.job
    torch.set_num_threads(job.threads)
    reset_rss_peak()
    recorder = Recorder(
        session.out / "events" / f"worker-{transport.rank}.jsonl", transport.rank, session.number
    )
    task = Task.own(alone_in_process=transport.runs_as == "processes")
    sampler = Sampler(recorder, job.config.sample_every_s, task, whole_machine=transport.rank == 0)
    if alone_on_host:
        sampler.sockets = Interface()
    sampler.start()
    try:
        if transport.rank >= job.workers:
            run_server(session, transport, recorder, notify, sampler)
            return
        worker = Worker(session, transport, recorder, notify, sampler)
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


@dataclass
class _Clock:
    """Seconds of training: runs while steps are made, stands still while anything else is done."""

    total_s: float = 0.0
    since: float = 0.0

    def start(self) -> None:
        self.since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, added to the total."""
        now = time.perf_counter()
        lap, self.since = now - self.since, now
        self.total_s += lap
        return lap


class Worker:
    def __init__(
        self,
        session: Session,
        transport: Transport,
        recorder: RecorderLike,
        notify: Notify,
        sampler: Sampler | None = None,
    ) -> None:
        job = session.job
        self.session, self.job, self.config = session, job, job.config
        self.recorder, self.notify = recorder, notify
        self.rank, self.sampler, self.net = transport.rank, sampler, NetBytes(sampler)
        self.profile = Profile() if job.config.profile else None
        place = Rank.take(session, transport, recorder, notify)
        self.meter, self.faults, self.strategy, self.ctx = (
            place.meter,
            place.faults,
            place.strategy,
            place.ctx,
        )
        self.device = torch.device(self.config.device)
        self.clock = _Clock()
        self.private = (
            Private(session, self.ctx, self.device) if job.protection is not None else None
        )
        self.batches = self.private.batches() if self.private is not None else self._batches()
        self.balance = self._balance()
        self.schedule = job.schedule()
        self.total_steps = self._total_steps()
        self.step, self.target_reached = 0, False
        self.members = tuple(range(job.workers))  # the workers that are there
        self.epoch_start: list[
            Tensor
        ] = []  # the weights when this epoch began, where convergence is watched
        self._last_notice = 0.0
        self._rate: list[tuple[float, float]] = []

        self.replica = place.replica()
        own = snapshot.restore(self) if job.resume_from else None
        self.strategy.setup(self.ctx, self.replica)
        if own is not None:
            snapshot.restore_own(self, own)
        self.evaluation = Evaluation(job, self.replica, self.ctx)
        self.evaluation.try_out()
        if self.private is not None:
            self.private.attach(
                self.replica,
                own.get("privacy") if own is not None and own["same_workers"] else None,
            )
            for notice in (
                self.private.gradient.clipper.notices if self.ctx.worker_index == 0 else ()
            ):
                notify("notice", {"text": notice})
        self.glance = self.evaluation.smaller(
            self.config.evaluate_samples
        )  # the one between epochs or steps
        if self.ctx.worker_index == 0:
            notify("ready", {})
        recorder.write(
            "start",
            host=socket.gethostname(),
            boot=boot_id(),
            role="worker",
            threads=job.threads,
            from_step=self.step,
            clock=time.perf_counter(),
            parameters=self.replica.parameter_count,
            memory_format="channels_last" if self.replica.channels_last else "contiguous",
            **self._message(),
        )

    # --- setting up

    def _message(self) -> dict[str, int]:
        """The bytes of one message, everything counted, and of the numbers that it stands for."""
        codec, regions = self.ctx.codec, self.replica.regions
        if codec.lossless or self.ctx.workers == 1:
            return {}
        return {
            "message_bytes": sum(codec.message_bytes(r.grad_layout) for r in regions),
            "plain_bytes": sum(r.grads.nbytes for r in regions),
        }

    def _mean_message(self) -> dict[str, float]:
        """Where messages differ in length (and go to everybody at once): how long they were on
        average.
        """
        clock, regions = (
            self.ctx.codec.clock,
            sum(r.grads.numel() > 0 for r in self.replica.regions),
        )
        return (
            {"message_bytes": clock.message_bytes / clock.messages * regions}
            if clock.messages
            else {}
        )

    def _batches(self) -> Batches:
        job, train = self.job, self.job.data.train
        stand_in = not self.strategy.skips_empty
        if isinstance(train, Stream):
            return StreamBatches(
                train,
                job.batch_sizes[0],
                job.workers,
                self.ctx.worker_index,
                self.config.seed,
                self.device,
                stand_in,
            )
        return ShardBatches(
            train, self.session.shards(), self.ctx.worker_index, self.device, stand_in
        )

    def _balance(self) -> Balance | None:
        asked = self.config.balance
        every = Speeds.read(asked, self.job.workers).every if asked is not None else None
        if every is None or self.job.workers == 1:
            return None
        assert isinstance(self.batches, ShardBatches)
        return Balance(every, self.batches.shards, self.ctx.peers.inner)

    def _look_at_balance(self, batch: Batch, own_s: float, epoch: int) -> None:
        """Waiting for the others here is exchange, not work."""
        assert self.balance is not None
        self.balance.saw(batch.weight, own_s)
        began = time.perf_counter()
        changed = self.balance.look(self.step, epoch, self.batches.ended)
        self.meter.add("balance", ALL_PEERS, 0, 0, 0, time.perf_counter() - began)
        if changed and self.ctx.worker_index == 0:
            sizes, speeds = list(self.balance.shards.batch_sizes), self.balance.speeds
            self.recorder.write("balance", step=self.step, batch_sizes=sizes, samples_per_s=speeds)

    def _total_steps(self) -> int | None:
        """The steps of the whole run, where that can be known."""
        known = [self.job.steps]
        if self.private is not None:
            known.append(self.private.protection.until)
        if self.job.epochs is not None and self.batches.steps_per_epoch is not None:
            known.append(self.job.epochs * self.batches.steps_per_epoch)
        return min((k for k in known if k is not None), default=None)

    # --- the loop

    def train(self) -> None:
        strategy, replica, meter = self.strategy, self.replica, self.meter
        if self.config.until_converged is not None and not self.epoch_start:
            self.epoch_start = [w.clone() for w in replica.weights()]
        self.ctx.peers.barrier()
        meter.phase = "train"
        self.net.start()
        self.clock.start()
        if self._is_over():
            if self.ctx.worker_index == 0:
                notify_text = (
                    f"already at step {self.step} after {self.batches.epochs_done} epochs: no step"
                    " is left to make"
                )
                self.notify("notice", {"text": notify_text})
            return
        before, goes_back = replace(meter.totals["train"]), self.job.resume_from is not None
        for batch in self.batches:
            if self.profile is not None:
                self.profile.next_step()
            began = self.clock.since
            replica.set_lr_factor(self.schedule(batch.step, self.total_steps))
            loss = self._compute(batch)
            arrived = time.perf_counter()
            strategy.step(replica, batch)

            self.step, epoch = batch.step + 1, batch.epoch + 1
            if goes_back:
                snapshot.undo_later(self)
                goes_back = False
            seconds = self.clock.lap()
            self._record_step(batch, loss, began, seconds, before, arrived)
            own_s = seconds - (meter.totals["train"].seconds - before.seconds)
            before = replace(meter.totals["train"])
            if self.balance is not None:
                self._look_at_balance(batch, own_s, epoch)
            over = self._is_over()
            if self.batches.ended and self.config.until_converged is not None and not over:
                over = self._converged()
            alone = (
                self.strategy.decides_alone and self.config.until_converged is not None
            )  # others may have stopped already
            if (
                not over
                and not alone
                and due(self.config.evaluate_every, self.step, epoch, self.batches.ended)
            ):
                self._evaluate(epoch)
                over = self.target_reached
            if not alone and due(
                self.config.checkpoint_every, self.step, epoch, self.batches.ended
            ):
                self._checkpoint()
            if over:
                break
        self.net.stop()
        if self.profile is not None:
            self.profile.pause()
        meter.phase = "finish"

    def _compute(self, batch: Batch) -> float:
        for fault in self.faults:
            fault.before_step(batch.step + 1, self.ctx.transport.inner)
        began = time.perf_counter()
        gradients = self.private or self.replica
        loss = gradients.forward_backward(batch, self.strategy.scale(batch))
        for fault in self.faults:
            fault.after_compute(time.perf_counter() - began, self.ctx.transport.inner)
        return loss

    def conclude(self) -> None:
        self.meter.phase = "finish"
        self._assemble()
        self.strategy.finish(self.replica)
        weights = self.strategy.consensus(self.replica)
        if (
            self.ctx.worker_index == 0
        ):  # before the last evaluation: whatever that does, the weights are kept
            with self.replica.holding(weights):
                checkpoint.save_weights(
                    self.session.out / "model.safetensors", self.replica.state_dict()
                )
        self._evaluate(None)
        if self.profile is not None:
            self.recorder.write("profile", **self.profile.tables())
        for notice in self.replica.flat.notices if self.replica.flat else ():
            self.notify("notice", {"text": notice})
        self.recorder.write(
            "summary",
            **(self.sampler.summary() if self.sampler else {}),
            net_sent_bytes=self.net.sent,
            net_received_bytes=self.net.received,
            setup_sent_bytes=self.meter.total("setup").sent_bytes,
            evaluate_sent_bytes=self.meter.total("evaluate").sent_bytes,
            finish_sent_bytes=self.meter.total("finish").sent_bytes,
            times_known=self.meter.times_known,
            **self._mean_message(),
            traffic=self.meter.described(),
        )
        self.ctx.peers.barrier()
        self.strategy.leave()

    def _is_over(self) -> bool:
        steps, epochs = self.job.steps, self.job.epochs
        if self.private is not None and self.step >= self.private.protection.until:
            return True
        return (steps is not None and self.step >= steps) or (
            epochs is not None and self.batches.epochs_done >= epochs
        )

    def _record_step(
        self, batch: Batch, loss: float, began: float, seconds: float, before: Tally, arrived: float
    ) -> None:
        now = self.meter.totals["train"]
        sync_s = now.seconds - before.seconds
        waits = self.strategy.in_step and now.calls > before.calls
        encode_s, decode_s = self.ctx.codec.clock.taken()
        shown = (
            self.private.revealed(batch, loss)
            if self.private is not None
            else {"n": batch.weight, "loss": loss}
        )
        self.recorder.write(
            "step",
            step=self.step,
            epoch=batch.epoch,
            **shown,
            compute_s=seconds - sync_s - encode_s - decode_s,
            sync_s=sync_s,
            began=began,
            arrived=arrived,
            waits=waits,
            train_s=self.clock.total_s,
            sent=now.sent_bytes - before.sent_bytes,
            received=now.received_bytes - before.received_bytes,
            messages=now.messages - before.messages,
            **({} if self.ctx.codec.lossless else {"encode_s": encode_s, "decode_s": decode_s}),
            **self.strategy.observed,
        )
        if self.ctx.worker_index:
            return
        self._rate.append((self.clock.total_s, batch.global_weight))
        moment = time.perf_counter()
        last = self.total_steps is not None and self.step == self.total_steps
        if last or moment - self._last_notice >= NOTIFY_EVERY_S:
            self._last_notice = moment
            self._rate = self._rate[-200:]
            span = self._rate[-1][0] - self._rate[0][0]
            rate = (
                sum(n for _, n in self._rate[1:]) / span
                if span > 0
                else batch.global_weight / max(1e-9, self._rate[0][0])
            )
            self.notify(
                "progress",
                {
                    "step": self.step,
                    "total": self.total_steps,
                    "epoch": batch.epoch + 1,
                    "loss": shown["loss"],
                    "samples_per_s": rate,
                    **({"epsilon": self.private.epsilon} if self.private is not None else {}),
                },
            )

    # --- looking

    def _evaluate(self, epoch: int | None) -> None:
        """All workers together, each sample once, of the strategy's consensus weights. `epoch`
        None: the last one.
        """
        if self.job.data.test is None:
            return
        with self._aside("evaluation"):
            weights = self.strategy.consensus(self.replica)
            with self.replica.holding(weights):
                loss, values = (self.evaluation if epoch is None else self.glance).measure()
        accuracy = values.get("accuracy")
        until, target = self.config.until_accuracy, self.config.target_accuracy
        self.target_reached = until is not None and accuracy is not None and accuracy >= until
        goal = target if target is not None else until
        name = next(reversed(values), None)
        better = getattr(self.evaluation.metrics[-1], "higher_is_better", True) if name else None
        result = {
            "step": self.step,
            "train_s": self.clock.total_s,
            "loss": loss,
            "accuracy": accuracy,
            "metric": (
                {"name": name, "value": values[name], "higher_is_better": better} if name else None
            ),
            "reached": goal is not None and accuracy is not None and accuracy >= goal,
            "final": epoch is None,
        }
        self.recorder.write("evaluation", **result)
        if self.ctx.worker_index == 0:
            self.notify("evaluation", {**result, "epoch": epoch})
        if not loss - loss == 0.0:
            raise NotFinite(
                f"the loss on the test set is {loss} after step {self.step}: try a smaller lr"
            )

    def _converged(self) -> bool:
        """Relative change of the consensus weights over the epoch, the same number on all workers;
        or of one's own.
        """
        if self.strategy.decides_alone:
            weights: Sequence[Tensor] = self.replica.weights()
        else:
            with self._aside("convergence"):
                weights = self.strategy.consensus(self.replica) or self.replica.weights()
        before = self.epoch_start
        moved = (
            sum(
                float((a - b).abs().double().square().sum())
                for a, b in zip(weights, before, strict=True)
            )
            ** 0.5
        )
        size = sum(float(b.abs().double().square().sum()) for b in before) ** 0.5
        change = moved / size if size else float("inf")
        if self.ctx.worker_index == 0:
            self.notify(
                "notice", {"text": f"weights changed by {change:.2e} (relative) in this epoch"}
            )
        self.clock.start()
        assert self.config.until_converged is not None
        self.epoch_start = [w.clone() for w in weights]
        return change < self.config.until_converged

    # --- keeping

    def rescue(self) -> None:
        """A server is gone and what it remembered with it: what worker 0 has becomes a checkpoint
        to start from.
        """
        if self.ctx.worker_index == 0:
            snapshot.rescue(self)

    def _assemble(self) -> None:
        """Workers that run apart come together when they have come this far; whoever has died
        meanwhile is left out.
        """
        if self.ctx.peers.size == 1 or (self.strategy.in_step and not self.strategy.survives):
            return
        here = self.ctx.transport.assemble(self.members, self.strategy.survives)
        if here != self.members:
            lost = sorted(set(self.members) - set(here))
            self.recorder.write("lost", ranks=lost, step=self.step)
            self.members, self.ctx.peers = here, self.ctx.transport.group(here)

    def _checkpoint(self) -> None:
        with self._aside("checkpoint"):
            path = snapshot.save(self)
        if self.ctx.worker_index == 0:
            self.recorder.write("checkpoint", step=self.step, path=str(path))

    @contextmanager
    def _aside(self, what: str) -> Iterator[None]:
        """Something that is not training: its time and its bytes are counted apart."""
        began = time.perf_counter()
        self.net.stop()
        if self.profile is not None:
            self.profile.pause()
        self._assemble()
        with self.meter.during("evaluate"):
            yield
        self.recorder.write(
            "aside", what=what, step=self.step, began=began, seconds=time.perf_counter() - began
        )
        self.net.start()
        self.clock.start()
