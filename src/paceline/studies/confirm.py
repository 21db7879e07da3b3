"""Confirm what screening found: serial and the best few settings, again and again, side by side.

Screening runs every setting a few times, so the setting that looks fastest is in part the luckiest.
A confirming block runs serial and the best settings one after the other, in random order, within
half a minute, so that all of them meet the same machine. The headline is made from these blocks
alone. Their number follows from the variance of the first blocks and the width that is wanted
(Stein's rule); it never depends on whether something has become significant.

A block is disturbed when foreign processes and the host took more than `DISTURBED` of the machine.
It is run again, at most twice; after that it is kept, and marked.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.common.estimates import blocks_needed
from paceline.errors import Interrupted, PacelineError
from paceline.launch.run import run
from paceline.record.blocks import Block
from paceline.record.foreign import ForeignCpu
from paceline.record.steady import speed_of
from paceline.request.config import Config
from paceline.request.prepare import prepare
from paceline.studies.candidates import Candidate, Record
from paceline.studies.grid import StudySpec
from paceline.studies.plan import scaled

PILOT = 5  # blocks whose variance fixes the number of all
DISTURBED = 0.05  # of all cores' time
MOST_REPEATS = 2
LEAST_STEPS = 20
LEAST_S = 0.5  # of steps, in one run
# Not asked for again: what a screening run measured beside speed, and where a run ends.
DROPPED = (
    "epochs", "steps", "target_accuracy", "until_accuracy", "until_converged", "evaluate_every",
    "checkpoint_every", "profile", "resume", "callbacks",
)  # fmt: skip

Say = Callable[[str], None]


class Confirmation:
    """Runs confirming blocks, and knows how many there should be."""

    def __init__(
        self,
        spec: StudySpec,
        chosen: Sequence[Candidate],
        folder: Path,
        blocks: Sequence[Block] = (),
        clean: bool = False,
    ) -> None:
        self.spec, self.folder, self.clean = spec, folder, clean
        self.serial, *self.others = chosen
        self.blocks = list(blocks)

    @property
    def wanted(self) -> int:
        """The number of blocks: the pilot's, and then as many as its variance asks for."""
        if len(self.blocks) < PILOT:
            return PILOT
        half = math.log1p(self.spec.width)
        return max(blocks_needed(self.log_ratios(other)[:PILOT], half) for other in self.others)

    def log_ratios(self, other: Candidate) -> list[float]:
        """Return log(speed / serial's speed) of every block."""
        return [b.log_ratio(other.name, self.serial.name) for b in self.blocks]

    @property
    def block_s(self) -> float:
        """The time of a block: the mean so far, else what was asked for."""
        return fmean(b.seconds for b in self.blocks) if self.blocks else self.spec.block_s

    def next(self, time_left_s: float, say: Say, listen: Any) -> Block:
        """Run one more block, and again if it was disturbed while there is time."""
        number, spent = len(self.blocks), 0.0
        for repeats in range(MOST_REPEATS + 1):
            block = self._block(number, repeats, listen)
            spent += block.seconds
            again = repeats < MOST_REPEATS and spent + block.seconds < time_left_s
            if not block.disturbed or not again:
                break
            say(
                f"block {number + 1} is run again: others took"
                f" {100 * ((block.foreign or 0) + (block.stolen or 0)):.0f}% of the machine"
            )
        self.blocks.append(block)
        return block

    def described(self, ended: str = "") -> dict[str, Any]:
        """Return what `study.json` keeps."""
        return {
            "serial": self.serial.name,
            "settings": [other.name for other in self.others],
            "width": self.spec.width,
            "pilot": PILOT,
            "threshold": DISTURBED,
            "wanted": self.wanted,
            "block_s": self.block_s,
            "ended": ended,
            "blocks": [asdict(block) for block in self.blocks],
        }

    def _block(self, number: int, repeats: int, listen: Any) -> Block:
        order = [self.serial, *self.others]
        random.Random(f"block {number} {repeats}").shuffle(order)
        watch, speeds, seconds = ForeignCpu(), {}, 0.0
        for candidate in order:
            record = self._run(candidate, number, listen)
            speeds[candidate.name] = speed_of(record)
            seconds += record["result"]["wall_s"]
        found = watch.shares()
        return Block(
            number,
            [candidate.name for candidate in order],
            speeds,
            seconds,
            None if found is None else found.used,
            None if found is None else found.stolen,
            repeats,
            found is not None and found.together > DISTURBED,
        )

    def _run(self, candidate: Candidate, number: int, listen: Any) -> Record:
        out = self.folder / f"block-{number + 1:03d}" / candidate.slug
        shutil.rmtree(out, ignore_errors=True)
        try:
            job = prepare(self._config(candidate, number, out), lambda _: out)
            record = run(job, listen, clean=self.clean)
        except Interrupted:
            raise
        except PacelineError as error:
            raise type(error)(f"{candidate.name}: {error}") from None
        for path in out.iterdir():  # the speeds are in run.json
            if path.name != "run.json":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return record

    def _config(self, candidate: Candidate, number: int, out: Path) -> Config:
        """Return the options of a run that takes its share of the block's time."""
        as_screened = scaled(candidate.options, self.spec)
        options = {k: v for k, v in as_screened.items() if k not in DROPPED}
        job = prepare(Config.make({**options, "steps": 1, "out": str(out)}), lambda _: out)
        each_s = max(LEAST_S, self.spec.block_s / (len(self.others) + 1) - candidate.outside_s)
        steps = round(each_s * candidate.samples_per_s / sum(job.batch_sizes))
        return Config.make(
            {
                **options,
                "steps": max(LEAST_STEPS, steps),
                "evaluate_samples": 1,
                "seed": number,
                "out": str(out),
            }
        )
