"""How many samples each worker takes per step: as given, cut from a global batch, or by speed."""

from __future__ import annotations

from paceline.data.adopt import not_used, own_sampler
from paceline.data.base import Data, Stream
from paceline.data.passes import DEFAULT_BATCH
from paceline.data.shards import split
from paceline.errors import BadRequest
from paceline.request.config import Config
from paceline.request.speeds import Speeds
from paceline.strategies.base import Strategy


def batch_sizes(config: Config, data: Data) -> tuple[int, ...]:
    """Return the batch size of each worker; where the model is split, of each copy of it."""
    workers = config.arrangement.copies
    if isinstance(data.train, Stream):
        _check_stream(config, data)
        total = None
    else:
        _check_loader(config, data)
        total = len(data.train)
        if workers > total:
            raise BadRequest(
                f"{workers} workers for {total} training samples: some would never see one"
            )
    asked = Speeds.read(config.balance, workers) if config.balance is not None else None
    speeds = asked if asked and asked.speeds else None
    if config.global_batch_size is not None or config.batch_size == "all":
        asks_for_all = "all" in (config.global_batch_size, config.batch_size)
        whole = total if asks_for_all else config.global_batch_size
        assert isinstance(whole, int)
        if whole < workers:
            raise BadRequest(f"a global batch of {whole} cannot be cut for {workers} workers")
        whole = min(whole, total or whole)
        return speeds.sizes(whole) if speeds else split(whole, [1.0] * workers)
    size = config.batch_size or data.batch_size or DEFAULT_BATCH
    if isinstance(size, tuple):
        if len(size) != workers:
            raise BadRequest(
                f"batch_size={','.join(map(str, size))} has {len(size)} sizes for {workers} workers"
            )
        return size
    return speeds.sizes(size * workers) if speeds else (size,) * workers


def follows_loader(config: Config, data: Data) -> bool:
    """Return whether the batches are those of the user's DataLoader, one per worker and step."""
    return data.loader is not None and not _instead_of_loader(config)


def unknown(config: Config, data: Data) -> bool:
    """Return whether only the user's batch sampler knows the sizes of its batches."""
    return follows_loader(config, data) and data.batch_size is None


def _instead_of_loader(config: Config) -> str:
    """Return the option that deals samples out in another way than a DataLoader; else nothing."""
    if config.partition != "iid":
        return f"partition={config.partition}"
    if isinstance(config.batch_size, (tuple, str)):
        return "batch_size with several sizes, or all"
    for name in ("privacy", "balance", "global_batch_size"):
        if getattr(config, name) is not None:
            return name
    if isinstance(config.validation, float):
        return "validation"
    if config.data_share != 1.0:
        return "data_share"
    return "shard" if config.shard is not None else ""  # last: the other options decide it, too


def _check_loader(config: Config, data: Data) -> None:
    """Refuse options that would replace the order of a sampler of the user's own."""
    name = own_sampler(data.loader) if data.loader is not None else None
    if name is None:
        return
    if option := _instead_of_loader(config):
        raise BadRequest(
            f"{option} deals samples out in its own way, and your DataLoader has a sampler of its"
            f" own ({name}): leave one of them out"
        )


def _check_stream(config: Config, data: Data) -> None:
    """Refuse options that need samples in a known number and order."""
    if config.shard is not None or config.partition != "iid":
        raise BadRequest("a stream comes in its own order: shard and partition do not apply to it")
    if data.batch_size is not None and config.batch_size not in (None, data.batch_size):
        raise BadRequest(
            f"your DataLoader's batches have {data.batch_size} samples:"
            f" batch_size={config.batch_size} contradicts it"
        )
    if config.balance is not None:
        raise BadRequest(
            "balance needs samples that can be dealt out: the batches of a stream come as they are"
        )
    if config.global_batch_size is not None or isinstance(config.batch_size, (tuple, str)):
        raise BadRequest("a stream takes one batch_size per worker (a DataLoader brings its own)")


def loader_notices(config: Config, data: Data) -> list[str]:
    """Tell which settings of the user's DataLoader are not used, and why."""
    if data.loader is None or follows_loader(config, data):
        return []
    option = _instead_of_loader(config)
    measured = str(config.balance or "").startswith("measured")
    reading = measured or option == "privacy"
    unused = not_used(data.loader, reading)
    if not unused:
        return []
    read = " and reads them in the training process" if reading else ""
    return [
        f"{option} deals samples out in its own way{read}, so these settings of your DataLoader"
        f" are not used: {', '.join(unused)}"
    ]


def notices(config: Config, data: Data) -> list[str]:
    """Tell of a global batch that is larger than the training set."""
    whole = config.global_batch_size
    if isinstance(data.train, Stream) or not isinstance(whole, int):
        return []
    total = len(data.train)
    if whole <= total:
        return []
    return [
        f"global_batch_size={whole}: there are {total} training samples, and all of them are one"
        " batch"
    ]


def as_given(config: Config, sizes: tuple[int, ...]) -> int | str | tuple[int, ...]:
    """Return `batch_size` for the saved options, so that they describe the same run again.

    Where batches are cut by speed, it is the size that each worker would have without that.
    """
    if config.balance is not None:
        return "all" if config.batch_size == "all" else sum(sizes) // len(sizes)
    return sizes if len(set(sizes)) > 1 else sizes[0]


def check_balance(config: Config, strategy: Strategy) -> None:
    """Refuse balance=measured where a strategy gives nothing to measure or to balance."""
    if config.balance is None or Speeds.read(config.balance, config.workers).every is None:
        return
    if not strategy.traits.in_step:
        raise BadRequest(
            f"balance=measured: with {config.described()['strategy']} no worker waits for the"
            " slowest, so there is nothing to balance"
        )
    if not strategy.traits.flat:
        raise BadRequest(
            f"balance=measured: {strategy.name} exchanges inside the backward pass: work and"
            " waiting look alike"
        )
    if strategy.traits.weighs_equally:
        raise BadRequest(
            f"balance=measured: {strategy.name} weighs all workers equally, whatever their"
            " batches: give speeds instead"
        )
    by_default = "static" if config.partition == "by-label" else strategy.traits.shard
    if (config.shard or by_default) == "static":
        raise BadRequest(
            "balance=measured deals samples out anew, and static shards are cut once: use --shard"
            " global, or give speeds"
        )
