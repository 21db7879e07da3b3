"""Ranks that a launcher has started again continue their run from its last checkpoint.

torchrun starts all ranks again when one has failed or a host has joined or left. Its agents, one
per host, live on, and so does their store with what earlier ranks wrote there. `launcher.json` in
a run's folder names the agents that the run belongs to: ranks that one of these agents has
started again continue that run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest
from paceline.record import checkpoint
from paceline.record.writer import write_json
from paceline.request.earlier import run_folder

MARK = "launcher.json"


@dataclass(frozen=True)
class Mark:
    """The agents of a launcher, and the processes that they have started last."""

    agents: frozenset[str]
    processes: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Mark:
        """Return the mark of the run in a folder; an empty one where there is none."""
        try:
            saved = json.loads((folder / MARK).read_text())
            return cls(frozenset(saved["agents"]), tuple(saved["processes"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(frozenset(), ())

    def write(self, folder: Path, launcher: str) -> None:
        """Mark the run in a folder as this launcher's.

        Agents that joined the same launcher earlier or later are all kept.
        """
        if not self.agents:
            return
        earlier = Mark.read(folder).agents
        agents = self.agents | earlier if self.agents & earlier else self.agents
        content = {"launcher": launcher, "agents": sorted(agents), "processes": self.processes}
        write_json(folder / MARK, content)

    def continues(self, folder: Path) -> bool:
        """Whether the run in a folder is of the same launcher, begun by earlier processes."""
        earlier = Mark.read(folder)
        same_processes = set(self.processes) & set(earlier.processes)
        return bool(self.agents & earlier.agents) and not same_processes


def last_checkpoint(
    own: Mark, launcher: str, restarts_counted: bool, options: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Return the checkpoint from which restarted ranks continue, and a notice for the user.

    Both are None for ranks that were not started again.
    """
    again = f"{launcher} has started the ranks again"
    out, resume = options.get("out"), options.get("resume")
    if not out and not resume:
        if not restarts_counted:
            return None, None
        return None, (
            f"{again}: the run begins again; with --out and --checkpoint-every it would go on from"
            " its last checkpoint"
        )
    folder = Path(out) if out else run_folder(str(resume))
    if not own.continues(folder):
        return None, None
    try:
        found, _ = checkpoint.latest(folder, whole=True)
    except BadRequest:
        return None, (
            f"{again}: there was no new checkpoint yet, so the run begins again; --checkpoint-every"
            " sets how often one is written"
        )
    return str(found), f"{again}: going on from {found}"
