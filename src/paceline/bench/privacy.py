"""Compare private with plain training and with Opacus.

The models are mlp and cnn, on one thread.

\b
Examples:
  paceline bench privacy
  paceline bench privacy --batch-sizes 64 --rounds 9
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.bench.parts.benchmark import DATA_DIR, Option, Say, integers
from paceline.bench.parts.table import Table
from paceline.report.words import size

OPTIONS = {
    "rounds": Option(31, "pairs of neighbouring blocks of steps", least=2),
    "steps": Option(10, "steps per block", least=1),
    "batch_sizes": Option("64,256", "batch sizes to measure", metavar="N,..."),
    "data_dir": DATA_DIR,
}


def measure(
    say: Say, rounds: int, steps: int, batch_sizes: str, data_dir: str | None
) -> dict[str, Any]:
    sizes = tuple(integers("--batch-sizes", batch_sizes, least=1))
    from paceline.bench.measure.privacy import bench_privacy

    return bench_privacy(data_dir, rounds, steps, sizes, say)


def show(result: dict[str, Any]) -> Iterator[Table | str]:
    yield Table(
        ("model", "batch", "contender", "samples/s"),
        [
            (case["model"], str(case["batch_size"]), contender, f"{rate:,.0f}")
            for case in result["cases"]
            for contender, rate in sorted(case["samples_per_s"].items(), key=lambda pair: -pair[1])
        ],
        f"samples/s on {result['data']}, one thread, noise {result['noise']:g}",
        left=(0, 2),
    )
    yield Table(
        ("model", "batch", "ratio", "median", "middle half", "goal"),
        [row for case in result["cases"] for row in _ratios(case)],
        f"ratios of neighbouring blocks of {result['steps']} steps, {result['rounds']} pairs",
        left=(0, 2),
        unbroken=(0,),
    )
    for case in result["cases"]:
        for mode, why in case["left_out"].items():
            yield f"Opacus, {mode}, {case['model']}: left out ({why})"


def _ratios(case: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    model, batch = case["model"], str(case["batch_size"])
    for r in case["ratios"]:
        spread = " - ".join(f"{q:.2f}" for q in r["quarters"])
        goal = f">= {r['goal']:g}" if r["goal"] else ""
        yield model, batch, r["title"], f"{r['median']:.2f}", spread, goal
    peak = {name: size(memory["peak"]) for name, memory in case["memory_bytes"].items()}
    title, goal = f"memory, {peak['private']} / {peak['plain']}", f"<= {case['memory_goal']:g}"
    yield model, batch, title, f"{case['memory_ratio']:.2f}", "", goal
