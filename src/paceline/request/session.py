"""A job in its folder: what a launcher adds before the workers start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

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
    taken: torch.device | None = None  # by this rank; None: the job's, as it was asked for
    leaves: bool = False  # a signal or --max-time may end it early, with a checkpoint

    @property
    def config(self) -> Config:
        """The job's options, with the folder that the run really has."""
        return self.job.config.merged({"out": str(self.out)})

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.taken or torch.device(self.job.config.device)

    def shards(self) -> Shards:
        return self.job.shards(self.hosts)
