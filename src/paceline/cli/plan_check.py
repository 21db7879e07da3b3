"""`paceline plan --check`: predict, measure, and say how far the predictions were off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.planning.cluster import Cluster
    from paceline.planning.profile import Profile

CHECKED_WORKERS = "3,4"  # a check's own default: more than the profile has seen
TABLE_STRATEGY = "allreduce:collective=ring"


def check_by_runs(
    path: str,
    known: Profile,
    strategies: Sequence[str],
    codecs: Sequence[str],
    workers: Sequence[int],
    network: str,
    batch_size: int,
    settings: int,
    repeats: int,
    seed: int,
    out: str,
    data_dir: str | None,
    as_json: bool,
) -> None:
    """Check a profile's predictions on this machine's testbed."""
    import torch

    from paceline.errors import BadRequest
    from paceline.planning.check.cases import drawn
    from paceline.planning.check.ledger import Ledger, digest
    from paceline.planning.check.whole import check
    from paceline.planning.cluster import PRESETS
    from paceline.terminal.plan_check import show_outcome
    from paceline.testbed.build import missing

    if known.source != "measured" or known.model.name in ("own", "unknown"):
        raise BadRequest(
            "--check runs the profile's model: profile a built-in one, by paceline profile --model"
        )
    if (reason := missing()) is not None:
        raise BadRequest(f"--check measures on a testbed: {reason}")
    torch.set_num_threads(1)  # no pool of threads here: workers are forked from this process
    more = {"data": known.data, **({"data_dir": data_dir} if data_dir else {})}
    model, place = known.model.name, PRESETS.get(network, network)
    cases = drawn(
        strategies,
        codecs,
        [number for number in workers if number > 1] or list(workers),
        [(place, model, batch_size, max(workers))],
        settings,
        seed,
        more,
    )
    found = check(
        Ledger(Path(out)),
        cases,
        {model: known},
        {model: digest(path)},
        repeats,
        seed,
        more,
        lambda said: click.echo(said, err=True),
    )
    if as_json:
        click.echo(json.dumps(found.described(), indent=2))
    else:
        show_outcome(found)


def check_by_table(
    known: Profile, strategies: Sequence[str], cluster: Cluster, seed: int, as_json: bool
) -> None:
    """Fit a table on its rows with one and two workers, and predict the others."""
    from paceline.planning.check.table import check_table
    from paceline.terminal.plan_check import show_table

    found = check_table(known, strategies[0] if strategies else TABLE_STRATEGY, cluster, seed)
    if as_json:
        click.echo(json.dumps(found.described(), indent=2))
    else:
        show_table(found)
