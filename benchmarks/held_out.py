"""How far predictions are off: 24 settings that no profile has seen, drawn by a committed seed.

    sudo .venv/bin/python benchmarks/held_out.py --out held-out        # about an hour; it goes on

Profiles of `cnn`, `mlp` and `cnn-wide` are made first, with one and two workers on this machine.
Each link is measured alone. Then the predictions are written to the ledger, and only then every
setting is run three times, interleaved, over the testbed's links, with workers that sleep for times
drawn from the profile instead of computing (docs/planning.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.planning.check.cases import Case, drawn
from paceline.planning.check.ledger import Ledger, digest
from paceline.planning.check.whole import check
from paceline.planning.measure.whole import Wishes, measure
from paceline.planning.profile import Profile
from paceline.planning.stored import read_profile, write_profile
from paceline.terminal.plan_check import show_outcome

SEED, SETTINGS, REPEATS = 22, 24, 3  # the seed was committed before anything was measured
STRATEGIES = (
    "allreduce:collective=ring",
    "allreduce:collective=tree",
    "allreduce:collective=hierarchical",
    "ring-reduce",
    "stepwise",
    "ps",
    "ps:consistency=async",
    "local-sgd",
    "diloco",
    "gossip",
)
CODECS, WORKERS = ("none", "fp16", "sign", "topk"), (3, 4, 8, 16)
BATCH = 16  # samples of each worker
# network, model, batch size, the most workers
PLACES = (
    ("10mbit", "cnn", BATCH, 16),
    ("100mbit", "mlp", BATCH, 16),
    ("1gbit", "cnn-wide", BATCH, 4),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("held-out"))
    parser.add_argument("--data", default="fashion-mini")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each profile")
    parser.add_argument("--settings", type=int, default=SETTINGS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--list", action="store_true", help="print the drawn settings, run nothing")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    more: dict[str, Any] = {"data": asked.data}
    cases = drawn(STRATEGIES, CODECS, WORKERS, PLACES, asked.settings, SEED, more)
    if asked.list:
        print("\n".join(case.name for case in cases))
        return 0
    profiles, digests = _profiles(asked.out, cases, asked.data, asked.seconds)
    found = check(
        Ledger(asked.out), cases, profiles, digests, asked.repeats, SEED, more,
        lambda said: print(said, file=sys.stderr),
    )  # fmt: skip
    if asked.json:
        print(json.dumps(found.described(), indent=2))
    else:
        show_outcome(found)
    return 0


def _profiles(
    folder: Path, cases: list[Case], data: str, seconds: float
) -> tuple[dict[str, Profile], dict[str, str]]:
    """Profiles by model, made once: the ledger names them by their content."""
    folder.mkdir(parents=True, exist_ok=True)
    profiles, digests = {}, {}
    for model in dict.fromkeys(case.model for case in cases):
        path = folder / f"{model}.profile.json"
        if not path.exists():
            print(f"profiling {model}", file=sys.stderr)
            wishes = Wishes((BATCH, 4 * BATCH), seconds, 2, ["gloo"])
            made = measure({"model": model, "data": data}, wishes, lambda kind, content: None)
            write_profile(made, path)
        profiles[model], digests[model] = read_profile(path), digest(path)
    return profiles, digests


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PacelineError as error:
        sys.exit(f"held_out: {error}")
