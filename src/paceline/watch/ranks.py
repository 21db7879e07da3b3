"""One rank of a run as its events show it: what it did in its last steps, and what it uses."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from paceline.record.reader import Event, idle_seconds, several_hosts

RECENT_STEPS = 200
RECENT_SAMPLES = 8


class RankView:
    """The events of one rank that are needed to show it, and the sums of the others."""

    def __init__(self, rank: int) -> None:
        self.rank, self.role = rank, "worker"
        self.step, self.sent_bytes = 0, 0
        self.start: Event | None = None
        self.summary: Event | None = None
        self.recent: deque[Event] = deque(maxlen=RECENT_STEPS)
        self.samples: deque[Event] = deque(maxlen=RECENT_SAMPLES)

    def take(self, event: Event) -> None:
        """Note an event that counts (no resume has undone it)."""
        kind = event["kind"]
        if kind == "step":
            self.step = event["step"]
            self.sent_bytes += event["sent"]
            self.recent.append(event)
        elif kind == "sample":
            self.samples.append(event)
        elif kind == "start":
            self.start, self.summary = event, None
            self.role = event.get("role", "worker")
            self.step = event.get("from_step", 0)
            self.recent.clear()
            self.samples.clear()
        elif kind == "summary":
            self.summary = event

    @property
    def window(self) -> list[Event]:
        """The start and the last steps, as `record.reader` takes them."""
        return [*([self.start] if self.start else []), *self.recent]

    @property
    def step_s(self) -> float | None:
        """The mean seconds of a step."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        made = last["step"] - first["step"]
        return (last["train_s"] - first["train_s"]) / made if made > 0 else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of training."""
        if len(self.recent) < 2:
            return None
        first, *rest = self.recent
        seconds = rest[-1]["train_s"] - first["train_s"]
        return sum(e["n"] for e in rest) / seconds if seconds > 0 else None

    @property
    def own_speed(self) -> float | None:
        """Samples per second of computing: waiting for others does not count."""
        seconds = sum(e["compute_s"] for e in self.recent)
        return sum(e["n"] for e in self.recent) / seconds if seconds > 0 else None

    def cpu_percent(self) -> float | None:
        """Of one core, over the last samples; at the end over the whole session."""
        if self.summary is not None and self.summary.get("cpu_percent") is not None:
            return float(self.summary["cpu_percent"])
        if len(self.samples) < 2:
            return None
        first, last = self.samples[0], self.samples[-1]
        seconds = last["elapsed_s"] - first["elapsed_s"]
        used = sum(last[k] - first[k] for k in ("cpu_user_s", "cpu_system_s"))
        return 100.0 * used / seconds if seconds > 0 else None

    def memory_bytes(self) -> float | None:
        if self.summary is not None and self.summary.get("rss_peak_bytes") is not None:
            return float(self.summary["rss_peak_bytes"])
        return float(self.samples[-1]["rss_bytes"]) if self.samples else None

    def moved_bytes(self, on_the_network: bool) -> float | None:
        """Bytes sent. A server tells its own at the end; until then the kernel counts sockets'."""
        if self.role != "server":
            return self.sent_bytes
        if self.summary is not None:
            return self.summary.get("served_sent_bytes")
        return self.samples[-1].get("net_sent_bytes") if on_the_network and self.samples else None


def rows(
    ranks: list[RankView], times_known: bool, on_the_network: bool = False
) -> list[dict[str, Any]]:
    """Return the table of ranks: shares of the last steps, speed against the others, resources."""
    workers = [r for r in ranks if r.role != "server"]
    windows = [r.window for r in workers]
    apart = several_hosts(windows)
    idle = [0.0] * len(workers) if apart else idle_seconds(windows)
    speeds = {r.rank: s for r in workers if (s := r.own_speed) is not None}
    middle = median(speeds.values()) if len(speeds) > 1 else None
    waited = {r.rank: seconds for r, seconds in zip(workers, idle, strict=True)}
    return [
        {
            "rank": r.rank,
            "role": r.role,
            "host": (r.start or {}).get("host") if apart else None,
            "step": r.step if r.role != "server" else None,
            "shares": _shares(r, waited.get(r.rank, 0.0), times_known),
            "speed": speeds[r.rank] / middle if middle and r.rank in speeds else None,
            "samples_per_s": r.samples_per_s,
            "sent_bytes": r.moved_bytes(on_the_network),
            "cpu_percent": r.cpu_percent(),
            "memory_bytes": r.memory_bytes(),
        }
        for r in ranks
    ]


def _shares(rank: RankView, idle_s: float, times_known: bool) -> dict[str, float] | None:
    """Return the shares of a worker's last steps; None before the first step and for a server."""
    spent = {"compute": 0.0, "codec": 0.0, "exchange": 0.0}
    for e in rank.recent:
        spent["compute"] += e["compute_s"]
        spent["codec"] += e.get("encode_s", 0.0) + e.get("decode_s", 0.0)
        spent["exchange"] += e["sync_s"]
    idle_s = min(max(0.0, idle_s), spent["exchange"])
    spent |= {"exchange": spent["exchange"] - idle_s, "idle": idle_s}
    whole = sum(spent.values())
    if whole <= 0:
        return None
    if not times_known:
        return {"together": 1.0}
    return {name: max(0.0, seconds) / whole for name, seconds in spent.items()}
