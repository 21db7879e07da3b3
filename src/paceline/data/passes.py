"""Batches for your own training loop, from any data, dealt out to the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.common.seeding import random_states, saved_random_states, set_random_states
from paceline.common.values import shortened
from paceline.data.adopt import in_its_order, not_used, own_sampler, training_part
from paceline.data.ahead import iterate
from paceline.data.base import Data, Stream
from paceline.data.batches import OwnPasses, ShardBatches, StreamBatches
from paceline.data.content import rows, to_device, whole
from paceline.data.order import Broadcasts, LoaderOrder, Start, batches_of, generators_of, worker_0s
from paceline.data.shards import Cuts, GlobalShards, StaticShards
from paceline.errors import BadRequest
from paceline.types import Batch

DEFAULT_BATCH = 64


@dataclass(frozen=True)
class Asker:
    """The worker that asks for batches, and what its loop knows."""

    workers: int
    rank: int
    seed: int
    device: torch.device
    peers: Broadcasts  # worker 0's random states come through it
    states: dict[str, Any]  # of the default generators, as the script has set them
    shard: str  # of the strategy, for data without an order of its own
    batch_norm: bool
    say: Callable[[str], None]


def passes_of(data: Any, batch_size: int | None, shard: str | None, asker: Asker) -> OwnPasses:
    """Return one worker's batches of the data.

    A DataLoader keeps its order, its batch size (for each worker) and its settings. With one worker
    it is iterated as it is.
    """
    _refuse_wrong(data, batch_size, shard)
    if hasattr(data, "batch"):
        given = Data("own", data, None, (), None)
    else:
        given = data if isinstance(data, Data) else in_its_order(training_part(data))
    brought, train = given.batch_size, given.train
    size = batch_size or brought or DEFAULT_BATCH
    replaced = batch_size is not None and brought not in (None, batch_size)
    if isinstance(train, Stream):
        if replaced:
            raise BadRequest(
                f"your DataLoader's batches have {brought} samples: batch_size={size}"
                " contradicts it"
            )
        if asker.workers == 1 and isinstance(train.batches, DataLoader):
            return LoaderPasses(train.batches, asker.device)
        _tell(asker, given.notice)
        return StreamBatches(
            train, size, asker.workers, asker.rank, asker.seed, asker.device, True, whole
        )
    loader = given.loader
    if loader is not None and shard is None:
        if batch_size not in (None, brought):
            batches_of(loader, batch_size)  # refuses a batch sampler of your own
            asker.say(f"batch_size={size} was given and replaces your DataLoader's ({brought}).")
        elif asker.workers == 1:
            return LoaderPasses(loader, asker.device)
        _tell(asker, given.notice)
        return _in_the_loaders_order(loader, batch_size, given, asker)
    if loader is not None:
        _refuse_own_sampler(loader, f"shard={shard}")
        if unused := not_used(loader, reading=False):
            asker.say(f"shard={shard} shuffles, so these are not used: {', '.join(unused)}.")
    sizes, cuts = (size,) * asker.workers, Cuts(given.drop_last, asker.batch_norm)
    static = (shard or asker.shard) == "static"
    shards = (
        StaticShards(len(train), sizes, asker.seed, cuts=cuts)
        if static
        else GlobalShards(len(train), sizes, asker.seed, cuts)
    )
    return ShardBatches(train, shards, asker.rank, asker.device, True, asker.seed, whole)


def _refuse_wrong(data: Any, batch_size: int | None, shard: str | None) -> None:
    if isinstance(data, str):
        raise BadRequest(
            f"data={shortened(data)} is a text: give what paceline.load_data({shortened(data)})"
            " returns, tensors, a Dataset or a DataLoader"
        )
    if batch_size is not None and batch_size < 1:
        raise BadRequest(f"batch_size={batch_size}: it must be 1 or more")
    if shard not in (None, "global", "static"):
        raise BadRequest(f"shard={shard!r}: allowed are global, static")


def _in_the_loaders_order(
    loader: DataLoader[Any], batch_size: int | None, given: Data, asker: Asker
) -> ShardBatches:
    start = worker_0s(loader, asker.states, asker.peers)
    order = LoaderOrder(
        loader,
        asker.workers,
        states=start,
        batch_size=batch_size,
        no_lone_row=asker.batch_norm,
    )
    assert not isinstance(given.train, Stream)
    return ShardBatches(given.train, order, asker.rank, asker.device, True, _seed_of(start), whole)


def _tell(asker: Asker, notice: str) -> None:
    if notice and asker.workers > 1:
        asker.say(notice)


def _refuse_own_sampler(loader: DataLoader[Any], what: str) -> None:
    if name := own_sampler(loader):
        raise BadRequest(
            f"{what} deals samples out itself, and your DataLoader has a sampler of its own"
            f" ({name}): leave one of them out"
        )


def _seed_of(start: Start) -> int:
    """Return a seed for the loader's processes that follows from the script's own seed."""
    assert start.default is not None
    generator = torch.Generator()
    generator.set_state(start.default["torch"])
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


class LoaderPasses:
    """The user's own DataLoader, iterated as in a plain loop by the only worker."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.loader, self.device = loader, device
        self.epoch, self.position, self.step, self.ended = 0, 0, 0, False
        self._generators = generators_of(loader)
        self._began: dict[str, Any] | None = None  # the random states when this pass began
        self._open = False  # a pass has begun and not ended
        self._resumes = False  # the next pass goes on in the middle
        self._given = (0, 0)
        self._last: Iterator[Any] | None = None  # of a pass whose last batch was given

    @property
    def epochs_done(self) -> int:
        return self.epoch

    @property
    def steps_per_epoch(self) -> int | None:
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.one_pass()

    def one_pass(self) -> Iterator[Batch]:
        length, batches = self.steps_per_epoch, self._opened()
        for read in batches:
            self._given, self.position = (self.epoch, self.position), self.position + 1
            self.ended = self.position == length
            count = max(1, rows(read))
            content = to_device(read, self.device)
            batch = Batch(content, None, count, count, self.epoch, self.step, self.ended)
            self.step += 1
            if self.ended:
                self.epoch, self.position, self._open = self.epoch + 1, 0, False
                self._last = batches
            yield batch
        self._last = None
        if self.position:  # the loader did not know its length
            self.epoch, self.position, self.ended, self._open = self.epoch + 1, 0, True, False

    def _opened(self) -> Iterator[Any]:
        """Return an iterator over the loader; a resumed pass goes on after its last batch."""
        self._open = True
        if not self._resumes or self._began is None:
            self._began = self._random()
            return iterate(self.loader)
        self._resumes, now = False, random_states()
        set_random_states(self._began["default"])
        for generator, state in zip(self._generators, self._began["generators"], strict=True):
            generator.set_state(state)
        batches = iterate(self.loader)
        for _ in range(self.position):
            next(batches)
        if self.position:  # otherwise the order is not drawn yet
            set_random_states(now)
        return batches

    def _random(self) -> dict[str, Any]:
        return {
            "default": saved_random_states(),
            "generators": [g.get_state() for g in self._generators],
        }

    def begin_epoch(self, anew: bool) -> None:
        if self._open and not self._resumes:
            self._open = False
            self.epoch, self.position = self.epoch + (not anew), 0

    def give_back(self) -> None:
        (self.epoch, self.position), self.step, self._open = self._given, self.step - 1, True

    def state(self) -> dict[str, Any]:
        if self._last is not None and not self._open and self._generators:
            next(self._last, None)  # a sampler draws once more from its generator when it ends
        return {
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "began": self._began if self._open else None,
            "generators": [g.get_state() for g in self._generators],
        }

    def restore(self, state: dict[str, Any]) -> None:
        if "began" not in state:
            raise BadRequest(
                "the checkpoint was made with several workers or with other data: resume it with"
                " the same"
            )
        self.step, self.epoch, self.position = state["step"], state["epoch"], state["position"]
        self._began = state["began"]
        self._resumes = self._open = self._began is not None
        for generator, kept in zip(self._generators, state.get("generators", ()), strict=False):
            generator.set_state(kept)
