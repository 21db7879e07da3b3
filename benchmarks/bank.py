"""Check what a study claims against a known truth: bank real blocks, then resample studies.

    .venv/bin/python benchmarks/bank.py --out bank --minutes 100      # started again, it goes on
    .venv/bin/python benchmarks/bank.py --out bank --resample 1000 --seed 0

A banked block is a confirming block of a study (`studies/confirm.py`) of serial, serial again,
serial slowed by 10% and serial slowed by 20%, in random order, half a minute in all. "Slowed by
10%" means that a step takes 1.1 times as long: the worker sleeps a tenth of the time that each
whole step took. The bank keeps the share that it really slept.

A resampled study draws whole blocks with replacement. The first five fix the number of blocks by
Stein's rule, as in a study, and the claim is made by the report's own code (`report/judge.py`). A
coin per drawn block swaps the labels of the equal pair: its two runs are exchangeable within a
block. So the mean of the pair's log ratio is zero by construction, also for a bank of few blocks,
whose own mean is off zero by chance.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from paceline.common.files import write_whole
from paceline.errors import BadRequest, PacelineError
from paceline.faults.base import Fault
from paceline.launch.run import run
from paceline.record.blocks import Block
from paceline.record.lock import alone_in
from paceline.record.machine import environment
from paceline.registry import Spec, faults
from paceline.report.judge import Verdict, corrected, of_blocks
from paceline.request.config import Config
from paceline.request.prepare import prepare
from paceline.studies.candidates import Candidate
from paceline.studies.confirm import DROPPED, PILOT, Confirmation
from paceline.studies.grid import BUILTIN, StudySpec
from paceline.transport.base import Transport

SERIAL, AGAIN = "serial", "serial again"
SLOWED = {0.1: "serial slowed by 10%", 0.2: "serial slowed by 20%"}
NAMES = (SERIAL, AGAIN, *SLOWED.values())
FAULT = "slow-step"
TRIAL_STEPS = 100
WRITE_EVERY_S = 0.2
MOST_FALSE, LEAST_FOUND = 0.07, 0.9


@dataclass
class SlowStep(Fault):
    """Every whole step takes 1 + share times as long: computing, update, data and recording."""

    share: Annotated[float, "the added time, of a step's own"] = 0.1
    log: Annotated[str, "a file for the seconds worked and slept"] = ""

    def __post_init__(self) -> None:
        self.worked_s = self.slept_s = self._began = self._written = 0.0

    def before_step(self, step: int, transport: Transport) -> None:
        now = time.perf_counter()
        if self._began:
            self.worked_s += now - self._began
            # a sleep is always a little too long: the next one makes up for it
            time.sleep(max(0.0, self.share * self.worked_s - self.slept_s))
            self.slept_s += time.perf_counter() - now
        self._began = time.perf_counter()
        if self.log and self._began - self._written > WRITE_EVERY_S:
            write_whole(Path(self.log), json.dumps([self.worked_s, self.slept_s]))
            self._written = self._began


# --- the bank


class Bank:
    """A folder with `bank.json` (what is run, on which machine) and a JSON line per block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "blocks.jsonl"

    @property
    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "bank.json").read_text())
        return found

    def lines(self) -> list[dict[str, Any]]:
        """Return the banked blocks; a line that was cut off when the script was killed is not."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def blocks(self) -> list[Block]:
        return [Block(**line["block"]) for line in self.lines()]

    def add(self, block: Block, slept: dict[str, float], wall_s: float) -> None:
        line = {"block": asdict(block), "slept": slept, "wall_s": wall_s, "ended": time.time()}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def make_bank(
    folder: Path,
    spec: StudySpec,
    minutes: float,
    say: Callable[[str], None],
    most: int | None = None,
) -> Bank:
    """Run blocks until the bank holds `minutes` of them, or `most` blocks."""
    if FAULT not in faults:
        faults.register(FAULT)(SlowStep)
    folder.mkdir(parents=True, exist_ok=True)
    bank = Bank(folder)
    with alone_in(folder, "another process is filling this bank"):
        if not (folder / "bank.json").exists():
            say("a trial run, for the number of steps")
            about = {"options": _described(spec), "environment": environment(), **_trial(spec)}
            write_whole(folder / "bank.json", json.dumps(about, indent=2) + "\n")
        elif bank.about["options"] != _described(spec):
            raise BadRequest(
                f"{folder} was filled with other options ({bank.about['options']}): choose another"
                " --out"
            )
        lines = bank.lines()
        whole = "".join(json.dumps(line) + "\n" for line in lines)
        write_whole(bank.path, whole)  # without a line that was cut off
        spent_s = sum(line["wall_s"] for line in lines)
        blocks = Confirmation(spec, _chosen(bank, spec), folder / "runs", bank.blocks(), clean=True)
        while spent_s < 60 * minutes and (most is None or len(blocks.blocks) < most):
            began = time.perf_counter()
            block = blocks.next(math.inf, say, lambda kind, content: None)
            slept = {
                name: slept_s / worked_s
                for share, name in SLOWED.items()
                for worked_s, slept_s in [json.loads(_log(bank, share).read_text())]
            }
            bank.add(block, slept, time.perf_counter() - began)
            spent_s += time.perf_counter() - began
            ratios = "  ".join(f"{math.exp(block.log_ratio(n, SERIAL)):.3f}" for n in NAMES[1:])
            say(f"block {len(blocks.blocks)}, {spent_s / 60:.1f} min: {ratios} of serial's speed")
    return bank


def bank_spec(data: str, data_dir: str | None, block: str) -> StudySpec:
    """The built-in study's model, batch and data, with serial alone."""
    spec = StudySpec.read(BUILTIN).changed(
        ["strategy=serial"], data=data, workers=1, data_dir=data_dir
    )
    return replace(spec, block=block, all_cores=False)


def _options(spec: StudySpec) -> dict[str, Any]:
    # a study gives serial no transport; here one may be asked for
    transport = {k: v for k, v in spec.base.items() if k == "transport"}
    options = {**spec.settings()[0].options, **transport}
    return {k: v for k, v in options.items() if k not in DROPPED}


def _described(spec: StudySpec) -> dict[str, str]:
    return {"block": spec.block, **{k: str(v) for k, v in _options(spec).items()}}


def _trial(spec: StudySpec) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paceline-bank-") as temporary:
        out = Path(temporary) / "trial"
        options = {**_options(spec), "steps": TRIAL_STEPS, "evaluate_samples": 1, "out": str(out)}
        record = run(prepare(Config.make(options), lambda _: out), lambda *_: None, clean=True)
    result = record["result"]
    return {
        "samples_per_s": result["steady_samples_per_s"] or result["samples_per_s"],
        "outside_s": result["wall_s"] - result["train_s"],
        "memory_format": record["config"]["memory_format"],
    }


def _log(bank: Bank, share: float) -> Path:
    return bank.folder.resolve() / f"slept-{share:g}.json"


def _chosen(bank: Bank, spec: StudySpec) -> list[Candidate]:
    """The four settings, each with the steps that fill its quarter of a block."""
    about = bank.about
    options = {**_options(spec), "memory_format": about["memory_format"]}
    found = []
    for name, share in zip(NAMES, (0.0, 0.0, *SLOWED), strict=True):
        slow = Spec(FAULT, {"share": share, "log": str(_log(bank, share))})
        found.append(
            Candidate(
                name,
                name.replace(" ", "-").replace("%", ""),
                {**options, "faults": [str(slow)]} if share else options,
                about["samples_per_s"] / (1 + share),
                about["outside_s"],
            )
        )
    return found


# --- studies from the bank


@dataclass(frozen=True)
class Rates:
    """What so many resampled studies claimed, of `others` against serial."""

    others: tuple[str, ...]
    width: float
    studies: int
    false: int  # studies that told the equal pair apart
    found: int  # studies that said that the slowed setting was slower
    blocks: list[int]  # of each study

    @property
    def holds(self) -> bool:
        slow = len(self.others) > 1
        return self.false <= MOST_FALSE * self.studies and (
            not slow or self.found >= LEAST_FOUND * self.studies
        )


def resample(
    bank: Sequence[Block], others: Sequence[str], width: float, studies: int, seed: int
) -> Rates:
    """Draw studies of serial and `others` from banked blocks, and count their claims."""
    luck = random.Random(f"{seed} {width} {others}")
    false = found = 0
    sizes = []
    for _ in range(studies):
        claims, n = _study(bank, others, width, luck)
        sizes.append(n)
        false += claims[AGAIN].differs
        found += any(claims[name].higher for name in others if name != AGAIN)
    return Rates(tuple(others), width, studies, false, found, sizes)


def _study(
    bank: Sequence[Block], others: Sequence[str], width: float, luck: random.Random
) -> tuple[dict[str, Verdict], int]:
    """One study: a pilot, as many blocks as its variance asks for, and the report's verdicts."""
    chosen = [Candidate(name, "", {}, 0.0, 0.0) for name in (SERIAL, *others)]
    blocks = [_drawn(bank, luck) for _ in range(PILOT)]
    study = Confirmation(StudySpec(width=width), chosen, Path(), blocks)
    n = study.wanted
    blocks += [_drawn(bank, luck) for _ in range(n - PILOT)]
    verdicts = [of_blocks(blocks, name, SERIAL) for name in others]
    whole = corrected([v for v in verdicts if v is not None])
    return dict(zip(others, whole, strict=True)), n


def _drawn(bank: Sequence[Block], luck: random.Random) -> Block:
    """Draw a block; a coin decides which of its two equal runs is called serial."""
    block = luck.choice(bank)
    return _swapped(block) if luck.random() < 0.5 else block


def _swapped(block: Block) -> Block:
    """Return the block with the labels of the equal pair exchanged."""
    speeds = block.samples_per_s
    return replace(block, samples_per_s={**speeds, SERIAL: speeds[AGAIN], AGAIN: speeds[SERIAL]})


def all_rates(bank: Sequence[Block], studies: int, seed: int) -> list[Rates]:
    """The equal pair alone, and beside a slowed setting as a study confirms two settings."""
    return [
        resample(bank, [AGAIN], 0.1, studies, seed),
        resample(bank, [AGAIN, SLOWED[0.2]], 0.1, studies, seed),
        resample(bank, [AGAIN], 0.05, studies, seed),
        resample(bank, [AGAIN, SLOWED[0.1]], 0.05, studies, seed),
    ]


def table(bank: Bank, rates: Sequence[Rates]) -> list[str]:
    """Markdown: the claims, the spread of the blocks, the machine."""
    lines, blocks = bank.lines(), bank.blocks()
    studies = rates[0].studies
    text = [
        "| serial against | wanted width | blocks, median (95th percentile) |"
        f" false claims of {studies:,} | slowdown found | bar |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for each in rates:
        sizes = sorted(each.blocks)
        late = sizes[min(len(sizes) - 1, round(0.95 * len(sizes)))]
        found = f"{100 * each.found / studies:.1f}%" if len(each.others) > 1 else "-"
        text.append(
            f"| {' and '.join(each.others)} | +-{100 * each.width:.0f}% |"
            f" {statistics.median(sizes):.0f} ({late}) | {each.false} | {found} |"
            f" {'met' if each.holds else 'MISSED'} |"
        )
    text += [
        "",
        "| in the bank | speed / serial | deviation of its log | slept |",
        "|---|--:|--:|--:|",
    ]
    for name in NAMES[1:]:
        logs = [block.log_ratio(name, SERIAL) for block in blocks]
        slept = [line["slept"][name] for line in lines if name in line["slept"]]
        really = f"{100 * statistics.fmean(slept):.2f}%" if slept else "-"
        text.append(
            f"| {name} | {math.exp(statistics.fmean(logs)):.3f} | {statistics.stdev(logs):.3f} |"
            f" {really} |"
        )
    env = bank.about["environment"]
    hours = sum(line["wall_s"] for line in lines) / 60
    text += [
        "",
        f"{len(blocks)} blocks in {hours:.0f} minutes, {sum(b.disturbed for b in blocks)} of them"
        f" disturbed; {bank.about['options']['model']} on {bank.about['options']['data']};"
        f" {env['cpu']}, {env['cores']} cores, {env['system']}, Python {env['python']}, torch"
        f" {env['torch']}, Paceline {env['paceline']}.",
    ]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bank"))
    parser.add_argument("--minutes", type=float, default=100.0, help="of blocks, in all sessions")
    parser.add_argument("--blocks", type=int, help="at most so many blocks")
    parser.add_argument("--block", default="30s", help="the time of one block")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir")
    parser.add_argument("--resample", type=int, metavar="N", help="resample N studies; run nothing")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # workers are forked from this process
    try:
        if asked.resample is None:
            spec = bank_spec(asked.data, asked.data_dir, asked.block)
            make_bank(asked.out, spec, asked.minutes, lambda t: print(t, flush=True), asked.blocks)
            return 0
        bank = Bank(asked.out)
        if not (asked.out / "bank.json").exists() or len(bank.blocks()) < PILOT:
            raise BadRequest(f"{asked.out} holds fewer than {PILOT} blocks: fill it first")
    except KeyboardInterrupt:
        print(f"interrupted; {asked.out} holds the blocks so far", file=sys.stderr)
        return 130
    except PacelineError as error:
        print(f"bank.py: {error}", file=sys.stderr)
        return error.exit_code
    rates = all_rates(bank.blocks(), asked.resample, asked.seed)
    print("\n".join(table(bank, rates)))
    return 0 if all(each.holds for each in rates) else 1


if __name__ == "__main__":
    sys.exit(main())
