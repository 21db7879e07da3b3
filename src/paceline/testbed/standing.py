"""The testbed that `paceline testbed up` builds: it stands until `paceline testbed down`."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.common.links import Links
from paceline.errors import BadRequest
from paceline.testbed.build import FOLDER, missing, up
from paceline.testbed.hosts import NAMESPACES, Testbed

STANDING = Path("/run/paceline-testbed.json")  # the record of it: which namespaces it made


def raise_standing(hosts: int, links: Links) -> Testbed:
    """Build the standing testbed and record it; refuse if there is one."""
    recorded = _recorded()
    if recorded is not None and _stands(recorded):
        raise BadRequest(
            f"a testbed is up already ({recorded.hosts} hosts, {recorded.links}): take it down with"
            " paceline testbed down"
        )
    if (reason := missing()) is not None:
        raise BadRequest(reason)
    if recorded is not None:
        _forget(recorded)  # what a restart of the machine has left
    bed = up(hosts, links, f"paceline-{secrets.token_hex(8)}")
    try:
        with STANDING.open("x") as record:
            json.dump({**asdict(bed), "links": str(bed.links)}, record)
    except FileExistsError:
        _forget(bed)
        raise BadRequest(
            "another process has built a testbed in the meantime: see paceline testbed status"
        ) from None
    except BaseException:
        _forget(bed)
        raise
    return bed


def standing() -> Testbed | None:
    """Return the standing testbed; None if there is none, or not all of it.

    A restart of the machine removes its namespaces.
    """
    bed = _recorded()
    return bed if bed is not None and _stands(bed) else None


def take_down() -> bool:
    """Take the standing testbed down, or what is left of it; return whether there was any."""
    if (reason := missing()) is not None:
        raise BadRequest(reason)
    bed = _recorded()
    if bed is None:
        return False
    found = any((NAMESPACES / space).exists() for space in bed.namespaces)
    _forget(bed)
    return found


def _recorded() -> Testbed | None:
    """Read the record of `paceline testbed up`.

    Only the record tells which namespaces that command made.
    """
    try:
        text, owner = STANDING.read_bytes(), STANDING.stat().st_uid
    except OSError:
        return None
    try:
        said: dict[str, Any] = json.loads(text)
        bed = Testbed(
            said["name"],
            int(said["hosts"]),
            Links.read(said["links"]),
            said["subnet"],
            said["folder"],
        )
        if owner not in (0, os.geteuid()) or not Path(bed.folder).name.startswith(FOLDER):
            raise ValueError
    except (ValueError, KeyError, TypeError, BadRequest):
        raise BadRequest(
            f"{STANDING} is not a record of `paceline testbed up`, so it is unknown which"
            " namespaces that made: find them with `ip netns list`, delete each with `ip netns del"
            f" NAME`, then delete {STANDING}"
        ) from None
    return bed


def _stands(bed: Testbed) -> bool:
    return all((NAMESPACES / space).exists() for space in bed.namespaces)


def _forget(bed: Testbed) -> None:
    """Take a testbed down, and delete its record if it has one."""
    bed.down()
    with contextlib.suppress(OSError, ValueError, KeyError):
        if json.loads(STANDING.read_text())["name"] == bed.name:
            STANDING.unlink()
