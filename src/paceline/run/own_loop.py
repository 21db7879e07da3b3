"""A person's own training loop, kept together by any strategy.

    pace = paceline.join("allreduce")
    model, optimizer, batches = pace.prepare(model, optimizer, dataset, batch_size=64)
    for x, y in batches:                        # one epoch of this worker's batches
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()                        # synchronise, update
    pace.finish()

`pace.step(loss)` does the three lines of the loop in one. Started by `paceline launch -n 4
script.py`, torchrun, mpirun or srun; started alone, it is one worker. The parts are in run/loop/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.common.exits import end_quickly
from paceline.common.seeding import derive, random_states, set_random_states
from paceline.data.batches import OwnPasses
from paceline.data.own import OwnBatches
from paceline.data.passes import DEFAULT_BATCH, Asker, passes_of
from paceline.data.source import SourcePasses, makes_batches
from paceline.errors import BadRequest
from paceline.replica.replica import Replica, has_batch_norm
from paceline.run.loop import optimizer as paced
from paceline.run.loop import saving
from paceline.run.loop.conclusion import Failure
from paceline.run.loop.pair import Pair
from paceline.run.loop.pairs import Pairs, Watcher, no_loss
from paceline.run.loop.record import Record, Unrecorded
from paceline.run.loop.results import Results
from paceline.run.loop.saving import Loaded
from paceline.run.loop.talk import Talk, say
from paceline.run.own_server import Build, receive_or_build, send_model
from paceline.run.rank import make_context
from paceline.strategies.base import Context, Strategy, distance_to
from paceline.transport.base import Transport


class Pace(Talk, Results):
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
        local_rank: int = 0,
        record: Record | None = None,
    ) -> None:
        end_quickly()
        self._record = record or Unrecorded()
        self.local_rank = local_rank
        self.strategy, self.check_every, self.seed = strategy, check_every, seed
        self._transport, self._codec = self._record.metered(transport), codec
        self.ctx = self._context(strategy, workers, seed)
        self._secret, self._build = secret, build
        self._pairs = Pairs(
            strategy,
            self.ctx,
            lambda other, number: self._context(other, workers, derive(seed, "pair", number)),
        )
        self._finished = False
        if self.ctx.role == "worker":
            transport.patience.progress = self._pairs.step_in_progress
        self._loaded: Loaded | None = None  # a checkpoint that `prepare` goes on from
        self._resumed_at: int | None = None

    def _context(self, strategy: Strategy, workers: int, seed: int) -> Context:
        world = (self._transport, strategy, workers)
        return make_context(*world, codec=self._codec, seed=seed, recorder=self._record, say=say)

    @property
    def replica(self) -> Replica:
        return self._pairs.chosen(None).replica

    def _models(self) -> list[nn.Module]:
        return [pair.replica.model for pair in self._pairs]

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
        the same objects with the same names on the same device. From now on `optimizer.step()`
        synchronises before it updates. `batch_size` is per worker; the default is that of your
        DataLoader, otherwise 64. Call it once for each pair of model and optimizer.
        """
        paced.check(model, optimizer)
        self._record.preparing()
        self._random, number, loaded = random_states(), len(self._pairs), self._loaded
        try:
            if self.leads and self._build is None and not self._pairs:
                for server in self.ctx.servers:
                    send_model(self.ctx.transport, server, self._secret, model, optimizer)
            pair = self._pairs.add(model, optimizer, self._optimizer_step, loaded)
            self._device = self._device or next(model.parameters()).device
            if data is not None:
                inner = self._cut(data, batch_size, shard, model)
                usual = None if makes_batches(data) else DEFAULT_BATCH
                size = batch_size or getattr(data, "batch_size", usual)
                watcher = self._record.watch(Watcher(self._pairs, pair))
                pair.batches = OwnBatches(inner, self._models, watcher, data, size)
            if loaded is not None:
                loaded.set_batches(pair, number)
        finally:
            set_random_states(self._random)  # a seed that your script has set stays in force
        if loaded is not None:
            self._go_on(loaded, tell=number == 0)
        self._record.prepared(pair)
        return pair.loop_model, optimizer, pair.batches

    def optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None
    ) -> torch.optim.Optimizer:
        """Return the optimizer with a step that synchronises before it updates.

        For a loop with batches of its own. Without the model, the workers exchange the optimizer's
        parameters only, not the model's buffers (batch statistics).
        """
        if model is None and isinstance(optimizer, torch.optim.Optimizer):
            if not self.strategy.traits.flat:
                raise BadRequest(
                    f"{self.strategy.name} wraps the model: use"
                    " model, optimizer, _ = pace.prepare(model, optimizer)"
                )
            model = paced.Parameters(optimizer)
        return self.prepare(model, optimizer)[1]

    def _cut(
        self, data: Any, batch_size: int | None, shard: str | None, model: nn.Module
    ) -> OwnPasses:
        """Return this worker's part of the data."""
        if makes_batches(data):
            if batch_size is not None or shard is not None:
                raise BadRequest(
                    "your own code makes the batches, so batch_size= and shard= mean nothing here:"
                    " leave them out"
                )
            return SourcePasses(data, self.workers, next(model.parameters()).device)
        asker = Asker(
            self.workers,
            self.rank,
            self.seed,
            next(model.parameters()).device,
            self.ctx.peers.uncounted().control,
            self._random,
            self.strategy.traits.shard,
            has_batch_norm(model),
            say if self.leads else lambda text: None,
        )
        return passes_of(data, batch_size, shard, asker)

    # --- in the loop

    def backward(
        self,
        loss: Tensor,
        weight: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Add the gradients of this loss to those since the last step, as `loss.backward()` does.

        The first call after a step begins with cleared gradients. Within a worker losses add up, so
        a loop that accumulates over n batches divides each loss by n, as always. Between workers
        each loss counts by its share of the rows of this batch (or of `weight`).
        """
        pair = self._pairs.chosen(optimizer)
        pair.add(loss, self._pairs.now(pair, weight))
        self._record.add_loss(pair, loss)
        self._pairs.use(pair)

    def step(
        self,
        loss: Tensor | None = None,
        *,
        weight: float | None = None,
        clip_norm: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Compute gradients (where a loss is given), synchronise, update.

        `optimizer` says which one, where several were prepared.
        """
        if self._finished:
            raise BadRequest("this loop has been finished: no step can follow")
        pair = self._pairs.chosen(optimizer)
        if loss is not None:
            pair.add(loss, self._pairs.now(pair, weight))
            self._record.add_loss(pair, loss)
        elif weight is not None:
            raise BadRequest(
                "pace.step(weight=...) needs the loss that it weighs: pace.step(loss, weight=...)"
                " or pace.backward(loss, weight=...)"
            )
        elif not pair.has_gradients:
            raise BadRequest(
                "pace.step() without a loss needs gradients from pace.backward(loss) or"
                " loss.backward() before it"
            )
        self._step(pair, clip_norm)

    def synchronize(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Exchange the gradients now, so that you can clip them; the next step only updates.

        Where workers exchange weights it does nothing: gradients are each worker's own. All workers
        call it together.
        """
        pair = self._pairs.chosen(optimizer)
        self._pairs.use(pair)
        self._record.arrive(pair)
        pair.synchronize(self._pairs.now(pair))

    def _optimizer_step(self, pair: Pair) -> None:
        """What `optimizer.step()` does."""
        if pair.stepping or self._finished:  # what comes after the loop is the user's own
            pair.replica.apply()
        else:
            self._step(pair, None)

    def _step(self, pair: Pair, clip_norm: float | None) -> None:
        self._pairs.use(pair)
        self._record.arrive(pair)
        pair.step(self._pairs.now(pair), clip_norm)
        self._record.step(pair)
        if self.check_every and pair.steps % self.check_every == 0:
            self._check(pair)

    def check(self) -> float:
        """Return how far this replica is from the mean of all replicas.

        Where a strategy keeps replicas identical the distance is 0, and a difference raises an
        error.
        """
        return max((self._check(pair) for pair in self._pairs), default=0.0)

    def _check(self, pair: Pair) -> float:
        if self.workers == 1:
            return 0.0
        with self._record.aside("check"):
            if pair.strategy.traits.replicas_identical:
                pair.check()
                return 0.0
            means = self._agree(pair)
        return distance_to(pair.replica, means) if means is not None else 0.0

    # --- after the loop, or between epochs

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Put the consensus weights into the model for the time of a `with` block.

        For evaluating and saving. All workers call it together.
        """
        if not self._finished:
            self._pairs.meet("pace.consensus")
        with self._pairs.at("evaluate"), self._record.aside("evaluation"), ExitStack() as held:
            for pair in self._pairs if not self._finished else ():  # then all workers hold them
                held.enter_context(pair.replica.holding(self._agree(pair)))
            yield

    def state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
        """Return the model's state dict of the consensus weights. All workers call it together.

        `optimizer` says of which model, where several were prepared.
        """
        replica = self._pairs.chosen(optimizer).replica
        with self.consensus():
            return replica.state_dict()

    def save(self, path: str | Path, **more: Any) -> Path:
        """Write a checkpoint of the whole loop under this folder; return it.

        It holds the models' consensus weights, each worker's optimizers and random state, the
        strategy, the place in the data and the steps; and `more`, as in
        `pace.save("out", scheduler=scheduler.state_dict())`. The last two checkpoints are kept.
        All workers call it together.
        """
        if not len(self._pairs):
            raise BadRequest("call pace.prepare(model, optimizer) before pace.save")
        self._assemble()
        self._pairs.meet("pace.save")
        at, self._resumed_at = self._resumed_at, None
        with self._pairs.at("save"), self._record.aside("checkpoint"):
            spent = self._record.train_s
            made = saving.save(self._pairs, Path(path), self.steps, more, at, spent)
        self._record.saved(made)
        return made

    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from the newest checkpoint under this folder; return what `save` got as `more`.

        Call it after every `prepare`, or before the first one. With as many workers the loop goes
        on exactly. With another number each worker takes worker 0's optimizer and new random
        numbers, and a notice says so. All workers call it together.
        """
        self._assemble()
        loaded = Loaded(Path(path), self._pairs, self.seed)
        self._resumed_at = loaded.step
        if not len(self._pairs):
            self._loaded = loaded
            return loaded.more
        loaded.set_up_again(self._pairs)
        self._go_on(loaded)
        return loaded.more

    def _go_on(self, loaded: Loaded, tell: bool = True) -> None:
        loaded.set_random()
        self._record.loaded(loaded.train_s)
        if tell and self.leads and (told := loaded.told()) is not None:
            say(told)

    def finish(self) -> None:
        """Make the last exchange and leave. All workers call it together.

        Some strategies average the weights here.
        """
        if self._finished:
            return
        self._pairs.check_end()
        self._finished = True
        self.ctx.transport.patience.activity.enter("finish")
        self._record.finishing()
        self._assemble()
        for pair in self._pairs:
            replica, strategy = pair.replica, pair.strategy
            strategy.finish(replica)
            weights = strategy.consensus(replica)
            for region, agreed in zip(replica.regions, weights or (), strict=False):
                region.params.copy_(agreed)
        self.ctx.peers.barrier()
        self._leave(agreed=True)

    def leave(self) -> None:
        """Tell servers that this worker sends no more requests, if it has not finished.

        The end of a script calls it. It exchanges nothing, unlike `finish`.
        """
        if not self._finished:
            self._finished = True
            self._leave(agreed=False)

    def _leave(self, agreed: bool) -> None:
        self._record.finishing()
        for pair in self._pairs:
            pair.strategy.leave()
        self._record.finished(self._pairs, agreed)

    def _agree(self, pair: Pair) -> Sequence[Tensor] | None:
        self._assemble()
        return pair.strategy.consensus(pair.replica)

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.finish()
        else:
            with suppress(Exception):
                self._record.failed(Failure.of(error))
            with suppress(Exception):
                self.ctx.transport.close()

    def serve(self) -> None:
        """Hold the weights for the workers until all of them have left. For a server's rank."""
        made = receive_or_build(self.ctx.transport, self._secret, self._build)
        replica = Replica(*made, no_loss, allocate=self.ctx.transport.allocate)
        self._record.serve(self.strategy, self.ctx, replica)
