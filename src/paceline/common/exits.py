"""The end of a process that has imported PyTorch."""

from __future__ import annotations

import atexit
import functools
import gc


@functools.cache
def end_quickly() -> None:
    """At exit, keep the garbage collector from searching all of torch's objects several times.

    That takes most of a second of CPU per rank. With more ranks than cores on a busy machine, a
    command whose training was over took tens of seconds to end.
    """
    atexit.register(gc.freeze)
