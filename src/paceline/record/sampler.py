"""Sample a worker's CPU, memory, network and disk from a thread, and write them as events."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import psutil

from paceline.errors import RunFailed
from paceline.record import container
from paceline.record.contained import Contained
from paceline.record.network import Interface, Sockets
from paceline.record.resources import Task, Usage, pss_bytes
from paceline.record.writer import Recorder

MACHINE_EVERY_S = 2.0
PSS_SHARE = 0.003  # the largest share of time for `pss_bytes`, which is slow with much memory


class Sampler:
    """Samples from start to stop, at least at the beginning and at the end.

    `spent_s` is the CPU time that sampling took.
    """

    def __init__(
        self, recorder: Recorder, every_s: float, task: Task, whole_machine: bool = False
    ) -> None:
        self.recorder, self.every_s = recorder, every_s
        self.task, self.whole_machine = task, whole_machine
        self.sockets: Sockets | Interface = Sockets()
        self.contained = Contained()
        self.spent_s = 0.0
        self.pss_peak_bytes: int | None = None
        self._memory_peak_bytes: int | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._start = Usage.now(task)
        self._next_machine = self._start.wall_s
        self._next_pss = self._start.wall_s + 1.0
        self._machine_start: dict[str, Any] = {}
        if whole_machine:
            with contextlib.suppress(OSError, psutil.Error):
                self._machine_start = container.usage()

    def start(self) -> None:
        if self.every_s > 0:
            self._thread = threading.Thread(target=self._run, name="paceline-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def net_bytes(self) -> tuple[int, int] | None:
        with self._lock:
            return self.sockets.bytes()

    def summary(self) -> dict[str, Any]:
        """Return what was used since the beginning, under run.json's names."""
        self.stop()
        if self.every_s > 0:
            self.pss_peak_bytes = max(self.pss_peak_bytes or 0, pss_bytes() or 0) or None
        used = Usage.now(self.task).since(self._start)
        machine = {}
        if self._machine_start:
            end = container.usage()
            peak = max(
                (m for m in (self._memory_peak_bytes, end["memory_bytes"]) if m is not None),
                default=None,
            )
            machine = {
                "machine": container.difference(self._machine_start, end, used["measured_s"], peak)
            }
        if (described := self.contained.described()) is not None:
            machine["container"] = described
        spent = self.recorder.spent_s + self.spent_s
        return {**used, "pss_peak_bytes": self.pss_peak_bytes, "measuring_s": spent, **machine}

    def _run(self) -> None:
        while True:
            began = time.thread_time()
            last = self._over.is_set()
            # The worker's own events report a full disk.
            with contextlib.suppress(RunFailed, OSError, psutil.Error):
                self._sample()
            self.spent_s += time.thread_time() - began
            if last:
                return
            self._over.wait(self.every_s)

    def _sample(self) -> None:
        now, net = Usage.now(self.task), self.net_bytes()
        fields: dict[str, Any] = {}
        if now.wall_s >= self._next_pss:
            fields["pss_bytes"] = pss_bytes()
            self.pss_peak_bytes = max(self.pss_peak_bytes or 0, fields["pss_bytes"] or 0) or None
            self._next_pss = now.wall_s + (time.perf_counter() - now.wall_s) / PSS_SHARE
        if now.wall_s >= self._next_machine:
            self._next_machine = now.wall_s + MACHINE_EVERY_S
            self.contained.sample()
            if self.whole_machine:
                used = container.usage()
                self._memory_peak_bytes = (
                    max(self._memory_peak_bytes or 0, used["memory_bytes"] or 0) or None
                )
                fields["machine"] = {k: v for k, v in used.items() if k != "source"}
        self.recorder.write(
            "sample",
            elapsed_s=now.wall_s - self._start.wall_s,
            cpu_user_s=now.cpu_user_s,
            cpu_system_s=now.cpu_system_s,
            rss_bytes=now.rss_bytes,
            net_sent_bytes=net[0] if net else None,
            net_received_bytes=net[1] if net else None,
            disk_read_bytes=now.disk_read_bytes,
            disk_write_bytes=now.disk_write_bytes,
            **fields,
        )


class NetBytes:
    """Counts network bytes between `start` and `stop`: those of training, as `payload_*` does."""

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler
        self._since: tuple[int, int] | None = None
        self.sent: int | None = None
        self.received: int | None = None

    def start(self) -> None:
        self._since = self._sampler.net_bytes() if self._sampler else None
        if self._sampler is not None:
            self._sampler.contained.begin()

    def stop(self) -> None:
        """Stop counting; without a `start` before it this does nothing."""
        if self._sampler is not None:
            self._sampler.contained.pause()
        if self._sampler is None or self._since is None:
            return
        now, before = self._sampler.net_bytes(), self._since
        if now is not None:
            self.sent = (self.sent or 0) + now[0] - before[0]
            self.received = (self.received or 0) + now[1] - before[1]
        self._since = None
