"""What the calls of the `paceline-mpi` backend return: work that a thread does later, and messages
that are under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.transport.mpi.torch_wire import NAME, fill

LOOKS, NAP_S = 2000, 0.00005


def timed_out(seconds: float, what: str) -> RuntimeError:
    return RuntimeError(f"{NAME}: Timed out after {seconds:g} s in {what}: did every rank call it?")


def until_complete(test: Callable[[], bool], seconds: float, what: str) -> None:
    """Test until true; sleep between two tests after the first `LOOKS`."""
    until = time.monotonic() + seconds
    looks = 0
    while not test():
        looks += 1
        if looks > LOOKS:
            time.sleep(NAP_S)
        if time.monotonic() > until:
            raise timed_out(seconds, what)


class QueuedWork(dist._Work):
    """A collective in the queue of the thread that calls MPI.

    `wait()` raises when `timeout_s` has passed, and calls `gave_up` first.
    """

    def __init__(
        self,
        call: Callable[[], None],
        result: Any,
        what: str,
        timeout_s: float,
        gave_up: Callable[[], None],
    ) -> None:
        super().__init__()
        self._call, self._result, self._what = call, result, what
        self._timeout_s, self._gave_up = timeout_s, gave_up
        self._future: Future[Any] = Future()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # `wait` raises it
            self._error = error
            self._done.set()
            self._future.set_exception(error)
            return
        self._done.set()
        self._future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else self._timeout_s
        if not self._done.wait(seconds):
            if not timeout:
                self._gave_up()
            raise timed_out(seconds, self._what)
        if self._error is not None:
            message = str(self._error)
            raise RuntimeError(
                message if message.startswith(NAME) else f"{NAME}: {message}"
            ) from self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._result


class MessageWork(dist._Work):
    """A send or receive that has started; `wait` tests it until it is complete.

    `wire` is the memory that MPI uses. Where it is a copy, a receive fills `tensor` from it.
    """

    def __init__(
        self, request: Any, status: Any, tensor: Tensor, wire: Tensor, what: str, timeout_s: float
    ) -> None:
        super().__init__()
        self._request, self._status, self._tensor, self._wire = request, status, tensor, wire
        self._what, self._timeout_s, self._done = what, timeout_s, False

    def is_completed(self) -> bool:
        if not self._done and self._request.Test(self._status):
            if self._what == "recv":
                with torch.no_grad():
                    fill(self._tensor, self._wire)
            self._done = True
        return self._done

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else self._timeout_s
        until_complete(self.is_completed, seconds, self._what)
        return True

    def source_rank(self) -> int:
        """The rank, in the group, whose message has come."""
        return int(self._status.Get_source())

    _source_rank = source_rank  # the name that `torch.distributed.recv` calls

    def get_future(self) -> Future[Any]:
        self.wait()
        future: Future[Any] = Future()
        future.set_result([self._tensor])
        return future

    def result(self) -> Any:
        return [self._tensor]
