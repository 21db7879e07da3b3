"""Compare models that are split over two workers with the whole model in one process.

The pipeline (2 stages, 8 micro-batches) is also compared with PyTorch's own (1F1B over gloo) on the
same cut. A batch's forward and backward passes are measured, with one thread per worker.

\b
Examples:
  paceline bench parallel
  paceline bench parallel --rounds 9 --steps 20
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.bench.parts.benchmark import ROUNDS, Option, Say
from paceline.bench.parts.table import Table, against_goal

OPTIONS = {"rounds": ROUNDS, "steps": Option(10, "batches per round", least=1)}
GOALS = {("pipeline", "PyTorch's"): 1.0, ("tensor", "one process"): 1.5}
GOALS |= {("domain", "one process"): 1.6}
MODELS = {
    "pipeline": "8 x Linear 1024, batch 256",
    "tensor": "mlp 4096 x 4096, batch 128",
    "domain": "cnn on 512 x 512, batch 8",
}


def measure(say: Say, rounds: int, steps: int) -> dict[str, Any]:
    from paceline.bench.measure.parallel import bench_parallel

    return bench_parallel(rounds, steps, say)


def show(result: dict[str, Any]) -> Iterator[Table | str]:
    rows = []
    for name, case in result["cases"].items():
        for way, spread in case["ratios"].items():
            goal = GOALS.get((name, way))
            rows.append((name, MODELS[name], way, *against_goal(spread, goal, 2)))
    title = f"speed against, {result['rounds']} rounds of {result['steps']} batches"
    yield Table(("form", "model", "against", "ratio", "min - max", "goal"), rows, title, (0, 1, 2))
    for name, case in result["cases"].items():
        yield f"{name}: a worker holds {case['held']:.2f} of the parameters ({case['form']})"
        if "idle" in case:
            yield (
                f"{name}: idle {case['idle']['median']:.1%} ({case['idle']['min']:.1%} to"
                f" {case['idle']['max']:.1%}); the timetable has {case['idle_in_theory']:.1%} if"
                " all stages take equally long, and"
                f" {case['idle_with_measured_tasks']['median']:.1%} with the measured times of its"
                " tasks"
            )
