"""A job in its folder: what a launcher adds before the workers start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.data.shards import Shards
from paceline.request.config import Config
from paceline.request.job import Job


@dataclass(frozen=True)
class Session:
    """One stay of a run in its folder: from its start, or from a checkpoint on."""

    job: Job
    out: Path  # the run's folder, claimed
    number: int = 0  # 0 for the first session of the run in this folder
    hosts: tuple[str, ...] = ()  # of the workers in their order; empty: all are on this host

    @property
    def config(self) -> Config:
        """The job's options, with the folder that the run really has."""
        return self.job.config.merged({"out": str(self.out)})

    def shards(self) -> Shards:
        return self.job.shards(self.hosts)
