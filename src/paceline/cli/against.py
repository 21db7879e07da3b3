"""`paceline study --against CHECKOUT`: a regression check of two versions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.studies.grid import StudySpec


def check_against(
    spec: StudySpec, against: str | None, fail_if: str | None, folder: Path, quiet: bool
) -> None:
    """Measure, print a table and sentences, and raise where `--fail-if` says so."""
    from rich.console import Console

    from paceline.errors import BadRequest, RunFailed
    from paceline.launch.signals import interrupted
    from paceline.studies.against import limit_of, measure_against
    from paceline.terminal.fitting import WRAP, Column, drop, fit_table

    if against is None:
        raise BadRequest("--fail-if needs --against CHECKOUT, the version to compare with")
    limit = None if fail_if is None else limit_of(fail_if)
    messages, console = Console(stderr=True), Console()

    def say(text: str) -> None:
        if not quiet:
            messages.print(text, highlight=False, soft_wrap=True, markup=False)

    try:
        found = measure_against(spec, against, folder, limit=limit, say=say)
    except KeyboardInterrupt:
        raise interrupted(f"; {folder / 'against.json'} holds the blocks so far") from None
    if not quiet:
        rows = found.settings
        blocks = Column("blocks", [each.counted for each in rows])
        columns = [
            Column("times as fast", [f"{each.ratios[0]:.3f}x" for each in rows]),
            Column("95% interval", ["{1:.3f} to {2:.3f}".format(*each.ratios) for each in rows]),
            blocks,
        ]
        names = [each.setting for each in rows]
        console.print(fit_table(console, "setting", names, columns, [WRAP, drop(blocks)]))
        for sentence in found.sentences:
            console.print(sentence, highlight=False, soft_wrap=True, markup=False)
        where = f"record: {folder / 'against.json'}"
        console.print(where, highlight=False, soft_wrap=True, markup=False)
    if found.failure is not None:
        raise RunFailed(found.failure)
