"""A person's own training loop, kept together by any strategy.

    pace = paceline.join("allreduce")
    model, optimizer, batches = pace.prepare(model, optimizer, dataset, batch_size=64)
    for x, y in batches:                        # one epoch of this worker's batches
        pace.step(loss_fn(model(x), y))         # backward, synchronise, update
    pace.finish()

In pieces: `pace.backward(loss)` adds gradients as `loss.backward()` does,
`pace.step(clip_norm=1.0)` synchronises, clips, updates; `pace.step(loss, weight=tokens)` where
samples are not rows. Started by `paceline launch -n 4 script.py`, torchrun, mpirun or srun; started
alone, it is one worker.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.seeding import random_states, set_random_states
from paceline.data.batches import OwnPasses
from paceline.data.own import OwnBatches
from paceline.data.passes import Asker, passes_of
from paceline.errors import BadRequest
from paceline.replica.flat import layout_of
from paceline.replica.replica import Replica, has_batch_norm, refuse_closures
from paceline.run.own_server import Build, built, receive_model, send_model
from paceline.run.rank import make_context
from paceline.strategies.base import Strategy, distance_to, expect_identical
from paceline.transport.base import Transport
from paceline.transport.together import assemble
from paceline.types import Batch


class Unrecorded:
    """A recorder that writes nothing: your own loop leaves no record."""

    def write(self, kind: str, **fields: Any) -> None:
        return


class Pace:
    """One worker of your own loop. Made by `paceline.join`."""

    def __init__(
        self,
        strategy: Strategy,
        transport: Transport,
        workers: int,
        codec: str,
        seed: int,
        check_every: int,
        secret: bytes = b"",
        build: Build | None = None,
    ) -> None:
        end_quickly()
        self.strategy, self.check_every, self.seed = strategy, check_every, seed
        self.ctx = make_context(
            transport, strategy, workers, codec=codec, seed=seed, recorder=Unrecorded(), say=_say
        )
        self.steps = 0
        self._secret, self._build = secret, build
        self._batches: OwnBatches | None = None
        self._parts: list[Batch] = []  # batches whose gradients were added since the last step
        self._prepared = self._stepping = self._finished = False

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
        batch_size: int | None = None,
        shard: str | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Return the model, the optimizer, and this worker's batches of the data.

        All workers start from worker 0's weights. The parameters move into flat buffers, but stay
        the same objects with the same names on the same device. `batch_size` is per worker; the
        default is that of your DataLoader, otherwise 64.
        """
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise BadRequest(
                "prepare takes a torch.nn.Module and an optimizer made from its parameters"
            )
        if self._prepared:
            raise BadRequest(
                "prepare was called twice on one pace, which keeps one model together: for another"
                " model or optimizer make a second pace (second = paceline.join(...)), or put both"
                " models into one Module"
            )
        refuse_closures(optimizer)
        self._prepared, self._random = True, random_states()
        try:
            return self._prepare(model, optimizer, data, batch_size, shard)
        finally:
            set_random_states(self._random)  # a seed that your script has set stays in force

    def _prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        batch_size: int | None,
        shard: str | None,
    ) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        if self.leads and self._build is None:
            for server in self.ctx.servers:
                send_model(self.ctx.transport, server, self._secret, model, optimizer)
        self.replica = Replica(
            model,
            optimizer,
            _no_loss,
            flat=self.strategy.traits.flat,
            allocate=self.ctx.transport.allocate,
        )
        self.ctx.codec.fits(layout_of(model))
        self.strategy.setup(self.ctx, self.replica)
        optimizer.register_step_pre_hook(self._refuse_own_step)
        self.strategy.begin(self.replica, None)
        device = next(model.parameters()).device
        if data is not None:
            self._batches = OwnBatches(self._cut(data, batch_size, shard, device), model)
        forward = self.replica.forward
        # DDP's wrapper, under the model's own names
        if isinstance(forward, nn.Module) and forward is not model:
            for name in ("named_parameters", "state_dict", "load_state_dict"):
                object.__setattr__(forward, name, getattr(model, name))
            return forward, optimizer, self._batches
        return model, optimizer, self._batches

    def _refuse_own_step(self, *_: Any) -> None:
        if not self._stepping and not self._finished:
            raise BadRequest(
                "optimizer.step() was called beside pace.step(), so the workers would drift apart:"
                " pace.step(loss) computes the gradients, synchronises and updates. Leave"
                " loss.backward() and optimizer.step() out"
            )

    def _cut(
        self, data: Any, batch_size: int | None, shard: str | None, device: torch.device
    ) -> OwnPasses:
        """Return this worker's part of the data."""
        asker = Asker(
            self.workers,
            self.rank,
            self.seed,
            device,
            self.ctx.peers.uncounted().control,
            self._random,
            self.strategy.traits.shard,
            has_batch_norm(self.replica.model),
            _say if self.leads else lambda text: None,
        )
        return passes_of(data, batch_size, shard, asker)

    # --- in the loop

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Add the gradients of this loss to those since the last step, as `loss.backward()` does.

        Within a worker losses add up, so a loop that accumulates over n batches divides each loss
        by n, as always. Between workers each loss counts by its share of the rows of this batch (or
        of `weight`).
        """
        if self.replica.flat is None:
            raise BadRequest(
                f"{self.strategy.name} synchronises inside each backward pass: hand every loss to"
                " pace.step"
            )
        self._add(loss, weight)

    def step(
        self,
        loss: Tensor | None = None,
        *,
        weight: float | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Compute gradients (where a loss is given), synchronise, update."""
        if self._finished:
            raise BadRequest("this loop has been finished: no step can follow")
        if loss is not None:
            self._add(loss, weight)
        elif not self._parts:
            raise BadRequest(
                "pace.step() without a loss needs gradients from pace.backward(loss) before it"
            )
        batch = self._together()
        if self.replica.flat is not None:
            self.replica.flat.settle_gradients()
        self.replica.clip_norm = clip_norm
        self.replica.samples_seen += batch.weight
        self._stepping = True
        try:
            self.strategy.step(self.replica, batch)
        finally:
            self._stepping = False
        # what schedulers look at; a server may have stepped
        self.replica.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.steps += 1
        self.strategy.begin(self.replica, None)  # the next forward pass reads weights from now on
        if self.check_every and self.steps % self.check_every == 0:
            self.check()

    def _add(self, loss: Tensor, weight: float | None) -> None:
        """Add the gradients of one loss. A batch of weight 0 (an empty slice) changes nothing."""
        flat, batch = self.replica.flat, self._weighed(weight)
        if not self._parts:
            if flat is not None:
                flat.forget_gradients()
            else:
                self.replica.optimizer.zero_grad()
        scale = self.strategy.scale(batch)
        # DDP exchanges in the backward pass: every worker makes one
        if batch.weight or flat is None:
            (loss if scale == 1.0 else loss * scale).backward()
        if self._batches is not None:
            self._batches.forget_stand_in()
        self._parts.append(batch)

    def _weighed(self, weight: float | None) -> Batch:
        """Return the present batch with its weight on this worker and on all workers."""
        current = self._batches.take() if self._batches is not None else None
        epoch, ends = (current.epoch, current.ends_epoch) if current is not None else (0, False)
        if weight is not None:
            total = torch.tensor([float(weight)], dtype=torch.float64)
            self.ctx.peers.uncounted().control.all_reduce(total)
            return Batch(None, None, float(weight), float(total), epoch, self.steps, ends)
        if current is not None:
            return Batch(None, None, current.weight, current.global_weight, epoch, self.steps, ends)
        return Batch(None, None, 1.0, float(self.workers), epoch, self.steps, ends)

    def _together(self) -> Batch:
        """Return the batches since the last step as one."""
        parts, self._parts = self._parts, []
        own, total = sum(b.weight for b in parts), sum(b.global_weight for b in parts)
        return Batch(
            None, None, own, total, parts[-1].epoch, self.steps, any(b.ends_epoch for b in parts)
        )

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any worker: to stop early, all together."""
        votes = torch.tensor([float(flag)])
        self.ctx.peers.uncounted().control.all_reduce(votes, "max")
        return bool(votes)

    def check(self) -> float:
        """Return how far this replica is from the mean of all replicas.

        Where a strategy keeps replicas identical the distance is 0, and a difference raises an
        error.
        """
        if self.strategy.traits.replicas_identical or self.workers == 1:
            if self.workers > 1:
                expect_identical(self.ctx, self.replica, f"after step {self.steps}")
            return 0.0
        means = self._agree()
        return distance_to(self.replica, means) if means is not None else 0.0

    # --- after the loop, or between epochs

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Put the consensus weights into the model for the time of a `with` block.

        For evaluating and saving. All workers call it together.
        """
        agreed = None if self._finished else self._agree()  # after finish() all workers hold them
        with self.replica.holding(agreed):
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict of the consensus weights. All workers call it together."""
        with self.consensus():
            return self.replica.state_dict()

    def finish(self) -> None:
        """Make the last exchange and leave. All workers call it together.

        Some strategies average the weights here.
        """
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
        """Wait, without a deadline, for the workers of an asynchronous strategy."""
        if self.workers > 1 and not self.strategy.traits.in_step:
            assemble(self.ctx.transport, range(self.workers))

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            with suppress(Exception):
                self.ctx.transport.close()

    def serve(self) -> None:
        """Hold the weights for the workers until all of them have left. For a server's rank."""
        if self._build is not None:
            model, optimizer = built(self._build)
        else:
            model, optimizer = receive_model(self.ctx.transport, self._secret)
        replica = Replica(model, optimizer, _no_loss, allocate=self.ctx.transport.allocate)
        self.strategy.serve(self.ctx, replica)


@functools.cache
def end_quickly() -> None:
    """At exit, keep the garbage collector from searching all of torch's objects several times.

    That takes most of a second of CPU per rank. With more ranks than cores on a busy machine, a
    command whose training was over took tens of seconds to end.
    """
    atexit.register(gc.freeze)


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise BadRequest("your own loop computes the loss itself")
