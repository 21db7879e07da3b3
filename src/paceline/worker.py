"""The worker: one loop, the same for every strategy, transport, model and data set."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline import checkpoint
from paceline.config import due
from paceline.data.base import Samples, Stream
from paceline.data.batches import Batches, ShardBatches, StreamBatches, evaluation_slices, rows, to_device
from paceline.errors import NotFinite
from paceline.job import Job
from paceline.objectives.metrics import Accuracy, Metric
from paceline.record.resources import Usage, reset_rss_peak
from paceline.record.writer import Recorder
from paceline.registry import codecs
from paceline.replica import Replica, measure_memory_format
from paceline.seeding import derive, generator
from paceline.strategies.base import Context, Strategy
from paceline.transport.base import Transport
from paceline.transport.metered import Meter, Metered
from paceline.types import Batch

Notify = Callable[[str, dict[str, Any]], None]

EVALUATION_BATCH = 500
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
        metered = Metered(transport, self.meter)
        self.strategy: Strategy = job.strategy()
        self.ctx = Context(
            transport=metered,
            peers=metered.group(range(job.workers)),
            role="worker",
            worker_index=transport.rank,
            workers=job.workers,
            codec=codecs.build(self.config.codec),
            recorder=recorder,
            random=generator(self.config.seed, "strategy", transport.rank),
            init="seed" if self.config.init == "seed" else "broadcast",
        )
        self.device = torch.device(self.config.device)
        self.clock = _Clock()
        self.batches = self._batches()
        self.schedule = job.schedule()
        self.metrics = _metrics(job)
        self.total_steps = self._total_steps()
        self.step, self.target_reached = 0, False
        self._last_notice = 0.0
        self._rate: list[tuple[float, float]] = []

        self._seed_everything()
        self.replica = self._replica()
        own = self._restore() if job.resume_from else None
        self.strategy.setup(self.ctx, self.replica)
        if own is not None:
            self._restore_own(own)
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

    def _seed_everything(self) -> None:
        """The model comes from the run's seed on every worker; what follows (dropout, ...) is each worker's own."""
        torch.manual_seed(self.config.seed)
        random.seed(self.config.seed)
        np.random.seed(self.config.seed % 2**32)

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
        if self.ctx.worker_index > 0:
            torch.manual_seed(derive(self.config.seed, "worker", self.ctx.worker_index))
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
        before_epoch = self._flat_weights()
        self.ctx.peers.barrier()
        meter.phase = "train"
        self.clock.start()
        if self._is_over():
            return
        for batch in self.batches:
            replica.set_lr_factor(self.schedule(batch.step, self.total_steps))
            waited = meter.seconds["train"]
            loss = replica.forward_backward(batch, strategy.scale(batch))
            arrived = time.perf_counter()
            strategy.step(replica, batch)

            seconds, sync_s = self.clock.lap(), meter.seconds["train"] - waited
            self.step, epoch = batch.step + 1, batch.epoch + 1
            self._record_step(batch, loss, seconds - sync_s, sync_s, arrived)
            over = self._is_over()
            if self.batches.ended and self.config.until_converged is not None and not over:
                over, before_epoch = self._converged(before_epoch)
            if not over and due(self.config.evaluate_every, self.step, epoch, self.batches.ended):
                self._evaluate(epoch)
                over = self.target_reached
            if due(self.config.checkpoint_every, self.step, epoch, self.batches.ended):
                self._checkpoint()
            if over:
                break
        meter.phase = "finish"

    def conclude(self) -> None:
        self.meter.phase = "finish"
        self.strategy.finish(self.replica)
        self._evaluate(None)
        weights = self.strategy.consensus(self.replica)
        if self.ctx.worker_index == 0:
            with self.replica.holding(weights):
                checkpoint.save_weights(self.job.out / "model.safetensors", self.replica.state_dict())
        for notice in self.replica.flat.notices if self.replica.flat else ():
            self.notify("notice", {"text": notice})
        trained = self.meter.total("train")
        self.recorder.write(
            "summary",
            **Usage.now().since(self.usage),
            payload_sent_bytes=trained.sent_bytes,
            payload_received_bytes=trained.received_bytes,
            messages_sent=trained.messages,
            setup_sent_bytes=self.meter.total("setup").sent_bytes,
            evaluate_sent_bytes=self.meter.total("evaluate").sent_bytes,
            finish_sent_bytes=self.meter.total("finish").sent_bytes,
            times_known=self.meter.times_known,
        )
        self.ctx.peers.barrier()

    def _is_over(self) -> bool:
        steps, epochs = self.job.steps, self.job.epochs
        return (steps is not None and self.step >= steps) or (epochs is not None and self.batches.epochs_done >= epochs)

    def _record_step(self, batch: Batch, loss: float, compute_s: float, sync_s: float, arrived: float) -> None:
        self.recorder.write(
            "step",
            step=self.step,
            epoch=batch.epoch,
            n=batch.weight,
            loss=loss,
            compute_s=compute_s,
            sync_s=sync_s,
            arrived=arrived,
            train_s=self.clock.total_s,
        )
        if self.ctx.worker_index:
            return
        self._rate.append((self.clock.total_s, batch.global_weight))
        now = time.perf_counter()
        if now - self._last_notice >= NOTIFY_EVERY_S:
            self._last_notice = now
            self._rate = self._rate[-200:]
            span = self._rate[-1][0] - self._rate[0][0]
            rate = sum(n for _, n in self._rate[1:]) / span if span > 0 else 0.0
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
        test = self.job.data.test
        if test is None:
            return
        with self.meter.during("evaluate"):
            weights = self.strategy.consensus(self.replica)
            with self.replica.holding(weights):
                loss, values = self._measure(test)
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

    def _measure(self, test: Samples) -> tuple[float, dict[str, float]]:
        replica, samples = self.replica, len(test)
        sums = torch.zeros(2, dtype=torch.float64)
        states = [m.start(samples) for m in self.metrics]
        replica.model.eval()
        try:
            with torch.no_grad():
                for indices in evaluation_slices(samples, self.ctx.workers, self.ctx.worker_index, EVALUATION_BATCH):
                    inputs, targets = to_device(test.batch(indices), self.device)
                    outputs = replica.infer(inputs)
                    count = rows(targets)
                    sums += torch.tensor([float(replica.loss(outputs, targets)) * count, count], dtype=torch.float64)
                    for metric, state in zip(self.metrics, states, strict=True):
                        metric.update(state, indices, outputs, targets)
        finally:
            replica.model.train()
        for tensor in (sums, *states):
            self.ctx.peers.all_reduce(tensor)
        return float(sums[0] / sums[1]), {m.name: m.value(s) for m, s in zip(self.metrics, states, strict=True)}

    def _flat_weights(self) -> list[Tensor]:
        return [w.clone() for w in self.replica.weights()] if self.config.until_converged is not None else []

    def _converged(self, before: list[Tensor]) -> tuple[bool, list[Tensor]]:
        """Relative change of the consensus weights over the epoch, the same number on all workers."""
        with self.meter.during("evaluate"):
            weights = self.strategy.consensus(self.replica) or self.replica.weights()
        moved = sum(float((a - b).double().square().sum()) for a, b in zip(weights, before, strict=True)) ** 0.5
        size = sum(float(b.double().square().sum()) for b in before) ** 0.5
        change = moved / size if size else float("inf")
        if self.ctx.worker_index == 0:
            self.notify("notice", {"text": f"weights changed by {change:.2e} (relative) in this epoch"})
        self.clock.start()
        assert self.config.until_converged is not None
        return change < self.config.until_converged, [w.clone() for w in weights]

    # --- keeping

    def _checkpoint(self) -> None:
        with self.meter.during("evaluate"):
            weights = self.strategy.consensus(self.replica)
            with self.replica.holding(weights):
                consensus = self.replica.state_dict() if self.ctx.worker_index == 0 else None
            own: dict[str, Any] = {
                "optimizer": self.replica.optimizer.state_dict(),
                "random": torch.get_rng_state(),
                "strategy": self.strategy.state(),
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
        about = checkpoint.about(folder)
        same = about["workers"] == self.ctx.workers
        own = checkpoint.load_own(folder, self.ctx.worker_index if same else 0)
        self.replica.load_state_dict(checkpoint.load_weights(folder / "model.safetensors"))
        self.replica.optimizer.load_state_dict(own["optimizer"])
        self.batches.restore(own["batches"])
        self.replica.samples_seen = own["samples_seen"]
        self.step, self.clock.total_s = about["step"], about["train_s"]
        own["same_workers"] = same
        return own

    def _restore_own(self, own: dict[str, Any]) -> None:
        if not own["same_workers"]:
            torch.manual_seed(derive(self.config.seed, "resumed", self.step, self.ctx.worker_index))
            return
        self.strategy.load_state(own["strategy"])
        for region, weights in zip(self.replica.regions, own.get("weights", ()), strict=False):
            region.params.copy_(weights)
        torch.set_rng_state(own["random"])


def _metrics(job: Job) -> list[Metric]:
    """Accuracy wherever targets are classes, then the chosen one (last: it is `result.metric`)."""
    chosen = job.metric()
    found: list[Metric] = []
    if not isinstance(chosen, Accuracy) and job.data.classes is not None:
        found.append(Accuracy())
    return found + ([chosen] if chosen is not None else [])
