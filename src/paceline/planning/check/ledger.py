"""A folder that keeps predictions, written before anything is measured, and then the measurements.

    ledger.json       when, by which version, for which request; the links; every prediction
    measured.jsonl    a line for each run, in the order in which they were made

A ledger is written once. A check that was interrupted goes on with the runs that are missing; one
with another request is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.errors import BadRequest
from paceline.planning.check.cases import Case, Foretold, Seen
from paceline.planning.check.links import LinkFound, Moving
from paceline.planning.profile import now
from paceline.transport.virtual import Link

SCHEMA = 2


class Ledger:
    """The predictions and the measurements of one check."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path, self._runs = folder / "ledger.json", folder / "measured.jsonl"

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def write(
        self,
        request: dict[str, Any],
        links: Sequence[LinkFound],
        told: Sequence[tuple[Case, Foretold]],
    ) -> None:
        """Write the predictions. They are never changed."""
        if self.exists:
            raise BadRequest(f"{self._path} has predictions already: choose another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "schema": SCHEMA,
            "written": now(),
            "paceline": version("paceline"),
            "request": request,
            "links": [asdict(link) for link in links],
            "predictions": [
                {"case": asdict(case), "predicted": asdict(each)} for case, each in told
            ],
        }
        write_whole(self._path, json.dumps(content, indent=2) + "\n")

    def read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
            known = isinstance(found, dict) and found.get("schema") == SCHEMA
        except (OSError, ValueError):
            known = False
        if not known:
            raise BadRequest(f"{self._path} cannot be read as the predictions of a check")
        return dict(found)

    def predictions(self) -> list[tuple[Case, Foretold]]:
        try:
            return [
                (Case(**each["case"]), Foretold(**each["predicted"]))
                for each in self.read()["predictions"]
            ]
        except (KeyError, TypeError):
            raise BadRequest(f"{self._path} is damaged: choose another --out") from None

    def links(self) -> list[LinkFound]:
        return [
            LinkFound(
                each["network"],
                Link(**each["link"]),
                tuple((size, seconds) for size, seconds in each["points"]),
                tuple(Moving(**crowd) for crowd in each["crowds"]),
            )
            for each in self.read()["links"]
        ]

    def same(self, request: dict[str, Any]) -> None:
        """Refuse to go on with a check that was begun with another request."""
        before = self.read()["request"]
        for name in sorted({*before, *request}):
            if before.get(name) != request.get(name):
                raise BadRequest(
                    f"{self._path} holds the predictions of another check ({name} was"
                    f" {before.get(name)}, now {request.get(name)}): choose another --out"
                )

    def add(self, repeat: int, case: Case, seen: Seen) -> None:
        line = {"repeat": repeat, "case": asdict(case), "measured": asdict(seen), "ended": now()}
        with self._runs.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def measured(self) -> dict[tuple[int, Case], Seen]:
        """The runs so far; a line that was cut off when the check was killed is not one."""
        if not self._runs.exists():
            return {}
        text = self._runs.read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return {(line["repeat"], Case(**line["case"])): _seen(line["measured"]) for line in lines}


def _seen(measured: dict[str, Any]) -> Seen:
    return Seen(measured["samples_per_s"], measured["cpu_share"])


def digest(path: str | Path) -> str:
    """Name a profile by its content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
