"""`python -m tests.faults.table DIR`: the results of trials as Markdown tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.faults.trial import SETTINGS
from tests.faults.trials import done

Result = dict[str, Any]
LEAKS = ("segments", "ports", "loopback", "files", "namespaces")
NAMES = {
    "kill": "SIGKILL", "stop": "SIGSTOP", "segv": "SIGSEGV", "term": "SIGTERM", "int": "SIGINT",
    "hup": "SIGHUP", "memory": "memory limit", "gil": "GIL held", "cut": "connection cut",
    "link": "link down",
}  # fmt: skip
HEAD = (
    "trials", "as documented", "hangs", "orphans", "leaks", "blames", "records", "resumed",
    "exactly",
)  # fmt: skip


def counts(results: list[Result]) -> list[str]:
    def wrong(*names: str) -> int:
        return sum(any(name in result["wrong"] for name in names) for result in results)

    resumed = [r for r in results if r.get("resume_s") is not None]
    exact = [r for r in resumed if r.get("exact")]
    numbers = [
        len(results),
        sum(not {"ends", "hang", "struck", "harness"} & r["wrong"].keys() for r in results),
        wrong("hang"),
        wrong("orphans"),
        wrong(*LEAKS),
        wrong("blame", "notice", "plain"),
        wrong("record", "checkpoints"),
    ]
    told = [str(number) for number in numbers]
    told.append(f"{len(resumed) - wrong('resumed')} of {len(resumed)}")
    told.append(f"{len(exact) - wrong('exact')} of {len(exact)}")
    return told


def table(what: str, rows: Iterable[tuple[str, list[Result]]]) -> str:
    lines = [f"| {what} | {' | '.join(HEAD)} |", f"|---|{'--:|' * len(HEAD)}"]
    lines += [f"| {name} | {' | '.join(counts(found))} |" for name, found in rows if found]
    return "\n".join(lines)


def matrix(results: list[Result]) -> str:
    """Strategies by faults: how many trials had nothing wrong; of how many, if not all."""
    heads = [name.split()[0].removeprefix("SIG") for name in NAMES.values()]
    lines = [f"| strategy | {' | '.join(heads)} |", f"|---|{'--:|' * len(NAMES)}"]
    for setting in SETTINGS:
        cells = []
        for fault in NAMES:
            found = [r for r in results if (r["setting"], r["fault"]) == (setting.name, fault)]
            right = sum(not r["wrong"] for r in found)
            cells.append(str(right) if right == len(found) else f"{right}/{len(found)}")
        name = re.sub(r"collective=|consistency=|:feedback=true|:ratio=0.1", "", setting.name)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by(key: str, names: Callable[[str], str], order: Iterable[str], results: list[Result]) -> Any:
    return [(names(one), [r for r in results if r[key] == one]) for one in order]


def report(results: list[Result]) -> str:
    known = [r for r in results if "setting" in r]
    targets = dict.fromkeys(r["target"] for r in known)
    points = dict.fromkeys(r["point"] for r in known)
    settings = [setting.name for setting in SETTINGS]
    parts = [
        table("fault", [*by("fault", NAMES.__getitem__, NAMES, known), ("all", known)]),
        table("strategy", by("setting", lambda name: f"`{name}`", settings, known)),
        table("target", by("target", str, sorted(targets), known)),
        table("point", by("point", str, sorted(points), known)),
        table("transport", by("transport", str, ("shm", "gloo", "mpi"), known)),
        matrix(known),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(report(list(done(Path(sys.argv[1])).values())))
