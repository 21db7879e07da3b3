"""A pair: one model and its optimizer, kept together by one strategy.

Gradients come in two ways. `pace.backward(loss)` multiplies the loss by the worker's share of the
batch before the backward pass. After the loop's own `loss.backward()` the step multiplies the
gradients instead. Either way a worker's gradient counts by its share of each batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.data.own import OwnBatches
from paceline.errors import BadRequest
from paceline.replica.replica import Replica
from paceline.run.loop import scaler
from paceline.run.loop.gradients import OwnGradients
from paceline.run.state import set_up_strategy
from paceline.strategies.base import Context, Strategy, expect_identical
from paceline.transport.activity import Activity
from paceline.transport.status.stacks import check_signal
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.strategies.parts.saved import Saved


class Pair:
    """A replica, its strategy, and the batches whose gradients it has."""

    def __init__(self, ctx: Context, strategy: Strategy, replica: Replica) -> None:
        self.ctx, self.strategy, self.replica = ctx, strategy, replica
        self.batches: OwnBatches | None = None  # where its batches come from
        self.steps = 0
        self.last = Batch(None, None, 0.0, 0.0, 0, 0)  # that of the last step
        self.gradients = OwnGradients(replica.flat) if replica.flat is not None else None
        self._parts: list[Batch] = []  # batches whose gradients were added since the last step
        # The factor on the gradients that is still to be applied, at the step.
        self._unit = 1.0
        self._by_pace = self._was_by_pace = False  # the gradients come (came) from `add`
        self._untouched = False  # this worker has not touched all of its parameters
        self._synchronized: Batch | None = None  # exchanged, but the update is still to come
        self.stepping = False
        self.has_come = self.has_ever_come = False  # gradients have come: in this pass, at all
        self._known, self._parameters = self._count(), _identities(replica)
        self.taken: list[dict[str, Any]] = []  # options that the strategy took out of it
        if self.gradients is None:
            self._factor = 1.0  # on each gradient, before DDP exchanges it
            for parameter in replica.model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(self._weigh)

    def set_up(self, saved: Saved | None) -> None:
        """Set the strategy up, new or with what a checkpoint remembers. It may be set up again."""
        self.activity.enter("set up")
        groups = self.optimizer.param_groups
        for group, taken in zip(groups, self.taken, strict=False):
            group.update(taken)
        before = [dict(group) for group in groups]
        set_up_strategy(self.strategy, self.ctx, self.replica, saved)
        # A strategy may take options out of the optimizer (momentum, where a codec comes after it).
        self.taken = [
            {key: value for key, value in old.items() if new[key] is not value}
            for old, new in zip(before, groups, strict=True)
        ]
        self.strategy.begin(self.replica, None)
        self.activity.enter("compute", self.steps + 1)

    @property
    def activity(self) -> Activity:
        return self.ctx.transport.patience.activity

    @property
    def again(self) -> bool:
        """Whether the strategy can be set up again: it has started nothing outside this worker."""
        traits = self.strategy.traits
        return traits.flat and not (
            traits.serves or traits.needs_shared_memory or traits.needs_second_channel
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.replica.optimizer

    @property
    def loop_model(self) -> nn.Module:
        """The model for the loop: the user's own, or DDP's wrapper under the names of its own."""
        model, forward = self.replica.model, self.replica.forward
        if not isinstance(forward, nn.Module) or forward is model:
            return model
        for name in ("named_parameters", "state_dict", "load_state_dict"):
            object.__setattr__(forward, name, getattr(model, name))
        return forward

    @property
    def sums_gradients(self) -> bool:
        """Whether the next step adds up gradients over the workers."""
        probe = Batch(None, None, 1.0, 2.0, 0, self.steps)
        return self.ctx.workers > 1 and (
            self.strategy.traits.exchanges == "gradients" or self.strategy.scale(probe) != 1.0
        )

    @property
    def has_gradients(self) -> bool:
        """Whether there is something to make a step with."""
        return (
            bool(self._parts)
            or self._synchronized is not None
            or self.gradients is None
            or self.gradients.arrived
        )

    @property
    def pending(self) -> bool:
        """Whether `pace.backward` has added gradients for which no step was made."""
        return self._by_pace and bool(self._parts)

    @property
    def synchronized(self) -> bool:
        """Whether the gradients were exchanged, and the update is still to come."""
        return self._synchronized is not None

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def _weigh(self, gradient: Tensor) -> Tensor:
        return gradient if self._factor == 1.0 else gradient * self._factor

    # --- the batches go on

    def begin_batch(self, batch: Batch) -> None:
        """Note the share of the batch whose gradients come next."""
        scale = self.strategy.scale(self._numbered(batch))
        if self.gradients is None:
            self._factor = scale
        elif not batch.weight:
            self.gradients.mute()
        elif self._parts and not self._by_pace and scale != self._unit:  # of another share
            self.gradients.rescale(self._unit / scale)
            self._unit = scale

    def end_batch(self, batch: Batch) -> bool:
        """Return whether the loop has computed gradients of this batch for the next step."""
        came = self._note(batch)
        if self.gradients is not None:
            self.gradients.unmute()
        return came

    def _note(self, batch: Batch) -> bool:
        if self.gradients is None or not self.gradients.arrived:
            return False
        self.gradients.arrived = False
        self.has_come = self.has_ever_come = True
        if self._by_pace and self._parts:
            raise BadRequest(
                "loss.backward() and pace.backward(loss) were mixed in one step: use one of them"
            )
        if batch.weight:
            self._unit = self.strategy.scale(self._numbered(batch))
        self._by_pace = False
        if not self._parts or self._parts[-1] is not batch:
            self._parts.append(batch)
        return True

    def _numbered(self, batch: Batch) -> Batch:
        """The batch without its samples, with this pair's count of steps."""
        return Batch(
            None,
            None,
            batch.weight,
            batch.global_weight,
            batch.epoch,
            self.steps,
            batch.ends_epoch,
        )

    def forget(self) -> None:
        """The loop has zeroed the gradients."""
        self._parts.clear()
        self._unit, self._by_pace, self._synchronized = 1.0, False, None
        if self.gradients is not None and self.gradients.arrived:
            self.gradients.arrived = False
            self.has_come = self.has_ever_come = True

    def restore(self, steps: int) -> None:
        """Go on after so many steps, without gradients."""
        self.steps = steps
        self.forget()
        for parameter in self.replica.model.parameters():
            parameter.grad = None

    # --- gradients

    def add(self, loss: Tensor, batch: Batch) -> None:
        """Add the gradients of one loss. A batch of weight 0 changes nothing."""
        self._refuse_late()
        flat = self.replica.flat
        if not self.pending:
            self.forget()
            if flat is not None:
                flat.forget_gradients()
            else:
                self.optimizer.zero_grad()
        scale = self.strategy.scale(self._numbered(batch))
        # DDP exchanges in the backward pass: every worker makes one
        if flat is None:
            factor, self._factor = self._factor, 1.0
        if batch.weight or flat is None:
            (loss if scale == 1.0 else loss * scale).backward()
        if flat is None:
            self._factor = factor
        if self.gradients is not None:
            self.gradients.arrived = False
        self._by_pace = True
        self._parts.append(batch)

    def _refuse_late(self) -> None:
        if self._synchronized is not None:
            raise BadRequest(
                "a backward pass came between pace.synchronize() and the step, so its gradients"
                " are not synchronised: call pace.synchronize() after the last backward pass"
            )

    def synchronize(self, now: Batch) -> None:
        """Exchange the gradients now; the next step only updates."""
        traits = self.strategy.traits
        if self._synchronized is not None or self.gradients is None or not self.sums_gradients:
            return  # DDP has exchanged them in the backward pass; others do not exchange gradients
        if not traits.update_last:
            raise BadRequest(
                f"{self.strategy.name} cannot exchange gradients apart from its update: to clip,"
                " use pace.step(clip_norm=...) instead of pace.synchronize()"
            )
        # A strategy that cannot clip after its exchange refuses this norm, too.
        self.replica.clip_norm = math.inf
        batch = self._settle(now, None, None)
        with self.replica.skipping():
            self._exchange(batch)
        if self.ctx.codec.lossless:
            self.gradients.flat.skip_untouched()
        self.gradients.arrived = False
        self._synchronized = batch

    def _settle(self, now: Batch, scaling: scaler.Scaling | None, inverse: float | None) -> Batch:
        """Put the gradients in the flat buffers, each counting by its share; return their batch."""
        gradients = self.gradients
        if gradients is not None:
            if not self._parts and not gradients.arrived:
                self._refuse_old(gradients)
                gradients.arrived = True  # the loop has set gradients without a backward pass
            self._note(now)
            if self.sums_gradients:
                gradients.refuse_changes(scaling is not None and scaling.inverse is None)
            self._untouched = gradients.take()
            factor = (1.0 if self._by_pace else self._unit) * (inverse or 1.0)
            if factor != 1.0:
                gradients.scale(factor)
        elif inverse is not None:
            for parameter in self.replica.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)
        return self._together(now)

    def _refuse_old(self, gradients: OwnGradients) -> None:
        """Refuse a step with the gradients of the step before."""
        if not gradients.present or gradients.replaced:
            return
        if self._was_by_pace:
            raise BadRequest(
                "optimizer.step() came after pace.step(loss) without a backward pass in between:"
                " pace.step(loss) computes gradients, synchronises and updates, so leave"
                " optimizer.step() out"
            )
        if self.sums_gradients:
            raise BadRequest(
                "optimizer.step() came without a backward pass since the last step, and the"
                " gradients of that step are those of all workers already: call loss.backward()"
                " before each step"
            )

    def _together(self, now: Batch) -> Batch:
        """Return the batches since the last step as one."""
        parts, self._parts = self._parts or [now], []
        own, total = sum(b.weight for b in parts), sum(b.global_weight for b in parts)
        ends = any(b.ends_epoch for b in parts)
        return Batch(None, None, own, total, parts[-1].epoch, self.steps, ends)

    # --- the step

    def step(self, now: Batch, clip_norm: float | None = None) -> None:
        """Exchange and update; after `synchronize` only update."""
        if clip_norm is not None and not float(clip_norm) > 0:
            raise BadRequest(f"clip_norm={clip_norm}: it must be more than 0")
        self._refuse_new_groups()
        self.activity.enter("exchange", self.steps + 1)
        self.replica.clip_norm = clip_norm
        with scaler.taken(self.optimizer) as scaling:
            if scaling is not None and self._skips(scaling):
                self._skip(now)
            elif self._synchronized is not None:
                self._update(scaling)
            else:
                self._exchange_and_update(now, scaling)
        # what schedulers look at; a server may have stepped
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._was_by_pace = self._by_pace
        self.forget()
        self.activity.enter("compute", self.steps + 1)
        if (line := self.activity.line) is not None:
            check_signal(line)

    def _exchange_and_update(self, now: Batch, scaling: scaler.Scaling | None) -> None:
        batch = self._settle(now, scaling, scaling.inverse if scaling is not None else None)
        self._exchange(batch)
        if self.gradients is not None and self._untouched:
            self.gradients.flat.skip_untouched()  # the strategy may have made no update
        self._count_step(batch)

    def _skip(self, now: Batch) -> None:
        """Make no update, because the gradients of some worker are not finite."""
        self._note(now)
        batch = self._synchronized or self._together(now)
        self.stepping = True
        try:
            self.strategy.skip(self.replica, batch)
        finally:
            self.stepping = False
        self._count_step(batch)

    def _update(self, scaling: scaler.Scaling | None) -> None:
        """Make the update that `synchronize` has left."""
        assert self._synchronized is not None
        assert self.gradients is not None
        if self.gradients.arrived:
            self._refuse_late()
        if scaling is not None and scaling.inverse is not None:
            self.gradients.rescale(scaling.inverse)
        self.stepping = True
        try:
            self.replica.apply()
        finally:
            self.stepping = False
        self._count_step(self._synchronized)

    def _exchange(self, batch: Batch) -> None:
        self.stepping = True
        try:
            self.strategy.step(self.replica, batch)
        finally:
            self.stepping = False

    def _count_step(self, batch: Batch) -> None:
        self.replica.samples_seen += batch.weight
        self.steps += 1
        self.last = batch
        # the next forward pass reads weights from now on
        self.strategy.begin(self.replica, None)

    def _skips(self, scaling: scaler.Scaling) -> bool:
        together = self.ctx.workers > 1 and self.strategy.traits.in_step
        return scaler.agree(scaling, self.optimizer, self._any if together else None)

    def _any(self, flag: bool) -> bool:
        votes = torch.tensor([float(flag)])
        self.ctx.peers.uncounted().control.all_reduce(votes, "max")
        return bool(votes)

    def _refuse_new_groups(self) -> None:
        if self._count() != self._known:
            raise BadRequest(
                "the optimizer has other parameters than at pace.prepare (add_param_group?), which"
                " the workers would not exchange: make the optimizer with all parameters before"
                " pace.prepare"
            )

    def refuse_new_parameters(self) -> None:
        """Refuse parameters that came, or began to be trained, after `prepare`."""
        new = _identities(self.replica) - self._parameters
        for name, parameter in self.replica.model.named_parameters():
            if (id(parameter), parameter.requires_grad) in new and parameter.requires_grad:
                raise BadRequest(
                    f"{name} was added to the model, or began to be trained, after pace.prepare, so"
                    " the workers do not exchange it: add and unfreeze parameters before"
                    " pace.prepare"
                )

    def check(self) -> None:
        """Raise unless all workers hold the same bits."""
        expect_identical(self.ctx, self.replica, f"after step {self.steps}")


def _identities(replica: Replica) -> set[tuple[int, bool]]:
    return {(id(p), p.requires_grad) for p in replica.model.parameters()}
