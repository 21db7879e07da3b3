"""`pace.save` and `pace.load`: a loop of the user's own, in the checkpoints of `train`.

The layout is that of record/checkpoint.py. Each worker's part also holds the steps, what the loop
gave to `save`, and the parts of further pairs. With several pairs, `model.safetensors` has the
weights of all of them, under `0.`, `1.`, ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.common.seeding import (
    derive,
    saved_random_states,
    seed_everything,
    set_random_states,
)
from paceline.errors import BadRequest
from paceline.record import checkpoint
from paceline.registry import Spec
from paceline.strategies.base import Strategy
from paceline.strategies.parts.saved import Saved, on_device

if TYPE_CHECKING:
    from paceline.run.loop.pair import Pair
    from paceline.run.loop.pairs import Pairs

PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor)


def save(
    pairs: Pairs,
    path: Path,
    step: int,
    more: dict[str, Any],
    resumed_at: int | None,
    train_s: float = 0.0,
) -> Path:
    """Write a checkpoint. All workers call it together; `more` is each worker's own."""
    ctx, several = pairs.ctx, len(pairs) > 1
    for name, value in more.items():
        _check_plain(name, value)
    weights: dict[str, Tensor] = {}
    parts = []
    for number, pair in enumerate(pairs):
        if pair.pending or pair.synchronized:
            raise BadRequest(
                "pace.save was called between a backward pass and its step, whose gradients would"
                " be lost: call it after the step"
            )
        with pair.replica.holding(pair.strategy.consensus(pair.replica)):
            if ctx.worker_index == 0:
                prefix = f"{number}." if several else ""
                state = pair.replica.state_dict()
                weights.update({prefix + name: tensor for name, tensor in state.items()})
        parts.append(_part(pair))
    first = next(iter(pairs))
    about = {
        "step": step,
        "workers": ctx.workers,
        "members": list(range(ctx.workers)),
        "train_s": train_s,
        "optimizer": _optimizers(pairs),
        "strategy": described(first.strategy),
        "codec": str(ctx.codec.name),
        "samples": None,
    }
    own = {
        **parts[0],
        "random": saved_random_states(),
        "epoch_start": [],
        "others": parts[1:],
        "more": more,
    }
    return checkpoint.save(
        path / "checkpoints",
        step,
        ctx.worker_index,
        weights if ctx.worker_index == 0 else None,
        own,
        about,
        ctx.peers.barrier,
        resumed_at,
    )


def weights_of(pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """The weights that the pairs hold now, under the names of a checkpoint."""
    several = len(pairs) > 1
    return {
        f"{number}.{name}" if several else name: tensor
        for number, pair in enumerate(pairs)
        for name, tensor in pair.replica.state_dict().items()
    }


def _part(pair: Pair) -> dict[str, Any]:
    """What differs between workers, of one pair."""
    replica, ctx = pair.replica, pair.ctx
    part = {
        # not the method that may have been replaced, which refuses
        "optimizer": type(pair.optimizer).state_dict(pair.optimizer),
        "taken": pair.taken,
        "generators": [ctx.random.get_state(), ctx.shared_random.get_state()],
        "strategy": pair.strategy.state(),
        "batches": pair.batches.state() if pair.batches is not None else None,
        "samples_seen": replica.samples_seen,
        "steps": pair.steps,
    }
    if not pair.strategy.traits.replicas_identical:
        part["weights"] = [region.params.clone() for region in replica.regions]
    return part


class Loaded:
    """A checkpoint of a loop, as one worker reads it."""

    def __init__(self, path: Path, pairs: Pairs, seed: int) -> None:
        ctx = pairs.ctx
        if not ((path / "checkpoint.json").is_file() or (path / "checkpoints").is_dir()):
            raise BadRequest(f"{path} has no checkpoint: pace.save(path) makes one")
        self.folder, self.damaged = checkpoint.latest(path)
        self.said = checkpoint.about(self.folder)
        made = checkpoint.members(self.folder, self.said)
        self.members = made if self.said["workers"] == ctx.workers else frozenset()
        self.mine = ctx.worker_index in self.members
        own = checkpoint.load_own(self.folder, ctx.worker_index if self.mine else min(made))
        if "others" not in own:
            raise BadRequest(
                f"{self.folder} is a checkpoint of `paceline train`, not of pace.save: go on from"
                " it with --resume"
            )
        self._own, self._parts = own, [own, *own["others"]]
        self._weights = checkpoint.load_weights(self.folder / "model.safetensors")
        self._ctx, self._seed, self._strategy = ctx, seed, described(pairs.strategy)
        self._identical = pairs.strategy.traits.replicas_identical
        self._exact = pairs.strategy.traits.resumes.same == "exact"
        self._anew: list[str] = []
        if self.said.get("codec", "none") != ctx.codec.name:
            raise BadRequest(
                f"{self.folder} was made with codec {self.said.get('codec')}, not"
                f" {ctx.codec.name}: go on with the same"
            )

    @property
    def step(self) -> int:
        return int(self.said["step"])

    @property
    def train_s(self) -> float:
        """The seconds of training so far; 0 where the loop left no record."""
        return float(self.said["train_s"])

    @property
    def more(self) -> dict[str, Any]:
        """What the loop gave to `pace.save`."""
        return dict(self._own["more"])

    def set_up_again(self, pairs: Pairs) -> None:
        """Load all pairs, which have been prepared already."""
        self._refuse_other(pairs)
        for number, pair in enumerate(pairs):
            if not pair.again:
                raise BadRequest(
                    f"{pair.strategy.name} cannot be set up a second time: call pace.load(path)"
                    " before pace.prepare"
                )
            self.set_up(pair, number)
            self.set_batches(pair, number)

    def _refuse_other(self, pairs: Pairs) -> None:
        if len(self._parts) != len(pairs):
            raise BadRequest(
                f"{self.folder} holds {len(self._parts)} pair(s) of model and optimizer, and this"
                f" loop has prepared {len(pairs)}: prepare the same ones in the same order"
            )
        if (there := self.said["optimizer"]) != (here := _optimizers(pairs)):
            raise BadRequest(f"{self.folder} was made with optimizer {there}, not {here}")

    def set_up(self, pair: Pair, number: int) -> None:
        """Load one pair, and set its strategy up with what the checkpoint remembers."""
        if number >= len(self._parts):
            raise BadRequest(
                f"{self.folder} holds {len(self._parts)} pair(s) of model and optimizer, and this"
                " loop prepares more: prepare the same ones in the same order"
            )
        part, replica, ctx = self._parts[number], pair.replica, pair.ctx
        prefix = f"{number}." if len(self._parts) > 1 else ""
        try:
            replica.load_state_dict(
                {
                    name.removeprefix(prefix): tensor
                    for name, tensor in self._weights.items()
                    if name.startswith(prefix)
                }
            )
        except RuntimeError as error:
            raise BadRequest(
                f"{self.folder} was made with another model: {str(error).splitlines()[-1].strip()}"
            ) from None
        try:
            type(pair.optimizer).load_state_dict(pair.optimizer, part["optimizer"])
        except (ValueError, KeyError) as error:
            raise BadRequest(f"{self.folder} was made with another optimizer: {error}") from None
        pair.taken = part["taken"]
        device = next(replica.model.parameters()).device
        pair.set_up(self._saved(part, device))
        pair.restore(part["steps"])
        replica.samples_seen = part["samples_seen"]
        ctx.shared_random.set_state(part["generators"][1])
        if self.mine:
            for region, own in zip(replica.regions, part.get("weights", ()), strict=False):
                region.params.copy_(own)
            ctx.random.set_state(part["generators"][0])

    def _saved(self, part: dict[str, Any], device: torch.device) -> Saved | None:
        """What the strategy is set up with; None where it begins anew."""
        made = str(self.said["strategy"])
        if Spec.of(made).name != Spec.of(self._strategy).name and not self.mine:
            return None
        refusal = (
            f"{self.folder} was made with {made}, and {self._strategy} cannot go on from what that"
            " remembers: load it with the same strategy"
        )
        state = on_device(part["strategy"], device)
        return Saved(state, refusal, self.mine, self.members, self._anew)

    def set_batches(self, pair: Pair, number: int) -> None:
        """Go on at the same place in the data."""
        place = self._parts[number]["batches"]
        if pair.batches is not None and place is not None:
            pair.batches.restore(place)

    def set_random(self) -> None:
        """Set the default generators: as they were, or new ones for other workers."""
        if self.mine:
            set_random_states(self._own["random"])
        else:
            seed_everything(derive(self._seed, "resumed", self.step, self._ctx.worker_index))

    def told(self) -> str | None:
        """What is not as it was, for the user."""
        told, before = [self.damaged] if self.damaged else [], self.said["workers"]
        if before != self._ctx.workers:
            told.append(
                f"{self._ctx.workers} workers instead of {before}, with new random numbers"
                + ("" if self._identical else " and worker 0's optimizer")
            )
        if Spec.of(str(self.said["strategy"])).name != Spec.of(self._strategy).name:
            told.append(f"{self._strategy} goes on from a checkpoint of {self.said['strategy']}")
        if self._anew:
            told.append(f"these begin anew: {', '.join(self._anew)}")
        if not self._exact:
            told.append(
                f"{self._strategy} depends on the workers' speeds, so the result is not the one"
                " that an unbroken run has"
            )
        return f"going on from step {self.step}: {'; '.join(told)}" if told else None


def described(strategy: Strategy) -> str:
    """A strategy as the user writes it."""
    declared: Any = strategy
    fields = dataclasses.fields(declared) if dataclasses.is_dataclass(declared) else ()
    options = {
        option.name: getattr(strategy, option.name)
        for option in fields
        if option.init and getattr(strategy, option.name) != option.default
    }
    return str(Spec(strategy.name, options))


def _optimizers(pairs: Pairs) -> str:
    return ", ".join(type(pair.optimizer).__name__ for pair in pairs)


def _check_plain(name: str, value: Any) -> None:
    """Refuse what a checkpoint cannot hold: it is read without running code."""
    inside: Sequence[Any] = ()
    if isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple)):
        inside = value
    elif not isinstance(value, PLAIN):
        raise BadRequest(
            f"pace.save({name}=...): it contains a {type(value).__name__}, and a checkpoint holds"
            " numbers, texts, tensors, lists and dicts: give it a state_dict()"
        )
    for part in inside:
        _check_plain(name, part)
