"""How many samples each worker takes per step: as given, cut from a global batch, or by speed."""

from __future__ import annotations

from paceline.data.base import Data, Stream
from paceline.data.shards import split
from paceline.errors import BadRequest
from paceline.request.config import Config
from paceline.request.speeds import Speeds
from paceline.strategies.base import Strategy

DEFAULT_BATCH = 64


def batch_sizes(config: Config, data: Data) -> tuple[int, ...]:
    workers = config.workers
    total = None if isinstance(data.train, Stream) else len(data.train)
    if total is not None and workers > total:
        raise BadRequest(
            f"{workers} workers for {total} training samples: some would never see one"
        )
    if isinstance(data.train, Stream):
        if config.shard is not None or config.partition != "iid":
            raise BadRequest(
                "a stream comes in its own order: shard and partition do not apply to it"
            )
        if data.batch_size is not None and config.batch_size not in (None, data.batch_size):
            raise BadRequest(
                f"your DataLoader's batches have {data.batch_size} samples:"
                f" batch_size={config.batch_size} contradicts it"
            )
    if isinstance(data.train, Stream) and config.balance is not None:
        raise BadRequest(
            "a stream's batches come as they are: balance needs samples that can be dealt out"
        )
    if isinstance(data.train, Stream) and (
        config.global_batch_size is not None or isinstance(config.batch_size, (tuple, str))
    ):
        raise BadRequest("a stream takes one batch_size per worker (a DataLoader brings its own)")
    plan = Speeds.read(config.balance, workers) if config.balance is not None else None
    if config.global_batch_size is not None or config.batch_size == "all":
        whole = (
            total
            if "all" in (config.global_batch_size, config.batch_size)
            else config.global_batch_size
        )
        assert whole is not None
        if whole < workers:
            raise BadRequest(f"a global batch of {whole} cannot be cut for {workers} workers")
        whole = min(whole, total or whole)
        return (
            plan.sizes(whole) if plan is not None and plan.speeds else split(whole, [1.0] * workers)
        )
    size = config.batch_size or data.batch_size or DEFAULT_BATCH
    if isinstance(size, tuple):
        if len(size) != workers:
            raise BadRequest(
                f"batch_size={','.join(map(str, size))} has {len(size)} sizes for {workers} workers"
            )
        return size
    return plan.sizes(size * workers) if plan is not None and plan.speeds else (size,) * workers


def notices(config: Config, data: Data) -> list[str]:
    """A global batch that is larger than the training set is the training set."""
    whole, total = (
        config.global_batch_size,
        None if isinstance(data.train, Stream) else len(data.train),
    )
    if not isinstance(whole, int) or total is None or whole <= total:
        return []
    return [
        f"global_batch_size={whole}: there are {total} training samples, and all of them are one"
        " batch"
    ]


def as_given(config: Config, sizes: tuple[int, ...]) -> int | str | tuple[int, ...]:
    """Per worker; where they are cut by speed, what each would have otherwise: the run's record can
    be run again.
    """
    if config.balance is not None:
        return "all" if config.batch_size == "all" else sum(sizes) // len(sizes)
    return sizes if len(set(sizes)) > 1 else sizes[0]


def check_balance(config: Config, strategy: Strategy) -> None:
    if config.balance is None or Speeds.read(config.balance, config.workers).every is None:
        return
    if not strategy.in_step:
        raise BadRequest(
            f"balance=measured: with {config.described()['strategy']} nobody waits for the slowest:"
            " there is nothing to balance"
        )
    if not strategy.flat:
        raise BadRequest(
            f"balance=measured: {strategy.name} exchanges inside the backward pass: work and"
            " waiting look alike"
        )
    if strategy.survives:
        raise BadRequest(
            f"balance=measured: {strategy.name} weighs workers equally and survives them: give"
            " speeds"
        )
    if (
        config.shard or ("static" if config.partition == "by-label" else strategy.shard)
    ) == "static":
        raise BadRequest(
            "balance=measured deals samples out anew, and static shards are cut once: use --shard"
            " global, or give speeds"
        )
