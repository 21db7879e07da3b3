"""The command `paceline`. It listens to signals before it imports anything else."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from paceline.launch.signals import Ending, ending, ignore


def main() -> None:
    """Run the command line and exit."""
    with ending() as end:
        code = until_interrupted(_command, end)
        ignore()  # the process ends now, and its exit code is known
    sys.exit(code)


def _command() -> int:
    from paceline.cli.main import run

    return run()


def until_interrupted(command: Callable[[], int], end: Ending) -> int:
    """Run a command and return its exit code; after a signal print one sentence."""
    try:
        try:
            return command()
        finally:
            end.settling = True
    except KeyboardInterrupt as stop:
        if not getattr(stop, "told", False):
            with suppress(OSError, ValueError):  # the terminal may be closed
                print(f"paceline: {str(stop) or end.reason}", file=sys.stderr, flush=True)
        if end.heard is not None:
            return 128 + int(end.heard)
        return int(getattr(stop, "exit_code", 128 + signal.SIGINT))
