"""Docker or Podman, whichever is here and answers: find it, and run its commands."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import BadRequest, RunFailed

NAMES = ("docker", "podman")  # the first that answers
ANSWER_S = 12.0  # for `docker info`
COMMAND_S = 120.0
INSTALL = "apt-get install podman netavark aardvark-dns iptables"


@dataclass(frozen=True)
class Engine:
    """A container engine on this machine. Docker and Podman take the same commands."""

    name: str

    def run(self, *words: str, timeout_s: float = COMMAND_S) -> str:
        """Run a command of the engine and return what it prints; raise what it says if it fails."""
        code, out, err = self.tried(*words, timeout_s=timeout_s)
        if code != 0:
            raise RunFailed(
                f"{self.name} {words[0]} failed: {last_line(err) or f'exit code {code}'}"
            )
        return out

    def tried(self, *words: str, timeout_s: float = COMMAND_S) -> tuple[int, str, str]:
        """Run a command of the engine; return its exit code and what it has printed."""
        try:
            done = subprocess.run(
                [self.name, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124, "", f"it did not answer within {timeout_s:.0f} s"
        except OSError as error:
            return 127, "", error.strerror or str(error)
        return done.returncode, done.stdout, done.stderr


def find_engine(names: Sequence[str] = NAMES) -> Engine:
    """Return the first engine that answers. Say what is missing, and what to type, if none does."""
    here = [name for name in names if shutil.which(name)]
    if not here:
        raise BadRequest(
            f"containers need {' or '.join(name.title() for name in names)}, and"
            f" {'neither is' if len(names) > 1 else 'it is not'} on PATH: {INSTALL}; or leave out"
            " --containers for a cluster of plain processes"
        )
    silent = []
    for name in here:
        code, _, err = Engine(name).tried("info", timeout_s=ANSWER_S)
        if code == 0:
            return Engine(name)
        silent.append(f"{name} does not answer ({last_line(err) or f'exit code {code}'})")
    raise BadRequest(
        f"{'; '.join(silent)}: start it (systemctl start docker), or {INSTALL}; or leave out"
        " --containers for a cluster of plain processes"
    )


def last_line(text: str) -> str:
    """Return the last line that is not empty, without the engine's own `Error: `."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("Error: ").rstrip(".")[:300] if lines else ""
