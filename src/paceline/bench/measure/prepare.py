"""Time shards of the flights table by Polars, Spark (with and without `persist`) and plain pandas.

Every contender is a process of its own; they run one after another, and each round reverses the
order. A larger table repeats the same flights. Its files are written just before, so that all
contenders find them in memory; every contender writes its shards to the disk.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.common.places import find
from paceline.errors import RunFailed

TABLES = ("flights.csv", "weather.csv", "planes.csv")
CONTENDERS = ("polars", "pandas", "spark", "spark, no persist")
SHARDS = 4
PANDAS = Path(__file__).parent.parent / "peers" / "pandas_flights.py"
PATIENCE_S = 3600


def bench_prepare(
    data_dir: str | None,
    millions: tuple[float, ...],
    rounds: int,
    master: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    folder = find("flights", data_dir, ("flights",), TABLES)
    cases = []
    for size in millions:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as work:
            table, rows = multiplied(folder, Path(work), size)
            cases.append(_case(table, rows, Path(work), rounds, master, say))
    return {"master": master, "rounds": rounds, "cases": cases}


def multiplied(folder: Path, work: Path, millions: float) -> tuple[Path, int]:
    """Write the flights often enough for so many rows, and copy the other tables."""
    head, _, body = (folder / "flights.csv").read_bytes().partition(b"\n")
    own = body.count(b"\n")
    times = max(1, round(millions * 1e6 / own))
    target = work / "flights"
    target.mkdir()
    for name in TABLES[1:]:
        shutil.copy(folder / name, target / name)
    with open(target / "flights.csv", "wb") as file:
        file.write(head + b"\n")
        for _ in range(times):
            file.write(body)
    return work, times * own


def _case(
    data: Path, rows: int, work: Path, rounds: int, master: str, say: Callable[[str], None]
) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {c: [] for c in CONTENDERS}
    for number in range(rounds):
        for contender in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
            say(f"{rows / 1e6:.1f} M rows, round {number + 1} of {rounds}: {contender}")
            out = work / "out"
            found[contender].append(_timed(contender, data, out, master))
            shutil.rmtree(out, ignore_errors=True)
    return {
        "rows": rows,
        "contenders": {c: _summary(runs, found["pandas"]) for c, runs in found.items()},
    }


def _timed(contender: str, data: Path, out: Path, master: str) -> dict[str, float]:
    if contender == "pandas":
        command = [sys.executable, str(PANDAS), str(data / "flights"), str(out), str(SHARDS)]
    else:
        engine, _, kind = contender.partition(", ")
        command = [
            str(Path(sys.executable).with_name("paceline")),
            "prepare",
            "flights",
            "--data-dir",
            str(data),
            "--out",
            str(out),
        ]
        command += ["--engine", engine, "--shards", str(SHARDS), "--json", "--quiet"]
        command += ["--master", master] if engine == "spark" else []
        command += ["--no-persist"] if kind else []
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    whole = time.perf_counter() - began
    if done.returncode:
        raise RunFailed(
            f"{contender} failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}"
        )
    seconds = dict(json.loads(done.stdout)["seconds"])
    start = seconds.pop("start", 0.0)
    return {
        "whole_s": whole,
        "start_s": start,
        "work_s": sum(seconds.values()),
        **{f"{k}_s": v for k, v in seconds.items()},
    }


def _summary(runs: list[dict[str, float]], pandas: list[dict[str, float]]) -> dict[str, Any]:
    ratios = [p["work_s"] / r["work_s"] for r, p in zip(runs, pandas, strict=True)]
    median = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
    return {
        **median,
        "runs": runs,
        "faster_than_pandas": statistics.median(ratios),
        "ratios": ratios,
    }
