"""A person's own training loop, kept together by any strategy.

    pace = paceline.join("allreduce")
    model, optimizer, batches = pace.prepare(model, optimizer, dataset, batch_size=64)
    for x, y in batches:                        # one epoch of this worker's batches
        pace.step(loss_fn(model(x), y))         # backward, synchronise, update
    pace.finish()

In pieces: `pace.backward(loss)` accumulates, `pace.step(clip_norm=1.0)` synchronises, clips, updates; `pace.step(loss,
weight=tokens)` where samples are not rows. Started by `paceline launch -n 4 script.py`, torchrun, mpirun or srun; started
alone, it is one worker.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from paceline.allocator import keep_freed_memory
from paceline.data.adopt import adopt
from paceline.data.base import Stream
from paceline.data.batches import Batches, ShardBatches, StreamBatches
from paceline.data.shards import GlobalShards, StaticShards
from paceline.errors import BadRequest
from paceline.launch.joined import Meeting
from paceline.launch.seat import find as find_seat
from paceline.rank import line_up
from paceline.registry import strategies, transports
from paceline.replica import Replica, layout_of, refuse_closures
from paceline.seeding import derive, seed_everything
from paceline.strategies.base import Strategy, distance_to, expect_identical
from paceline.transport.alone import Alone
from paceline.transport.base import Transport
from paceline.transport.metered import Metered
from paceline.types import Batch


class Unrecorded:
    """A loop of one's own leaves no record."""

    def write(self, kind: str, **fields: Any) -> None:
        return


class OwnBatches:
    """This worker's batches; one pass is one epoch. All workers make the same number of steps."""

    def __init__(self, inner: Batches, pace: Pace) -> None:
        self._inner, self._pace = inner, pace

    def __len__(self) -> int:
        if self._inner.steps_per_epoch is None:
            raise TypeError("a stream has no length")
        return self._inner.steps_per_epoch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self._inner:
            self._pace.current = batch
            yield batch.inputs, batch.targets
            if batch.ends_epoch:
                return


class Pace:
    """This process's place in the line. Made by `paceline.join`."""

    def __init__(self, strategy: Strategy, transport: Transport, workers: int, codec: str, seed: int, check_every: int) -> None:
        self.strategy, self.check_every, self.seed = strategy, check_every, seed
        self.ctx = line_up(transport, strategy, workers, codec=codec, seed=seed, recorder=Unrecorded())
        self.current: Batch | None = None  # the batch that was given last and not yet used
        self.steps = 0
        self._own = self._total = 0.0  # weights of what has been accumulated
        self._last: Batch | None = None
        self._finished = False

    @property
    def rank(self) -> int:
        return self.ctx.worker_index

    @property
    def workers(self) -> int:
        return self.ctx.workers

    @property
    def leads(self) -> bool:
        """Whether this is the worker that prints and saves."""
        return self.ctx.worker_index == 0

    # --- before the loop

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any = None,
        batch_size: int = 64,
        shard: str | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """The model (same names, same device), the optimizer, and this worker's batches of the data.

        All workers start from worker 0's weights. The parameters' memory moves into flat buffers; they stay the same objects.
        """
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise BadRequest("prepare takes a torch.nn.Module and an optimizer made from its parameters")
        refuse_closures(optimizer)
        if self.leads:
            for server in self.ctx.servers:
                _send_bytes(self.ctx.transport, server, cloudpickle.dumps((model, optimizer)))
        model.train()
        self.replica = Replica(model, optimizer, _no_loss, flat=self.strategy.flat, allocate=self.ctx.transport.allocate)
        self.ctx.codec.fits(layout_of(model))
        self.strategy.setup(self.ctx, self.replica)
        if self.rank:
            seed_everything(derive(self.seed, "worker", self.rank))  # dropout and the like are each worker's own
        device = next(model.parameters()).device
        batches = None if data is None else OwnBatches(self._batches(data, batch_size, shard, device), self)
        forward = self.replica.forward
        if isinstance(forward, nn.Module) and forward is not model:  # DDP's wrapper, under the model's own names
            for name in ("named_parameters", "state_dict", "load_state_dict"):
                object.__setattr__(forward, name, getattr(model, name))
            return forward, optimizer, batches
        return model, optimizer, batches

    def _batches(self, data: Any, batch_size: int, shard: str | None, device: torch.device) -> Batches:
        train = data if hasattr(data, "batch") else adopt(data, count_classes=False).train
        if isinstance(train, Stream):
            return StreamBatches(train, batch_size, self.workers, self.rank, self.seed, device, stand_in=True)
        sizes = (batch_size,) * self.workers
        static = (shard or self.strategy.shard) == "static"
        shards = StaticShards(len(train), sizes, self.seed, None) if static else GlobalShards(len(train), sizes, self.seed)
        return ShardBatches(train, shards, self.rank, device, stand_in=True)

    # --- in the loop

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Gradients of this loss, a mean, are added to those since the last step; they count by weight (default: rows)."""
        if self.replica.flat is None:
            raise BadRequest(f"{self.strategy.name} synchronises inside each backward pass: hand every loss to pace.step")
        batch = self._weighed(weight)
        if not self._total:
            self.replica.flat.forget_gradients()
        (loss * batch.weight).backward()
        self._own += batch.weight
        self._total += batch.global_weight
        self._last = batch

    def step(self, loss: Tensor | None = None, *, weight: float | None = None, clip_norm: float | None = None) -> None:
        """Backward (when a loss is given), synchronise, update."""
        if self._finished:
            raise BadRequest("this loop has been finished: no step can follow")
        if self._total:
            if loss is not None:
                self.backward(loss, weight)
            batch = self._accumulated()
        elif loss is None:
            raise BadRequest("pace.step() without a loss needs gradients from pace.backward(loss) before it")
        else:
            batch = self._weighed(weight)
            self._backward_once(loss, self.strategy.scale(batch))
        self.replica.clip_norm = clip_norm
        self.replica.samples_seen += batch.weight
        self.strategy.step(self.replica, batch)
        self.replica.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at; a server may have stepped
        self.steps += 1
        if self.check_every and self.steps % self.check_every == 0:
            self.check()

    def _backward_once(self, loss: Tensor, scale: float) -> None:
        flat = self.replica.flat
        if flat is None:
            self.replica.optimizer.zero_grad()
        else:
            flat.forget_gradients()
        (loss if scale == 1.0 else loss * scale).backward()
        if flat is not None:
            flat.settle_gradients()

    def _weighed(self, weight: float | None) -> Batch:
        """How much what was just computed counts, here and in all."""
        current, self.current = self.current, None
        epoch, ends = (current.epoch, current.ends_epoch) if current is not None else (0, False)
        if weight is not None:
            total = torch.tensor([float(weight)], dtype=torch.float64)
            self.ctx.peers.inner.all_reduce(total)
            return Batch(None, None, float(weight), float(total), epoch, self.steps, ends)
        if current is not None:
            return Batch(None, None, current.weight, current.global_weight, epoch, self.steps, ends)
        return Batch(None, None, 1.0, float(self.workers), epoch, self.steps, ends)

    def _accumulated(self) -> Batch:
        """What has been added up, as one batch: the mean over all of it."""
        assert self._last is not None
        assert self.replica.flat is not None
        batch = Batch(None, None, self._own, self._total, self._last.epoch, self.steps, self._last.ends_epoch)
        self.replica.flat.settle_gradients()
        for region in self.replica.regions:
            region.grads.mul_(self.strategy.scale(batch) / self._own if self._own else 0.0)
        self._own = self._total = 0.0
        return batch

    def any(self, flag: bool) -> bool:
        """Whether any worker says so: for stopping early, together."""
        votes = torch.tensor([float(flag)])
        self.ctx.peers.inner.all_reduce(votes, "max")
        return bool(votes)

    def check(self) -> float:
        """Raise unless replicas that should be identical are; otherwise how far this one is from their mean."""
        if self.strategy.replicas_identical or self.workers == 1:
            if self.workers > 1:
                expect_identical(self.ctx, self.replica, f"after step {self.steps}")
            return 0.0
        means = self._agree()
        return distance_to(self.replica, means) if means is not None else 0.0

    # --- after the loop, or between epochs

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The weights that the workers agree on, in the model, for a while: to evaluate or to save. By all workers together."""
        agreed = None if self._finished else self._agree()  # afterwards everybody has them
        with self.replica.holding(agreed):
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """The model's, of the weights that the workers agree on. By all workers together."""
        with self.consensus():
            return self.replica.state_dict()

    def finish(self) -> None:
        """The last exchange (averages that some strategies make at the end), and goodbye. By all workers together."""
        if self._finished:
            return
        self._finished = True
        self._assemble()
        self.strategy.finish(self.replica)
        weights = self.strategy.consensus(self.replica)
        for region, agreed in zip(self.replica.regions, weights or (), strict=False):
            region.params.copy_(agreed)
        self.ctx.peers.barrier()
        self.strategy.leave()

    def _agree(self) -> Sequence[Tensor] | None:
        self._assemble()
        return self.strategy.consensus(self.replica)

    def _assemble(self) -> None:
        """Workers that run apart come when they are done: no deadline."""
        if self.workers > 1 and not self.strategy.in_step:
            self.ctx.transport.assemble(range(self.workers))

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            with suppress(Exception):
                self.ctx.transport.close()

    def serve(self) -> None:
        """A server's whole life: worker 0 sends what it is to hold."""
        model, optimizer = cloudpickle.loads(_receive_bytes(self.ctx.transport, 0))
        replica = Replica(model, optimizer, _no_loss, allocate=self.ctx.transport.allocate)
        self.strategy.serve(self.ctx, replica)


def join(
    strategy: str | Strategy = "allreduce",
    *,
    codec: str = "none",
    transport: str = "auto",
    servers: int | None = None,
    seed: int = 0,
    deadline_s: float = 30.0,
    check_every: int = 0,
) -> Pace:
    """Take this process's place in the line. On a server's rank this serves until the workers have left, then exits.

    `servers`: how many of the ranks are servers (the last ones; 1 for `ps`). `check_every`: steps between checks that replicas
    which should be identical are.
    """
    built: Strategy = strategies.build(strategy) if isinstance(strategy, str) else strategy
    keep_freed_memory()
    seat = find_seat()
    count = (1 if servers is None else servers) if built.serves == "ranks" else 0
    size = seat.size if seat else 1
    if size - count < 1:
        raise BadRequest(
            f"{built.name} with {count} server(s) needs {count + 1} ranks or more; here is {size}: paceline launch -n"
        )
    if built.most_workers is not None and size - count > built.most_workers:
        raise BadRequest(f"strategy {built.name} runs {built.most_workers} worker, not {size}")
    if seat is None:
        line: Transport = Alone(deadline_s)
    else:
        name = transport if transport != "auto" else "shm" if seat.local_size == seat.size else "gloo"
        kind: Any = transports.entry(name).make
        if (missing := kind.missing()) is not None:
            raise BadRequest(f"transport {name} is not to be had here: {missing}")
        line = Meeting(seat).connect(kind, deadline_s)
    pace = Pace(built, line, size - count, codec, seed, check_every)
    if pace.ctx.role == "server":
        pace.serve()
        sys.stdout.flush()
        sys.exit(0)
    atexit.register(_say_goodbye, line)
    return pace


def _say_goodbye(line: Transport) -> None:
    with suppress(Exception):
        line.close()


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise BadRequest("in a loop of one's own the loss is the loop's")


def _send_bytes(line: Metered, to: int, content: bytes) -> None:
    line.send_note(torch.tensor([len(content)]), to).wait()
    line.send_note(torch.frombuffer(bytearray(content), dtype=torch.uint8), to).wait()


def _receive_bytes(line: Metered, source: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    line.recv_note(length, source).wait()
    content = torch.zeros(int(length), dtype=torch.uint8)
    line.recv_note(content, source).wait()
    return content.numpy().tobytes()
