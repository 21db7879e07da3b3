"""A whole check: draw, measure the links alone, predict, write that down, run, compare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.errors import BadRequest
from paceline.planning.check.cases import (
    Beside,
    Case,
    Seen,
    beside,
    epoch_of,
    foretell,
    interleaved,
    measure,
)
from paceline.planning.check.compare import Compared, Outcome
from paceline.planning.check.ledger import Ledger
from paceline.planning.check.links import measure_link
from paceline.planning.profile import Profile

Say = Callable[[str], None]


def check(
    ledger: Ledger,
    cases: Sequence[Case],
    profiles: Mapping[str, Profile],
    digests: Mapping[str, str],
    repeats: int,
    seed: int,
    more: dict[str, Any],
    say: Say,
) -> Outcome:
    """Check predictions of cases from profiles by model.

    A folder with predictions goes on where it stopped.
    """
    request = {
        "profiles": dict(digests),
        "cases": [asdict(case) for case in cases],
        "repeats": repeats,
        "seed": seed,
    }
    if ledger.exists:
        ledger.same(request)
        say(f"going on in {ledger.folder}")
    else:
        links = {}
        for network in dict.fromkeys(case.network for case in cases):
            say(f"measuring a link of {network} alone")
            ranks = [c.workers + c.servers for c in cases if c.network == network]
            links[network] = measure_link(network, max(ranks))
        own: dict[tuple[str, int], Beside] = {}
        for case in cases:
            key = (case.model, case.batch_size)
            if key not in own:
                say(f"workers of {case.model}, for what a step takes beside computing")
                most = max(c.workers + c.servers for c in cases if c.model == case.model)
                own[key] = beside(profiles[case.model], *key, most, more)
        told = [
            (
                case,
                foretell(
                    case,
                    profiles[case.model],
                    links[case.network],
                    own[case.model, case.batch_size],
                    seed,
                    epoch_of(case, more),
                ),
            )
            for case in cases
        ]
        ledger.write(request, list(links.values()), told)
        say(f"the predictions are in {ledger.folder}; now they are measured")
    foretold = dict(ledger.predictions())
    done = ledger.measured()
    runs = interleaved(cases, repeats, seed)
    for number, (repeat, case) in enumerate(runs, 1):
        if (repeat, case) in done:
            continue
        say(f"run {number} of {len(runs)}: {case.name}")
        seen = measure(case, foretold[case], profiles[case.model], repeat, more)
        ledger.add(repeat, case, seen)
    return outcome(ledger)


def outcome(ledger: Ledger) -> Outcome:
    """Compare what a ledger holds, also before all runs are made."""
    by_case: dict[Case, list[Seen]] = defaultdict(list)
    for (_, case), seen in ledger.measured().items():
        by_case[case].append(seen)
    rows = [
        Compared(case, told, tuple(by_case[case]))
        for case, told in ledger.predictions()
        if case in by_case
    ]
    if not rows:
        raise BadRequest(f"{ledger.folder} has predictions, and no run has been measured yet")
    return Outcome(tuple(rows), tuple(ledger.links()))
