"""A rank under mpirun ends when the launcher has ended, even by SIGKILL.

This module imports nothing that takes time: a rank calls it before it imports torch.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time

LOOK_S = 0.5


def follow() -> None:
    """Begin to watch the launcher. When this rank ends with it, mpirun ends as well."""
    launcher, _, address = os.environ["PACELINE_MEETING"].split(" ", 2)
    folder = os.path.dirname(address)
    threading.Thread(target=_end_with, args=(launcher, folder), daemon=True).start()


def _end_with(launcher: str, folder: str) -> None:
    """Wait for the launcher's end; then remove its folder, which holds its socket only."""
    while sys.platform != "linux" or os.path.exists(f"/proc/{launcher}"):
        time.sleep(LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
