"""The worker: one loop, the same for every strategy, transport, model and data set."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline import checkpoint
from paceline.collectives.base import choose
from paceline.config import due
from paceline.data.base import Samples, Stream
from paceline.data.batches import Batches, ShardBatches, StreamBatches, to_device
from paceline.errors import BadRequest, NotFinite
from paceline.evaluation import Evaluation
from paceline.job import Job
from paceline.record.resources import Usage, reset_rss_peak
from paceline.record.writer import Recorder
from paceline.registry import codecs
from paceline.replica import Replica, measure_memory_format
from paceline.seeding import derive, generator, random_states, seed_everything, set_random_states
from paceline.strategies.base import Context, Strategy
from paceline.transport.base import Transport
from paceline.transport.metered import Meter, Metered, Tally
from paceline.types import Batch

Notify = Callable[[str, dict[str, Any]], None]

NOTIFY_EVERY_S = 0.2


def run_worker(job: Job, transport: Transport, notify: Notify) -> None:
    """Everything that one rank does, from its first byte to its last."""
    torch.set_num_threads(job.threads)
    reset_rss_peak()
    recorder = Recorder(job.out / "events" / f"worker-{transport.rank}.jsonl", transport.rank, job.session)
    try:
        worker = _Worker(job, transport, recorder, notify)
        worker.train()
        worker.conclude()
    finally:
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


class _Worker:
    def __init__(self, job: Job, transport: Transport, recorder: Recorder, notify: Notify) -> None:
        self.job, self.config, self.recorder, self.notify = job, job.config, recorder, notify
        self.rank, self.usage = transport.rank, Usage.now()
        self.meter = Meter()
        self.faults = job.faults()
        for fault in self.faults:
            transport = fault.wrap(transport)
        metered = Metered(transport, self.meter)
        self.strategy: Strategy = job.strategy()
        self.ctx = Context(
            transport=metered,
            peers=metered.group(range(job.workers)),
            role="worker",
            worker_index=transport.rank,
            workers=job.workers,
            codec=codecs.build(self.config.codec),
            collective=lambda name: choose(name, self.ctx.peers),
            recorder=recorder,
            random=generator(self.config.seed, "strategy", transport.rank),
            shared_random=generator(self.config.seed, "strategy"),
            init="seed" if self.config.init == "seed" else "broadcast",
        )
        self.device = torch.device(self.config.device)
        self.clock = _Clock()
        self.batches = self._batches()
        self.schedule = job.schedule()
        self.total_steps = self._total_steps()
        self.step, self.target_reached = 0, False
        self.epoch_start: list[Tensor] = []  # the weights when this epoch began, where convergence is watched
        self._last_notice = 0.0
        self._rate: list[tuple[float, float]] = []

        seed_everything(self.config.seed)  # the model comes from the run's seed, on every worker
        self.replica = self._replica()
        own = self._restore() if job.resume_from else None
        self.strategy.setup(self.ctx, self.replica)
        if own is not None:
            self._restore_own(own)
        self.evaluation = Evaluation(job, self.replica, self.ctx)
        self.evaluation.try_out()
        if self.ctx.worker_index == 0:
            notify("ready", {})
        recorder.write(
            "start",
            host=socket.gethostname(),
            role="worker",
            threads=job.threads,
            from_step=self.step,
            parameters=self.replica.parameter_count,
            memory_format="channels_last" if self.replica.channels_last else "contiguous",
        )

    # --- setting up

    def _batches(self) -> Batches:
        job, train = self.job, self.job.data.train
        stand_in = not self.strategy.skips_empty
        if isinstance(train, Stream):
            return StreamBatches(
                train, job.batch_sizes[0], job.workers, self.ctx.worker_index, self.config.seed, self.device, stand_in
            )
        return ShardBatches(train, job.shards(), self.ctx.worker_index, self.device, stand_in)

    def _replica(self) -> Replica:
        model = self.job.model().to(self.device)
        if self.ctx.worker_index > 0:  # what follows (dropout, augmentation) is each worker's own
            seed_everything(derive(self.config.seed, "worker", self.ctx.worker_index))
        loss = self.job.loss()
        channels_last = self._memory_format(model) == "channels_last"
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.train()
        return Replica(
            model,
            self.job.optimizer(model),
            loss,
            flat=self.strategy.flat,
            channels_last=channels_last,
            allocate=self.ctx.transport.allocate,
        )

    def _memory_format(self, model: torch.nn.Module) -> str:
        """Worker 0 measures, all obey."""
        if self.job.memory_format != "auto":
            return self.job.memory_format
        choice = torch.zeros(1, dtype=torch.int64)
        if self.ctx.worker_index == 0 and not isinstance(self.job.data.train, Stream):
            some = min(32, max(self.job.batch_sizes), len(self.job.data.train))
            inputs, targets = to_device(self.job.data.train.batch(torch.arange(some)), self.device)
            choice += measure_memory_format(model, self.job.loss(), inputs, targets) == "channels_last"
        self.ctx.peers.broadcast(choice)
        chosen = "channels_last" if int(choice) else "contiguous"
        if self.ctx.worker_index == 0:
            self.notify("chosen", {"memory_format": chosen})
        return chosen

    def _total_steps(self) -> int | None:
        """The steps of the whole run, where that can be known."""
        known = [self.job.steps]
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
        self.clock.start()
        if self._is_over():
            if self.ctx.worker_index == 0:
                notify_text = f"already at step {self.step} after {self.batches.epochs_done} epochs: no step is left to make"
                self.notify("notice", {"text": notify_text})
            return
        for batch in self.batches:
            replica.set_lr_factor(self.schedule(batch.step, self.total_steps))
            before = replace(meter.totals["train"])
            loss = self._compute(batch)
            arrived = time.perf_counter()
            strategy.step(replica, batch)

            self.step, epoch = batch.step + 1, batch.epoch + 1
            self._record_step(batch, loss, self.clock.lap(), before, arrived)
            over = self._is_over()
            if self.batches.ended and self.config.until_converged is not None and not over:
                over = self._converged()
            if not over and due(self.config.evaluate_every, self.step, epoch, self.batches.ended):
                self._evaluate(epoch)
                over = self.target_reached
            if due(self.config.checkpoint_every, self.step, epoch, self.batches.ended):
                self._checkpoint()
            if over:
                break
        meter.phase = "finish"

    def _compute(self, batch: Batch) -> float:
        for fault in self.faults:
            fault.before_step(batch.step + 1, self.ctx.transport.inner)
        began = time.perf_counter()
        loss = self.replica.forward_backward(batch, self.strategy.scale(batch))
        for fault in self.faults:
            fault.after_compute(time.perf_counter() - began, self.ctx.transport.inner)
        return loss

    def conclude(self) -> None:
        self.meter.phase = "finish"
        self.strategy.finish(self.replica)
        weights = self.strategy.consensus(self.replica)
        if self.ctx.worker_index == 0:  # before the last evaluation: whatever that does, the weights are kept
            with self.replica.holding(weights):
                checkpoint.save_weights(self.job.out / "model.safetensors", self.replica.state_dict())
        self._evaluate(None)
        for notice in self.replica.flat.notices if self.replica.flat else ():
            self.notify("notice", {"text": notice})
        self.recorder.write(
            "summary",
            **Usage.now().since(self.usage),
            setup_sent_bytes=self.meter.total("setup").sent_bytes,
            evaluate_sent_bytes=self.meter.total("evaluate").sent_bytes,
            finish_sent_bytes=self.meter.total("finish").sent_bytes,
            times_known=self.meter.times_known,
        )
        self.ctx.peers.barrier()

    def _is_over(self) -> bool:
        steps, epochs = self.job.steps, self.job.epochs
        return (steps is not None and self.step >= steps) or (epochs is not None and self.batches.epochs_done >= epochs)

    def _record_step(self, batch: Batch, loss: float, seconds: float, before: Tally, arrived: float) -> None:
        now = self.meter.totals["train"]
        sync_s = now.seconds - before.seconds
        waits = self.strategy.in_step and now.calls > before.calls
        self.recorder.write(
            "step",
            step=self.step,
            epoch=batch.epoch,
            n=batch.weight,
            loss=loss,
            compute_s=seconds - sync_s,
            sync_s=sync_s,
            arrived=arrived if waits else None,
            train_s=self.clock.total_s,
            sent=now.sent_bytes - before.sent_bytes,
            received=now.received_bytes - before.received_bytes,
            messages=now.messages - before.messages,
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
            rate = sum(n for _, n in self._rate[1:]) / span if span > 0 else batch.global_weight / max(1e-9, self._rate[0][0])
            self.notify(
                "progress",
                {
                    "step": self.step,
                    "total": self.total_steps,
                    "epoch": batch.epoch + 1,
                    "loss": loss,
                    "samples_per_s": rate,
                },
            )

    # --- looking

    def _evaluate(self, epoch: int | None) -> None:
        """All workers together, each sample once, of the strategy's consensus weights. `epoch` None: the last one."""
        if self.job.data.test is None:
            return
        with self.meter.during("evaluate"):
            weights = self.strategy.consensus(self.replica)
            with self.replica.holding(weights):
                loss, values = self.evaluation.measure()
        accuracy = values.get("accuracy")
        target = self.config.until_accuracy
        self.target_reached = target is not None and accuracy is not None and accuracy >= target
        name = next(reversed(values), None)
        result = {
            "step": self.step,
            "train_s": self.clock.total_s,
            "loss": loss,
            "accuracy": accuracy,
            "metric": {"name": name, "value": values[name]} if name else None,
            "reached": self.target_reached,
            "final": epoch is None,
        }
        self.recorder.write("evaluation", **result)
        if self.ctx.worker_index == 0:
            self.notify("evaluation", {**result, "epoch": epoch})
        if not loss - loss == 0.0:
            raise NotFinite(f"the loss on the test set is {loss} after step {self.step}: try a smaller lr")
        self.clock.start()

    def _converged(self) -> bool:
        """Relative change of the consensus weights over the epoch, the same number on all workers."""
        with self.meter.during("evaluate"):
            weights = self.strategy.consensus(self.replica) or self.replica.weights()
        before = self.epoch_start
        moved = sum(float((a - b).double().square().sum()) for a, b in zip(weights, before, strict=True)) ** 0.5
        size = sum(float(b.double().square().sum()) for b in before) ** 0.5
        change = moved / size if size else float("inf")
        if self.ctx.worker_index == 0:
            self.notify("notice", {"text": f"weights changed by {change:.2e} (relative) in this epoch"})
        self.clock.start()
        assert self.config.until_converged is not None
        self.epoch_start = [w.clone() for w in weights]
        return change < self.config.until_converged

    # --- keeping

    def _checkpoint(self) -> None:
        with self.meter.during("evaluate"):
            weights = self.strategy.consensus(self.replica)
            with self.replica.holding(weights):
                consensus = self.replica.state_dict() if self.ctx.worker_index == 0 else None
            own: dict[str, Any] = {
                "optimizer": self.replica.optimizer.state_dict(),
                "random": random_states(),
                "generators": [self.ctx.random.get_state(), self.ctx.shared_random.get_state()],
                "strategy": self.strategy.state(),
                "epoch_start": self.epoch_start,
                "batches": self.batches.state(),
                "samples_seen": self.replica.samples_seen,
            }
            if not self.strategy.replicas_identical:
                own["weights"] = [r.params.clone() for r in self.replica.regions]
            about = {
                "step": self.step,
                "workers": self.ctx.workers,
                "train_s": self.clock.total_s,
                "memory_format": "channels_last" if self.replica.channels_last else "contiguous",
                "optimizer": type(self.replica.optimizer).__name__,
                "samples": _count(self.job.data.train),
            }
            path = checkpoint.save(
                self.job.out / "checkpoints",
                self.step,
                self.ctx.worker_index,
                consensus,
                own,
                about,
                self.ctx.peers.barrier,
            )
        if self.ctx.worker_index == 0:
            self.recorder.write("checkpoint", step=self.step, path=str(path))
        self.clock.start()

    def _restore(self) -> dict[str, Any]:
        """Weights, optimizer and place in the data; what was this worker's own only if there are as many as before."""
        folder = self.job.resume_from
        assert folder is not None
        about, optimizer = checkpoint.about(folder), self.replica.optimizer
        for what, there, here in (
            ("optimizer", about["optimizer"], type(optimizer).__name__),
            ("number of training samples", about["samples"], _count(self.job.data.train)),
        ):
            if there != here:
                raise BadRequest(f"{folder} was made with another {what} ({there}, not {here}): resume it with the same")
        same = about["workers"] == self.ctx.workers
        own = checkpoint.load_own(folder, self.ctx.worker_index if same else 0)
        try:
            self.replica.load_state_dict(checkpoint.load_weights(folder / "model.safetensors"))
        except RuntimeError as error:
            raise BadRequest(f"{folder} was made with another model: {str(error).splitlines()[-1].strip()}") from None
        asked = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(own["optimizer"])
        for group, options in zip(optimizer.param_groups, asked, strict=True):
            group.update(options)  # what is asked for now, not what it was then
        self.batches.restore(own["batches"])
        self.epoch_start = own["epoch_start"]
        if self.ctx.worker_index == 0:
            checkpoint.forget_after(self.job.out / "checkpoints", about["step"])
        self.replica.samples_seen = own["samples_seen"]
        self.step, self.clock.total_s = about["step"], about["train_s"]
        own["same_workers"] = same
        return own

    def _restore_own(self, own: dict[str, Any]) -> None:
        if not own["same_workers"]:
            seed_everything(derive(self.config.seed, "resumed", self.step, self.ctx.worker_index))
            return
        self.strategy.load_state(own["strategy"])
        for region, weights in zip(self.replica.regions, own.get("weights", ()), strict=False):
            region.params.copy_(weights)
        for source, state in zip((self.ctx.random, self.ctx.shared_random), own["generators"], strict=True):
            source.set_state(state)
        set_random_states(own["random"])


def _count(train: Samples | Stream) -> int | None:
    return None if isinstance(train, Stream) else len(train)
