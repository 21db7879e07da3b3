"""The order of a user's DataLoader: which batch of its batch sampler each worker takes at a step.

All ranks draw the same batches from the loader's batch sampler. In step t of P workers, worker p
takes batch tP + p. So P workers with batches of b samples see, step by step, what one worker with
batches of P*b samples sees.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from paceline.common.seeding import (
    OwnRandom,
    derive,
    random_states,
    saved_random_states,
    set_random_states,
)
from paceline.data.shards import Cursor
from paceline.errors import BadRequest


class Broadcasts(Protocol):
    """Sends worker 0's tensor to all workers."""

    def broadcast(self, tensor: torch.Tensor) -> Any: ...


AT_ONCE = 64  # batches that are drawn together from a sampler that does not know its length


@dataclass(frozen=True)
class Start:
    """The random states with which the order of an epoch is drawn."""

    default: dict[str, Any] | None  # of the default generators; None: seeded by the epoch
    generators: tuple[torch.Tensor, ...]  # of the loader's and the samplers' own generators


class LoaderOrder:
    """Shards that follow a DataLoader's batch sampler.

    `seed` (in `train`): the default generators are seeded for each epoch. `states` (in `join`):
    they go on from these states, and draw what PyTorch draws in a plain loop: the base seed of the
    loader's processes, then the sampler's numbers. Generators of the loader's or the sampler's own
    go on from epoch to epoch in both cases.

    With `drop_last` of the loader an epoch ends before a round that has no batch for some worker.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        workers: int,
        *,
        seed: int = 0,
        states: Start | None = None,
        batch_size: int | None = None,
        no_lone_row: bool = False,
    ) -> None:
        self.loader, self.workers, self.seed = loader, workers, seed
        self.batches = batches_of(loader, batch_size)
        size = getattr(self.batches, "batch_size", None) or loader.batch_size
        self.size: int | None = size if isinstance(size, int) else None
        self.batch_sizes = (self.size or 1,) * workers
        self._full_rounds = loader.drop_last
        self._no_lone_row = no_lone_row
        self._generators = generators_of(loader)
        self._carries_on = states is not None
        begin = Start(None, tuple(g.get_state() for g in self._generators))
        self._starts = {0: states or begin}
        self._epoch = -1  # the epoch of which batches have been drawn
        self._drawn: list[Sequence[Any]] = []
        self._rest: Iterator[Sequence[Any]] | None = None  # of this epoch, not drawn yet
        self._now = self._starts[0]
        if self.steps_per_epoch == 0:
            raise BadRequest(
                f"your DataLoader's sampler gives {len(self.batches)} batches of"
                f" {self.size or 'several'} samples, too few for {workers} workers: use smaller"
                " batches or fewer workers"
            )

    @property
    def steps_per_epoch(self) -> int | None:
        batches = _length(self.batches)
        if batches < 0:
            return None
        return batches // self.workers if self._full_rounds else -(-batches // self.workers)

    # --- drawing

    def _round(self, cursor: Cursor) -> list[Sequence[Any]]:
        """Return the batches of the round at `cursor`: fewer than P in the last round."""
        self._draw(cursor.epoch, cursor.position + self.workers)
        found = list(self._drawn[cursor.position : cursor.position + self.workers])
        if not found or (self._full_rounds and len(found) < self.workers):
            raise BadRequest(
                f"your DataLoader's sampler gave {len(self._drawn)} batches in epoch"
                f" {cursor.epoch + 1}, too few for {self.workers} workers"
            )
        # Batch norm cannot train on one row, and the other rows of the round are as good.
        if self._no_lone_row and len(found) > 1 and len(found[-1]) == 1 and len(found[-2]) > 2:
            found[-2:] = [found[-2][:-1], [found[-2][-1], *found[-1]]]
        return found

    def _draw(self, epoch: int, count: int) -> None:
        """Draw at least `count` batches of an epoch, unless it has fewer."""
        if epoch != self._epoch:
            self._begin(epoch)
        while self._rest is not None and len(self._drawn) < count:
            self._go_on(AT_ONCE * self.workers)

    def _begin(self, epoch: int) -> None:
        if epoch not in self._starts:
            last = max((e for e in self._starts if e < epoch), default=None)
            if last is None:
                raise BadRequest(f"the order of epoch {epoch + 1} cannot be drawn any more")
            # Each epoch's order depends on the one before it only through these states.
            if self._carries_on or self._generators:
                for before in range(last, epoch):
                    if before != self._epoch:
                        self._begin(before)
                    self._keep(before + 1, self._now)
            else:
                self._keep(epoch, self._starts[last])
        self._epoch, self._drawn, self._now = epoch, [], self._starts[epoch]
        if self._now.default is None:
            own = OwnRandom(derive(self.seed, "loader", epoch))
            with own():
                self._now = Start(random_states(), self._now.generators)
        self._set_epoch(epoch)
        with self._random():
            self._rest = iter(self.batches)
            persistent = self.loader.persistent_workers and self.loader.num_workers > 0
            if epoch == 0 or not persistent:
                torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            if self.loader.num_workers > 0 and (epoch == 0 or not persistent):
                self._rest = iter(self.batches)  # PyTorch's iterator does so, too
        known = self.steps_per_epoch is not None
        self._go_on(None if known else AT_ONCE * self.workers)

    def _set_epoch(self, epoch: int) -> None:
        """Tell samplers that ask for it which epoch begins; in your own loop your script does."""
        given = self.loader.sampler
        order = getattr(self.batches, "sampler", None)
        if isinstance(order, DistributedSampler) and isinstance(given, DistributedSampler):
            order.set_epoch(given.epoch if self._carries_on else epoch)
            return
        for sampler in () if self._carries_on else (self.batches, order):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)  # type: ignore[union-attr]

    def _keep(self, epoch: int, now: Start) -> None:
        default = now.default if self._carries_on else None
        self._starts[epoch] = Start(default, now.generators)
        for old in [e for e in self._starts if e < epoch - 1]:
            del self._starts[old]

    def _go_on(self, count: int | None) -> None:
        assert self._rest is not None
        with self._random():
            before = len(self._drawn)
            for batch in islice(self._rest, count):
                self._drawn.append(batch if hasattr(batch, "__len__") else list(batch))
        if count is None or len(self._drawn) - before < count:
            self._rest = None

    @contextmanager
    def _random(self) -> Iterator[None]:
        """Draw with the states of the order; leave those of the training as they were."""
        default, own = random_states(), [g.get_state() for g in self._generators]
        assert self._now.default is not None
        set_random_states({**self._now.default, **_cuda(default)})
        for generator, state in zip(self._generators, self._now.generators, strict=True):
            generator.set_state(state)
        try:
            yield
        finally:
            self._now = Start(random_states(), tuple(g.get_state() for g in self._generators))
            set_random_states(default)
            for generator, state in zip(self._generators, own, strict=True):
                generator.set_state(state)

    # --- as shards

    def counts(self, cursor: Cursor) -> tuple[int, ...]:
        sizes = [len(batch) for batch in self._round(cursor)]
        return (*sizes, *(0 for _ in range(self.workers - len(sizes))))

    def take(self, cursor: Cursor, worker: int) -> Sequence[Any]:
        found = self._round(cursor)
        return found[worker] if worker < len(found) else ()

    def advance(self, cursor: Cursor) -> Cursor:
        position = cursor.position + self.workers
        self._draw(cursor.epoch, position + self.workers)
        left = len(self._drawn) - position
        if left >= (self.workers if self._full_rounds else 1):
            return Cursor(cursor.epoch, position)
        return Cursor(cursor.epoch + 1, 0)

    def state(self, cursor: Cursor) -> dict[str, Any]:
        if cursor.epoch not in self._starts:
            self._draw(cursor.epoch, 0)
        start = self._starts[cursor.epoch]
        return {
            "kind": "loader",
            "epoch": cursor.epoch,
            "position": cursor.position,
            "batch_size": self.size,
            "default": None if start.default is None else _savable(start.default),
            "generators": list(start.generators),
        }

    def restore(self, state: dict[str, Any]) -> Cursor:
        if state["kind"] != "loader":
            raise BadRequest(
                f"the checkpoint was made with shard={state['kind']}, not in the order of a"
                f" DataLoader: resume it with shard={state['kind']}"
            )
        if state["position"] and state["batch_size"] != self.size:
            raise BadRequest(
                "the batch size of a DataLoader can only change between epochs, and this checkpoint"
                f" is from the middle of one: use batch_size={state['batch_size']}"
            )
        generators = tuple(state["generators"])
        if len(generators) != len(self._generators):
            generators = self._starts[min(self._starts)].generators
        default = state["default"] if self._carries_on else None
        if self._carries_on and default is None:
            default = self._starts[min(self._starts)].default
        self._starts = {state["epoch"]: Start(default, generators)}
        self._epoch, self._rest, self._drawn = -1, None, []
        cursor = Cursor(state["epoch"], state["position"])
        self._draw(cursor.epoch, cursor.position + self.workers)
        least = self.workers if self._full_rounds else 1
        if len(self._drawn) - cursor.position < least:  # other workers: no round is left
            return Cursor(cursor.epoch + 1, 0)
        return cursor


def batches_of(loader: DataLoader[Any], batch_size: int | None = None) -> Any:
    """Return the loader's batch sampler, or one with another batch size.

    A DistributedSampler is replaced by the order of its whole data set.
    """
    given = loader.batch_sampler
    if type(given) is not BatchSampler:
        size = getattr(given, "batch_size", None)
        if batch_size not in (None, size):
            raise BadRequest(
                f"your DataLoader has a batch sampler of its own ({type(given).__name__}):"
                f" batch_size={batch_size} contradicts it"
            )
        return given
    size = batch_size or given.batch_size
    if isinstance(given.sampler, DistributedSampler):
        return BatchSampler(whole_order(given.sampler), size, given.drop_last)
    return given if size == given.batch_size else BatchSampler(given.sampler, size, given.drop_last)


def whole_order(given: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """Return a sampler with the order of the whole data set that `given` cuts for its ranks."""
    whole = copy.copy(given)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = len(given.dataset)  # type: ignore[arg-type]
    return whole


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that the loader and its samplers hold, each once."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    holders = (loader, loader.sampler, loader.batch_sampler, inner)
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def worker_0s(loader: DataLoader[Any], states: dict[str, Any], peers: Broadcasts) -> Start:
    """Return worker 0's random states, and those of its loader's generators, on every worker.

    They are sent as numbers, once.
    """
    version, internal, gauss = states["python"]
    _, keys, at, has_gauss, kept = states["numpy"]
    own = [g.get_state() for g in generators_of(loader)]
    floats = struct.unpack("<qq", struct.pack("<dd", gauss or 0.0, kept))
    size = [len(loader.dataset), _length(loader.batch_sampler)]  # type: ignore[arg-type]
    words = [version, *internal, gauss is not None, at, has_gauss, *floats, *size]
    parts = [
        torch.tensor(words, dtype=torch.int64),
        torch.as_tensor(keys.astype("int64")),
        *(state.to(torch.int64) for state in (states["torch"], *own)),
    ]
    message = torch.cat(parts)
    peers.broadcast(message)
    found, numbers, torch_state, *others = message.split([len(part) for part in parts])
    version, *internal, has, at, has_gauss, one, two, samples, batches = found.tolist()
    if size != [samples, batches]:
        raise BadRequest(
            f"worker 0's DataLoader has {samples} samples in {batches} batches, and this worker's"
            f" has {size[0]} in {size[1]}: give all workers the same DataLoader over the whole data"
            " set; Paceline deals its batches out"
        )
    gauss, kept = struct.unpack("<dd", struct.pack("<qq", one, two))
    default = {
        "torch": torch_state.to(torch.uint8),
        "python": (version, tuple(internal), gauss if has else None),
        "numpy": ("MT19937", numbers.numpy().astype("uint32"), at, has_gauss, kept),
    }
    return Start(default, tuple(other.to(torch.uint8) for other in others))


def _length(batches: Any) -> int:
    """Return the number of batches of an epoch; -1 where the sampler does not know it."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return -1


def _cuda(states: dict[str, Any]) -> dict[str, Any]:
    return {"cuda": states["cuda"]} if "cuda" in states else {}


def _savable(states: dict[str, Any]) -> dict[str, Any]:
    """Return random states in types that a checkpoint can hold."""
    before = random_states()
    try:
        set_random_states(states)
        return saved_random_states()
    finally:
        set_random_states(before)
