"""A run as its folder shows it: read as it grows, and told as one small JSON picture."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from pathlib import Path
from typing import Any

from paceline.record.following import Tail
from paceline.record.notices import NAME as NOTICES
from paceline.record.reader import Event, over_network, read_run
from paceline.transport.status.line import FOLDER as STATUS
from paceline.transport.status.picture import take_picture, waits
from paceline.watch.curves import Means, Points
from paceline.watch.files import JsonFile, inside
from paceline.watch.ranks import RankView, rows

MOST_NOTICES = 30
READ_S = 0.3  # the longest time that one refresh reads and parses


class RunView:
    """Reads the files of one run; `root` is the folder that is watched, which it never leaves."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.config = JsonFile(folder / "config.json", root)
        self.record = JsonFile(folder / "run.json", root, lambda path: read_run(path.parent))
        self._begin()

    def _begin(self) -> None:
        self.tails: dict[str, Tail] = {}
        self.ranks: dict[int, RankView] = {}
        self.loss, self.test_loss, self.metric = Means(), Points(), Points()
        self.metric_name: str | None = None
        self.higher_is_better = True
        self.notices: deque[dict[str, Any]] = deque(maxlen=MOST_NOTICES)
        self.epsilon: float | None = None
        self.epoch = 0
        self._validates = False
        self.starts: dict[int, int] = {}  # by session: the step that it started from
        self.started_at = self.last_at = 0.0

    # --- reading

    def refresh(self, read_s: float = READ_S) -> bool:
        """Read what is new, for at most `read_s` seconds. Returns whether all was read."""
        self.config.refresh()
        self.record.refresh()
        if any(tail.replaced() for tail in self.tails.values()):
            self._begin()  # the folder was cleared, and another run has begun in it
        for path in _event_files(self.folder / "events"):
            if path.name not in self.tails and inside(self.root, path):
                self.tails[path.name] = Tail(path)
                self.tails[path.name].replaced()
        until = time.monotonic() + read_s
        while waiting := [tail for tail in self.tails.values() if tail.left_bytes]:
            # The one of which least was read, so that the ranks' last steps are of the same time.
            for event in min(waiting, key=lambda tail: tail.read_bytes).more():
                self._take(event)
            if time.monotonic() > until:
                break
        return not any(tail.left_bytes for tail in self.tails.values())

    def _take(self, event: Event) -> None:
        kind, session = event["kind"], event["session"]
        self.last_at = max(self.last_at, event["t"])
        if kind == "notice":
            self.notices.append({"t": int(event["t"]), "text": event["text"]})
        elif kind == "privacy":
            self.epsilon = event["epsilon"]
        elif kind == "start":
            self._start(event)
        elif self._counts(event):
            if kind == "step":
                self._step(event)
            elif kind == "evaluation" and event["rank"] == 0 and self._decides(event):
                self._evaluation(event)
            if session == max(self.starts, default=session) or kind == "step":
                self._rank(event).take(event)

    def _rank(self, event: Event) -> RankView:
        return self.ranks.setdefault(event["rank"], RankView(event["rank"]))

    def _start(self, event: Event) -> None:
        """Begin a session: a resume undoes what earlier sessions did after its first step."""
        session, step = event["session"], event.get("from_step")
        if step is not None and session not in self.starts:
            self.starts[session] = step
            for curve in (self.loss, self.test_loss, self.metric):
                curve.cut(step)
        if session >= max(self.starts, default=0):
            self.started_at = max(self.started_at, event["t"])
            self._rank(event).take(event)

    def _counts(self, event: Event) -> bool:
        if event["kind"] not in ("step", "evaluation"):
            return True
        return all(
            event["step"] <= step for later, step in self.starts.items() if later > event["session"]
        )

    def _decides(self, event: Event) -> bool:
        """Whether an evaluation is on the set that the curves show: validation, if there is one."""
        self._validates = self._validates or event.get("on") == "validation"
        return not self._validates or event.get("on") == "validation"

    def _step(self, event: Event) -> None:
        self.epoch = event["epoch"] + 1
        if event["loss"] is not None and event["n"] > 0:
            self.loss.add(event["step"], event["train_s"], event["loss"], event["n"])

    def _evaluation(self, event: Event) -> None:
        place = event["step"], event["train_s"]
        metric = event.get("metric")
        if event.get("loss") is not None:
            self.test_loss.add(*place, event["loss"])
        if metric and metric.get("value") is not None:
            self.metric_name = metric["name"]
            self.higher_is_better = bool(metric.get("higher_is_better", True))
            self.metric.add(*place, metric["value"])
        elif event.get("accuracy") is not None:
            self.metric_name = "accuracy"
            self.metric.add(*place, event["accuracy"])

    # --- telling

    @property
    def ended(self) -> bool:
        """Whether the record is there, and no session has begun since it was written."""
        return self.record.content is not None and self.record.changed_at >= self.started_at

    @property
    def begun(self) -> bool:
        return bool(self.tails or self.config.content or self.record.content)

    def picture(self, now: float | None = None) -> dict[str, Any]:
        """Return everything that the page shows of the run."""
        now = time.time() if now is None else now
        config = self._config()
        ranks = [self.ranks[rank] for rank in sorted(self.ranks)]
        lead = self.ranks.get(0)
        step = lead.step if lead else 0
        total = self._total(config)
        rates = [r.samples_per_s for r in ranks if r.role != "server"]
        record = (self.record.content or {}) if self.ended else {}
        left = None if total is None or self.ended else max(0, total - step)
        step_s = lead.step_s if lead else None
        unread = sum(tail.left_bytes for tail in self.tails.values())
        read = sum(tail.read_bytes for tail in self.tails.values())
        told: dict[str, Any] = rounded(
            {
                "name": self.folder.name,
                "title": _title(config),
                "settings": _settings(config),
                "phase": self._phase(lead),
                "status": record.get("status"),
                "error": record.get("error"),
                "result": _result(record),
                "step": step,
                "total": total,
                "epoch": self.epoch,
                "epochs": config.get("epochs"),
                "until": _until(config),
                "left_steps": left,
                "left_s": None if left is None or step_s is None else left * step_s,
                "train_s": lead.recent[-1]["train_s"] if lead and lead.recent else 0.0,
                "samples_per_s": sum(r for r in rates if r is not None) or None,
                "silent_s": 0.0 if self.ended or not self.last_at else max(0, now - self.last_at),
                "private": config.get("privacy") is not None,
                "epsilon": (record.get("privacy") or {}).get("epsilon", self.epsilon),
                "metric": {
                    "name": self.metric_name,
                    "higher_is_better": self.higher_is_better,
                    "on": "validation" if self._validates else "test",
                },
                "curves": {
                    "loss": self.loss.points(),
                    "test_loss": self.test_loss.points(),
                    "metric": self.metric.points(),
                },
                "ranks": rows(
                    ranks,
                    _times_known(config, ranks),
                    over_network(next((r.start for r in ranks if r.start), {}), config),
                ),
                "waits": None if self.ended else self._waits(),
                "notices": list(self.notices),
                "faults": self._faults(),
                "reading": read / (read + unread) if unread else None,
            }
        )
        return told

    def _waits(self) -> str | None:
        """Which ranks wait for which, if they have waited for long."""
        folder = self.folder / STATUS
        return waits(take_picture(folder, stacks=False)) if inside(self.root, folder) else None

    def _config(self) -> dict[str, Any]:
        return {**(self.config.content or {}), **((self.record.content or {}).get("config") or {})}

    def _phase(self, lead: RankView | None) -> str:
        if self.ended:
            return "ended"
        if lead is not None and lead.step and lead.summary is None:
            return "training"
        if lead is not None and lead.summary is not None:
            return "finishing"
        return "starting" if self.begun else "waiting"

    def _total(self, config: dict[str, Any]) -> int | None:
        told = (self.ranks[0].start or {}).get("total_steps") if 0 in self.ranks else None
        steps = config.get("steps")
        return told if told is not None else steps if isinstance(steps, int) else None

    def _faults(self) -> list[str]:
        """Say what could not be read."""
        lines = [
            f"events/{name}: {tail.damaged} damaged line{'s' * (tail.damaged > 1)} left out"
            for name, tail in sorted(self.tails.items())
            if tail.damaged
        ]
        files = [self.config, self.record]
        return lines + [f"{f.path.name} cannot be read" for f in files if f.fault is not None]


def _event_files(folder: Path) -> list[Path]:
    """The files of events in a folder, in the order of ranks; none where there is no folder."""
    try:
        found = [p for p in folder.iterdir() if p.is_file()]
    except OSError:
        return []
    workers = {
        int(m[1]): p for p in found if (m := re.fullmatch(r"worker-(\d{1,9})\.jsonl", p.name))
    }
    return [*(workers[rank] for rank in sorted(workers)), *(p for p in found if p.name == NOTICES)]


def _title(config: dict[str, Any]) -> str:
    if not config:
        return "A run"
    return f"{config.get('model')} on {config.get('data')}"


def _settings(config: dict[str, Any]) -> list[str]:
    """What the run was asked for, in the order of the terminal's headline."""
    if not config:
        return []
    workers, servers = config.get("workers") or 1, config.get("servers") or 0
    codec, network = config.get("codec"), config.get("network")
    return [
        str(config.get("strategy")),
        f"{workers} worker{'s' * (workers != 1)}",
        *([f"{servers} server{'s' * (servers != 1)}"] if servers else []),
        *([f"codec {codec}"] if codec not in (None, "none") else []),
        *([f"transport {config['transport']}"] if config.get("transport") else []),
        *([f"network {network}"] if network else []),
        f"seed {config.get('seed')}",
    ]


def _until(config: dict[str, Any]) -> str | None:
    """What ends the run besides its number of steps."""
    if config.get("until_accuracy") is not None:
        return f"ends at accuracy {config['until_accuracy']}"
    if config.get("until_converged") is not None:
        return "ends when the weights have converged"
    return None


def _times_known(config: dict[str, Any], ranks: list[RankView]) -> bool:
    """Whether computing and exchanging can be told apart: DDP does both at once."""
    told = [r.summary["times_known"] for r in ranks if r.summary and "times_known" in r.summary]
    return all(told) if told else str(config.get("strategy")).partition(":")[0] != "ddp"


def _result(record: dict[str, Any]) -> dict[str, Any] | None:
    if not record:
        return None
    result = record["result"]
    names = ("test_accuracy", "test_loss", "train_s", "wall_s", "samples_per_s", "metric", "steps")
    return {name: result.get(name) for name in names}


def rounded(value: Any) -> Any:
    """Keep five digits of every number: a screen shows fewer, and the picture is small."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return value
