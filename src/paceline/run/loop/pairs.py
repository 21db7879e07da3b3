"""The pairs of model and optimizer that one loop trains, and which batch each of them works on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.own import OwnBatches
from paceline.errors import BadRequest
from paceline.replica.flat import layout_of
from paceline.replica.replica import Replica
from paceline.run.loop import optimizer as paced
from paceline.run.loop.ending import agree_on_steps
from paceline.run.loop.pair import Pair
from paceline.run.loop.saving import Loaded
from paceline.strategies.base import Context, Strategy, Traits
from paceline.transport.activity import Point
from paceline.types import Batch

UNUSED = (
    "gradients came from other batches than those that pace.prepare has returned, so every worker"
    " may train on the same samples: iterate what it returns (model, optimizer, batches ="
    " pace.prepare(model, optimizer, loader)), or give it no data and let each worker read its own"
)
FORGOTTEN = (
    "gradients were computed in {}, but no step was made: call optimizer.step() after"
    " loss.backward(), or pace.step(loss) instead of both"
)


class Pairs:
    """The pairs of one worker. The first has the strategy of `join`, each other one a copy."""

    def __init__(
        self, strategy: Strategy, ctx: Context, context: Callable[[Strategy, int], Context]
    ) -> None:
        self.strategy, self.ctx, self._context = strategy, ctx, context
        self._blank = _copied(strategy)
        self._all: list[Pair] = []

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: Callable[[Pair], None],
        loaded: Loaded | None = None,
    ) -> Pair:
        """Set up one more pair, whose `optimizer.step()` calls `step`.

        `loaded`: a checkpoint that it goes on from.
        """
        strategy, ctx = self.strategy, self.ctx
        if self._all:
            self._refuse_shared(model)
            strategy, ctx = self._another()
        replica = Replica(
            model, optimizer, no_loss, flat=strategy.traits.flat, allocate=ctx.transport.allocate
        )
        ctx.codec.fits(layout_of(model))
        pair = Pair(ctx, strategy, replica)
        if loaded is not None:
            loaded.set_up(pair, len(self))
        else:
            pair.set_up(None)
        paced.pace_step(optimizer, lambda: step(pair), pair.forget)
        if strategy.traits.serves == "ranks" and strategy.traits.exchanges == "gradients":
            paced.refuse_state(optimizer, strategy.name)
        self._all.append(pair)
        return pair

    def _refuse_shared(self, model: nn.Module) -> None:
        known = {id(p) for pair in self for p in pair.replica.model.parameters()}
        if any(id(p) in known for p in model.parameters()):
            raise BadRequest(
                "prepare was called before with parameters of this model: each parameter belongs to"
                " one pair of model and optimizer. For two optimizers of one model prepare its"
                " parts: pace.prepare(model.encoder, first), pace.prepare(model.decoder, second)"
            )

    def _another(self) -> tuple[Strategy, Context]:
        """A strategy and a context for one more pair; refuses where there can be one only."""
        if (reason := _one_only(self.strategy.traits)) is None and self._blank is None:
            reason = "it cannot be copied (copy.deepcopy failed)"
        if reason is not None:
            raise BadRequest(
                f"{self.strategy.name} keeps one model together, because {reason}: make a second"
                " pace for another model (second = paceline.join(...)), or put both models into one"
                " Module"
            )
        strategy = copy.deepcopy(self._blank)
        assert strategy is not None
        return strategy, self._context(strategy, len(self))

    def chosen(self, optimizer: torch.optim.Optimizer | None) -> Pair:
        """The pair of this optimizer; the only pair where None is given."""
        if not self._all:
            raise BadRequest("call pace.prepare(model, optimizer) first")
        if optimizer is None:
            if len(self) > 1:
                raise BadRequest(
                    f"{len(self)} optimizers were prepared on this pace: say which one with"
                    " optimizer=, as in pace.step(loss, optimizer=opt_d)"
                )
            return self._all[0]
        for pair in self:
            if pair.optimizer is optimizer:
                return pair
        raise BadRequest("optimizer= is not one that was given to pace.prepare")

    @contextmanager
    def at(self, point: Point) -> Iterator[None]:
        """Say that this worker is at a point between its steps."""
        activity = self.ctx.transport.patience.activity
        activity.enter(point, self.steps)
        yield
        activity.enter("compute", self.steps + 1)

    # --- mistakes

    @property
    def steps(self) -> int:
        """The steps of all pairs."""
        return sum(pair.steps for pair in self)

    def step_in_progress(self) -> int | None:
        """The number of the step that this worker is making; None: it makes none."""
        return self.steps + 1 if any(pair.stepping for pair in self) else None

    def check_end(self) -> None:
        """Before the last exchange: refuse a loop that would end wrongly or wait for ever."""
        for pair in self:
            pair.refuse_new_parameters()
            pair.end_batch(self.now(pair))
        if not self.steps and any(pair.has_ever_come for pair in self):
            raise BadRequest(FORGOTTEN.format("the whole loop"))
        self.meet("pace.finish")

    def meet(self, call: str) -> None:
        """Refuse a call that not all workers make after the same number of steps."""
        if self._all and self.strategy.traits.in_step and self.ctx.workers > 1:
            agree_on_steps(self.ctx.transport, self.ctx.workers, self.steps, call)

    # --- batches

    def batches_of(self, pair: Pair) -> OwnBatches | None:
        """The batches that a pair's gradients come from: its own, or the first that there are."""
        if pair.batches is not None:
            return pair.batches
        return next((p.batches for p in self if p.batches is not None), None)

    def now(self, pair: Pair, weight: float | None = None) -> Batch:
        """Return the present batch with its weight on this worker and on all workers."""
        batches = self.batches_of(pair)
        current = batches.current if batches is not None else None
        epoch, ends = (current.epoch, current.ends_epoch) if current is not None else (0, False)
        workers = self.ctx.workers
        if weight is not None:
            if not float(weight) >= 0:
                raise BadRequest(f"weight={weight}: it must be 0 or more")
            total = torch.tensor([float(weight)], dtype=torch.float64)
            if self.strategy.traits.in_step:
                self.ctx.peers.uncounted().control.all_reduce(total)
            else:  # the workers do not wait for each other
                total *= workers
            return Batch(None, None, float(weight), float(total), epoch, pair.steps, ends)
        if current is not None:
            return current
        return Batch(None, None, 1.0, float(workers), epoch, pair.steps, ends)

    def use(self, pair: Pair) -> None:
        """Note that gradients or a step come from the present batch."""
        if (batches := self.batches_of(pair)) is not None:
            if not batches.begun and self.ctx.workers > 1:
                raise BadRequest(UNUSED)
            batches.use()
            batches.forget_stand_in()


class Watcher:
    """Tells the pairs which batch their gradients come from."""

    def __init__(self, pairs: Pairs, owner: Pair) -> None:
        self._pairs, self._owner = pairs, owner
        self._steps_before: int | None = None  # when the last pass began

    def _fed(self) -> list[Pair]:
        return [p for p in self._pairs if self._pairs.batches_of(p) is self._owner.batches]

    def begin_pass(self) -> None:
        """Refuse a pass after one in which the loop has made no step."""
        came = False
        for pair in self._fed():
            pair.refuse_new_parameters()
            came, pair.has_come = came or pair.has_come, False
        if came and self._steps_before == self._pairs.steps:
            raise BadRequest(FORGOTTEN.format("a whole pass over the batches"))
        self._steps_before = self._pairs.steps

    def begin_batch(self, batch: Batch) -> None:
        for pair in self._fed():
            pair.begin_batch(batch)

    def end_batch(self, batch: Batch) -> None:
        for pair in self._fed():
            if pair.end_batch(batch):
                self._pairs.use(pair)


def _one_only(traits: Traits) -> str | None:
    """Why a strategy keeps one model together only; None: it can have several."""
    if traits.serves:
        return "its servers hold one model"
    if traits.needs_shared_memory:
        return "its workers share the memory of one model"
    if not traits.in_step:
        return "its workers do not run in step, so the exchanges of two models could be mixed up"
    return None if traits.flat else "PyTorch makes its process group once"


def _copied(strategy: Strategy) -> Strategy | None:
    try:
        return copy.deepcopy(strategy)
    except Exception:  # a strategy of the user's own may hold anything
        return None


def no_loss(outputs: Any, targets: Any) -> Tensor:
    raise BadRequest("your own loop computes the loss itself")
