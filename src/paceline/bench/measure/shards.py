"""Measure opening shards, training from them, and streaming more than a window holds.

Opening and memory are measured in new processes. Throughput: the same model on the same rows in the
same order, from mapped shards and from tensors in memory, in neighbouring blocks of steps, one
thread.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.data.base import TensorSamples
from paceline.data.batches import ShardBatches
from paceline.data.manifest import Manifest, ShardWriter
from paceline.data.sharded import ShardedSamples, shards
from paceline.data.windows import WindowShards
from paceline.errors import RunFailed

FEATURES = 200
OPENED = """
import json, sys, time
import psutil, torch
from paceline.data.sharded import shards
shards(sys.argv[2], window=sys.argv[3], verify="no") if sys.argv[1] == "warm" else None
def private():
    info = psutil.Process().memory_full_info()
    return info.uss
before = private()
began = time.perf_counter()
data = shards(sys.argv[2], window=sys.argv[3], verify="no")
seconds = time.perf_counter() - began
opened = private() - before
peak, seen, total = 0, 0, 0.0
if sys.argv[1] == "stream":
    from paceline.data.batches import ShardBatches
    from paceline.data.windows import WindowShards
    train = data.train
    order = WindowShards(train.spans, (256,), 0, train.window_rows)
    process, count = psutil.Process(), 0
    base = process.memory_info().rss
    batches = ShardBatches(train, order, 0, torch.device("cpu"))
    for batch in batches:
        seen += batch.weight
        total += float(batch.targets.sum())
        count += 1
        if count % 50 == 0:
            peak = max(peak, process.memory_info().rss - base)
        if batches.ended:
            break
found = {"seconds": seconds, "private_bytes": opened, "peak_bytes": peak}
print(json.dumps({**found, "rows": seen, "sum": total}))
"""


def make_shards(folder: Path, count: int, shard_bytes: int) -> tuple[int, float]:
    """Write shards of random rows; return the number of rows and the sum of the targets."""
    rows, infos, total = shard_bytes // (4 * FEATURES), [], 0.0
    random = np.random.default_rng(0)
    block = random.standard_normal((1000, FEATURES), dtype=np.float32)
    for number in range(count):
        with ShardWriter(
            folder, "0" * 8, "train", number, rows, (FEATURES,), ("float32", "int64")
        ) as writer:
            for start in range(0, rows, len(block)):
                part = block[: min(len(block), rows - start)]
                targets = random.integers(0, 2, len(part))
                total += float(targets.sum())
                writer.write(part, targets)
            infos.append(writer.close())
    kinds = {"dtype": "float32", "shape": [FEATURES]}, {"dtype": "int64", "classes": ["0", "1"]}
    Manifest("table", "made up", "none", "", *kinds, infos, report={}).write(folder)
    return rows * count, total


def bench_shards(
    count: int, megabytes: int, rounds: int, steps: int, say: Callable[[str], None]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as work:
        folder = Path(work) / "shards"
        say(f"writing {count} shards of {megabytes} MB")
        rows, total = make_shards(folder, count, megabytes * 1_000_000)
        size = count * megabytes * 1_000_000
        say("opening them in new processes")
        opened = [_process("open", folder, "256MB") for _ in range(rounds)]
        window = size // 3
        say(f"streaming {size / 1e6:,.0f} MB through windows of {window / 1e6:,.0f} MB")
        streamed = _process("stream", folder, f"{window}b")
        if (streamed["rows"], streamed["sum"]) != (rows, total):
            raise RunFailed(
                f"the stream gave {streamed['rows']:,} rows of {rows:,}: every row should come once"
            )
        say("training from shards and from memory, in turns")
        ratios = _throughput(folder, rounds, steps)
    return {
        "shards": count,
        "bytes": size,
        "rows": rows,
        "open_s": statistics.median(o["seconds"] for o in opened),
        "open_s_runs": [o["seconds"] for o in opened],
        "private_bytes": statistics.median(o["private_bytes"] for o in opened),
        "window_bytes": window,
        "stream_peak_bytes": streamed["peak_bytes"],
        "from_shards_over_memory": statistics.median(ratios),
        "ratios": ratios,
    }


def _process(what: str, folder: Path, window: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", OPENED, what, str(folder), window],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise RunFailed(
            f"the process that opens shards failed: {done.stderr.strip().splitlines()[-1:]}"
        )
    return dict(json.loads(done.stdout))


def _throughput(folder: Path, rounds: int, steps: int) -> list[float]:
    data = shards(str(folder), verify="no")
    mapped = data.train
    assert isinstance(mapped, ShardedSamples)
    whole = TensorSamples(
        torch.cat([m.rows for m in mapped.inputs]), torch.cat([m.rows for m in mapped.targets])
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = WindowShards(mapped.spans, (64,), 0, mapped.window_rows)

    def trained(samples: Any) -> Iterator[None]:
        for batch in ShardBatches(samples, order, 0, torch.device("cpu")):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
            optimizer.step()
            yield

    def rate(loop: Iterator[None]) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            next(loop)
        return steps / (time.perf_counter() - began)

    one, other = trained(mapped), trained(whole)
    rate(one), rate(other)
    ratios = []
    for number in range(rounds):
        if number % 2:
            memory, disk = rate(other), rate(one)
        else:
            disk, memory = rate(one), rate(other)
        ratios.append(disk / memory)
    return ratios
