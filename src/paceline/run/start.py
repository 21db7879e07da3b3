"""The end of the set up: all ranks that connected are still there, and the run begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import PeerLost


class NotBegun(Exception):
    """A rank was lost before the run began; the others may begin again without it."""

    def __init__(self, lost: PeerLost) -> None:
        super().__init__(str(lost))
        self.lost = lost


@contextmanager
def before_the_run(survives: bool) -> Iterator[None]:
    """Where a loss can be survived, raise `NotBegun` for one in this block."""
    try:
        yield
    except PeerLost as lost:
        if not survives:
            raise
        raise NotBegun(lost) from None
