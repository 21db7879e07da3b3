"""Failures of ranks: each as an error of ours, and which one of several is the cause."""

from __future__ import annotations

import traceback

from paceline.common.shortage import out_of_memory
from paceline.errors import PacelineError, PeerLost, TransportError, WorkerFailed

GRACE_S = 1.5  # after the first failure: the others report theirs, which may be the cause


def as_failure(rank: int, error: BaseException) -> PacelineError:
    """Return our own errors as they are, and any other as a WorkerFailed with its traceback."""
    if isinstance(error, PacelineError):
        return error
    # PyTorch's DDP uses gloo directly, so its errors are not translated by our transport.
    if isinstance(error, RuntimeError) and "gloo/transport/" in str(error):
        return PeerLost(None, "its connection closed during DDP's exchange")
    if isinstance(error, EOFError):
        return WorkerFailed(rank, "it lost its launcher")
    if (told := out_of_memory(error)) is not None:
        return WorkerFailed(rank, told)
    return WorkerFailed(
        rank, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    )


def root_cause(failures: dict[int, PacelineError], workers: int) -> PacelineError:
    """Return the failure that caused the others.

    A worker that lost its peer only reports that the peer is gone. So other errors are preferred
    to errors of the transport, and those to PeerLost; among equals, the first that was reported.
    """

    def depth(item: tuple[int, PacelineError]) -> int:
        if isinstance(item[1], PeerLost):
            return 2
        return 1 if isinstance(item[1], TransportError) else 0

    rank, error = min(failures.items(), key=depth)
    if workers > 1 and not isinstance(error, WorkerFailed):
        error.args = (f"worker {rank}: {error}",)
    return error
