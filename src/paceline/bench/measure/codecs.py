"""Measure a codec's message in bytes and in time, against float32, one memcpy and PyTorch's own
hooks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.bench.peers.ddp_hooks import Bucket, Hooks
from paceline.codecs.base import Codec
from paceline.codecs.feedback import build_codec
from paceline.collectives.base import choose
from paceline.common.seeding import generator
from paceline.registry import codecs, models
from paceline.replica.flat import layout_of
from paceline.transport.alone import Alone
from paceline.types import Layout, Slot

# In units of one memcpy, for encoding and decoding together.
TIME_GOALS = {"fp16": 3.0, "int8": 8.0, "sign": 9.0, "topk": 20.0, "qsgd": 25.0}
SIZE_GOALS = {"sign": 30.0, "topk": 45.0, "powersgd": 40.0, "int8": 3.9, "qsgd": 7.5}
PEERS = {"fp16": "fp16", "powersgd": "powersgd"}  # codecs that PyTorch has a hook for


def bench_codecs(
    model: str, workers: int, rounds: int, numbers: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure sizes for a model, and times for `numbers` on one thread, without error feedback."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        sizes = layout_of(models.build(model, input_shape=(1, 28, 28), classes=10))
    names = [n for n in codecs.names() if n != "none"]
    times = _times(names, rounds, numbers, say)
    plain = 4 * sizes.numel
    rows = []
    for name in names:
        codec = build_codec(name)
        message = _used(codec, sizes)
        rows.append(
            {
                "codec": name,
                "kind": codec.kind,
                "message_bytes": message,
                "smaller": plain / message,
                "smaller_goal": SIZE_GOALS.get(name),
                "per_worker_bytes": per_worker(codec.kind, message, workers),
                "memcpys": times[name],
                "memcpys_goal": TIME_GOALS.get(name),
                "against_hook": times.get(f"{name} against its hook"),
            }
        )
    return {
        "model": model,
        "workers": workers,
        "plain_bytes": plain,
        "ring_bytes": per_worker("hop", plain, workers),
        "numbers": numbers,
        "rounds": rounds,
        "memcpy_ms": times["memcpy"],
        "codecs": rows,
    }


def per_worker(kind: str, message: int, workers: int) -> int:
    """Return the bytes that a worker sends in one exchange.

    Messages that cannot be added up go from each worker to all others; the rest is summed by ring.
    """
    if kind == "gather":
        return (workers - 1) * message
    return round(2 * (workers - 1) / workers * message)


def _used(codec: Codec, layout: Layout) -> int:
    values = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    message = torch.zeros(codec.message_bytes(layout), dtype=torch.uint8)
    return codec.plain.encode(
        values, layout, message, codec.plain.start(layout, generator(0, "a"), generator(0, "b"))
    )


def _times(
    names: list[str], rounds: int, numbers: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return each contender's ratios to the memcpy of the same round."""
    shapes = _shapes(numbers)
    layout, values, out = _layout(shapes), torch.randn(numbers), torch.empty(numbers)
    contenders: dict[str, Callable[[], None]] = {"memcpy": partial(_copy, values, out)}
    for name in names:
        contenders[name] = _there_and_back(_plain(name), layout, values, out)
    hooks = Hooks()
    for name, hook in PEERS.items():
        contenders[f"{name} exchange"] = _exchange(_plain(name), layout, values, out)
        contenders[f"{name} hook"] = _hook(getattr(hooks, hook), shapes, values, out)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for number in range(rounds + 1):  # the first warms up
            say(f"round {number} of {rounds}" if number else "warming up")
            for name, once in contenders.items():
                began = time.perf_counter()
                once()
                if number:
                    seconds[name].append(time.perf_counter() - began)
    finally:
        hooks.close()
    found: dict[str, Any] = {"memcpy": statistics.median(seconds["memcpy"]) * 1e3}
    for name, own in seconds.items():
        if name != "memcpy":
            found[name] = _spread(own, seconds["memcpy"])
    for name in PEERS:
        found[f"{name} against its hook"] = _spread(
            seconds[f"{name} hook"], seconds[f"{name} exchange"]
        )
    return found


def _copy(values: Tensor, out: Tensor) -> None:
    out.copy_(values)


def _spread(times: list[float], beside: list[float]) -> dict[str, float]:
    """Summarise the ratios of times in the same rounds."""
    ratios = [a / b for a, b in zip(times, beside, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def _plain(name: str) -> Codec:
    return build_codec(name).plain


def _there_and_back(
    codec: Codec, layout: Layout, values: Tensor, out: Tensor
) -> Callable[[], None]:
    state = codec.start(layout, generator(0, "own"), generator(0, "shared"))
    message = torch.zeros(codec.message_bytes(layout), dtype=torch.uint8)

    def there_and_back() -> None:
        used = codec.encode(values, layout, message, state)
        codec.decode(message[:used], layout, out)

    return there_and_back


def _exchange(codec: Codec, layout: Layout, values: Tensor, out: Tensor) -> Callable[[], None]:
    """Do what a hook does: a whole exchange, in place, on one rank."""
    state = codec.start(layout, generator(0, "own"), generator(0, "shared"))
    collective = choose("native", Alone())

    def exchange() -> None:
        out.copy_(values)
        codec.reduce(out, layout, collective, state)

    return exchange


def _hook(
    hook: Callable[[Bucket], None], shapes: list[tuple[int, ...]], values: Tensor, out: Tensor
) -> Callable[[], None]:
    for _ in range(3):  # PowerSGD's first calls are a plain all-reduce
        hook(Bucket(out.copy_(values), shapes))

    def exchange() -> None:
        hook(Bucket(out.copy_(values), shapes))

    return exchange


def _shapes(numbers: int) -> list[tuple[int, ...]]:
    """Split so many numbers into a square matrix and a vector of what is left."""
    side = math.isqrt(numbers)
    left = numbers - side * side
    return [(side, side), *([(left,)] if left else [])]


def _layout(shapes: list[tuple[int, ...]]) -> Layout:
    slots, at = [], 0
    for index, shape in enumerate(shapes):
        slots.append(
            Slot(
                f"tensor{index}",
                shape,
                torch.empty(shape, device="meta").stride(),
                at,
                math.prod(shape),
                0,
            )
        )
        at += math.prod(shape)
    return Layout(tuple(slots))
