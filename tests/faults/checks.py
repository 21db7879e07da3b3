"""Run a trial, compare it with what is expected, resume it; each check has a name."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import paceline
from paceline.record import checkpoint
from paceline.record.reader import read_run
from paceline.testbed import build
from tests import commands
from tests.faults.expected import SIGNALS, UNSTARTED, expected
from tests.faults.running import Blow, Ran, conduct
from tests.faults.trial import (
    CHECKPOINT_EVERY,
    DEADLINE_S,
    EVALUATE_EVERY,
    LOST_S,
    STEPS,
    Trial,
    draw,
)

HERE = Path(__file__).parent
SLACK_S = float(
    os.environ.get("PACELINE_TEST_SLACK_S", "30")
)  # a run that takes so much longer than it should hangs
MORE_STEPS = 6  # of a completed run that is resumed
CHECKS = (
    "struck", "hang", "ends", "blame", "notice", "plain", "record", "checkpoints", "orphans",
    "segments", "ports", "loopback", "files", "namespaces", "resumed", "exact",
)  # fmt: skip


def trial_of(number: int) -> Trial:
    gives_up = "give_up_s" in inspect.signature(paceline.join).parameters
    return draw(number, build.missing() is None, gives_up)


def usual_s(trial: Trial) -> float:
    """The seconds that a run of this kind takes at most, on a machine that is busy."""
    if trial.transport == "mpi" or trial.own:
        return 60.0
    return 30.0 if trial.testbed else 20.0


class Conducted:
    """One trial: its folder, its commands, and which checks failed."""

    def __init__(self, trial: Trial, base: Path, compares: bool = True) -> None:
        self.trial, self.base, self.expected = trial, base, expected(trial)
        self.compares = compares
        self.wrong: dict[str, str] = {}
        # Short: sockets have paths of 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="pf-", dir="/tmp"))
        self.run = self.folder / "run"
        self.end = "hang"
        self.compared = False  # with an unbroken run

    def check(self, name: str, right: bool, told: object = "") -> None:
        assert name in CHECKS
        if not right and name not in self.wrong:
            self.wrong[name] = str(told)[:2000]

    # --- commands

    def command(self, steps: int = STEPS, resume: bool = False, plan: bool = True) -> list[Any]:
        trial, setting = self.trial, self.trial.setting
        if trial.own:
            return self._own_command(steps, resume, plan)
        if resume:
            words = ["train", "--resume", self.run, "--steps", steps]
            return [commands.PACELINE, *words, "--plugin", HERE / "plugin.py"]
        words = ["train", "--data", "synthetic:samples=200,shape=6", "--model", "mlp:hidden=8"]
        words += ["--strategy", setting.strategy, "--codec", setting.codec]
        words += ["--workers", trial.workers, "--transport", trial.transport]
        words += ["--steps", steps, "--epochs", 99, "--batch-size", 8, "--threads", 1]
        words += ["--checkpoint-every", CHECKPOINT_EVERY, "--evaluate-every", EVALUATE_EVERY]
        words += ["--keep", "all", "--deadline-s", DEADLINE_S, "--lost-s", LOST_S]
        words += ["--overlap", "on" if setting.overlap else "off", "--out", self.run]
        if setting.servers:
            words += ["--servers", setting.servers]
        if trial.give_up_s is not None:
            words += ["--give-up-s", trial.give_up_s]
        if trial.testbed:
            words += ["--network", "unlimited"]
        if plan:
            words += ["--plugin", HERE / "plugin.py", "--faults", f"strike:plan={self._plan()}"]
        return [commands.PACELINE, *words]

    def _own_command(self, steps: int, resume: bool, plan: bool) -> list[Any]:
        trial, setting = self.trial, self.trial.setting
        settings = {
            "strategy": setting.strategy,
            "codec": setting.codec,
            "transport": trial.transport,
            "servers": setting.servers or None,
            "deadline_s": DEADLINE_S,
            "give_up_s": trial.give_up_s,
            "out": str(self.run),
            "weights": str(self.run / "weights.pt"),
            "resume": resume,
            "steps": steps,
            "plan": str(self._plan()) if plan else "",
            "load_first": setting.servers > 0
            or setting.strategy in ("hogwild", "ddp", "gossip:mode=async"),
        }
        file = self.folder / "settings.json"
        file.write_text(json.dumps(settings))
        return [commands.PACELINE, "launch", "-n", trial.ranks, HERE / "own_loop.py", file]

    def _plan(self) -> Path:
        trial, file = self.trial, self.folder / "plan.json"
        plan = {
            "how": "launcher" if trial.strikes_launcher else trial.fault,
            "rank": trial.rank,
            "point": trial.point,
            "step": trial.step,
            "seconds": trial.pause_s,
            "messages": 2 * trial.step if trial.serves and trial.point == "in exchange" else 0,
            "late": trial.setting.kind == "ddp" and trial.point == "in exchange",
        }
        file.write_text(json.dumps(plan))
        return file

    def conduct(self, command: list[Any], name: str, blow: Blow | None = None) -> Ran:
        trial = self.trial
        env = {"PACELINE_TEST_GIL_S": str(trial.pause_s or 3), "HOME": str(self.base / "home")}
        quiet = Blow(self.folder / "none")
        limit_s = usual_s(trial) + SLACK_S + (self.expected.seconds if blow else 0)
        return conduct([str(w) for w in command], self.folder, name, limit_s, env, blow or quiet)

    # --- the trial

    def conducted(self) -> dict[str, Any]:
        trial = self.trial
        struck_there = trial.fault == "stop" or trial.strikes_launcher
        blow = Blow(
            self.folder / "plan.struck",
            trial.fault if trial.strikes_launcher else "",
            trial.pause_s if struck_there and trial.fault == "stop" else 0.0,
        )
        ran = self.conduct(self.command(), "said", blow)
        self.check("struck", ran.struck is not None, "the rank did not come to its point")
        self._look_at(ran)
        again: Ran | None = None
        if ran.struck is not None and ran.code is not None:
            again = self._resume()
        return {
            "number": trial.number,
            "trial": str(trial),
            **trial.described(),
            "expected": list(self.expected.ends),
            "end": self.end,
            "code": ran.code,
            "seconds": ran.seconds,
            "resume_s": again.seconds if again else None,
            "struck": ran.struck is not None,
            "exact": self.compared,
            "wrong": self.wrong,
            "said": ran.said[-1500:] if self.wrong else "",
            "stacks": ran.stacks[-20000:],
        }

    def _look_at(self, ran: Ran) -> None:
        self.check("hang", ran.code is not None, f"still there after {ran.seconds:g} s")
        self._left_nothing(ran)
        record = self._record()
        if ran.code is not None:
            self.end = self._classify(ran, record)
            self.check(
                "ends", self.end in self.expected.ends,
                f"{self.end} instead of {' or '.join(self.expected.ends)} (exit {ran.code})",
            )  # fmt: skip
            self._blame(ran, record)
        # What is raised in a worker, here by the fault of memory, is shown with its traceback.
        if not self.trial.own and self.trial.fault != "memory":
            self.check("plain", "Traceback" not in ran.said, ran.said[-1500:])
        self._whole()

    def _left_nothing(self, ran: Ran) -> None:
        self.check("orphans", not ran.orphans, ran.orphans)
        self.check("segments", not ran.segments, ran.segments)
        self.check("ports", not ran.ports, ran.ports)
        local = self.trial.transport != "mpi"  # Open MPI's own daemon listens everywhere
        self.check("loopback", not (ran.exposed and local), ran.exposed)
        self.check("files", not ran.files, ran.files)
        self.check("namespaces", not ran.namespaces, ran.namespaces)

    def _record(self) -> dict[str, Any] | None:
        if not (self.run / "run.json").exists():
            return None
        try:
            return dict(read_run(self.run))
        except paceline.errors.PacelineError as error:
            self.check("record", False, error)
            return None

    def _classify(self, ran: Ran, record: dict[str, Any] | None) -> str:
        status = record["status"] if record is not None else None
        number = int(SIGNALS[self.trial.fault]) if self.trial.fault in SIGNALS else 0
        if ran.code == 0 and status == "completed":
            return "goes on without" if record and record.get("lost") else "goes on"
        if ran.code == 1 and (status == "failed" or self.trial.own):
            self.check("record", self.trial.own or bool(record and record["error"]), "no error")
            return "fails"
        # A rank of `paceline launch` makes the folder when it joins.
        early = self.trial.own and self.trial.point in ("connect", "set up")
        if number and ran.code == 128 + number and (status == "interrupted" or early):
            return "interrupted"
        if number and ran.code == -number and record is None:
            return "vanishes"
        return f"exit {ran.code}, the record says {status}"

    def _blame(self, ran: Ran, record: dict[str, Any] | None) -> None:
        """Whether the right rank is named, with the reason."""
        trial, wanted = self.trial, self.expected
        me = rf"\b(?:worker|rank|host-|server) ?\(?(?:rank )?{trial.rank}\b"
        if self.end == "fails":
            sentences = [s for s in ran.said.splitlines() if s.startswith("paceline: ")]
            last = sentences[-1] if sentences else ""
            self.check("blame", bool(re.search(wanted.reason, last)), f"no reason: {last}")
            accused = re.findall(
                r"(?:worker (\d+) failed|rank (\d+) is gone|answer from (?:rank|worker) (\d+)"
                r"|rank (\d+) of|server \(rank (\d+)\)|worker (\d+): (?:no board|it is cut off))",
                last,
            )  # fmt: skip
            named = {int(n) for found in accused for n in found if n}
            # When a connection is cut, both of its ends see the other one go.
            right = bool(re.search(me, last)) if trial.fault == "cut" else trial.rank in named
            unnamed = wanted.reason == UNSTARTED  # MPI does not say whom it waits for
            if not unnamed and (not trial.own or trial.fault in ("kill", "segv", "term")):
                self.check("blame", right, f"not rank {trial.rank}: {last}")
        elif self.end == "goes on without":
            self.check("blame", bool(record) and record["lost"] == [trial.rank], record["lost"])
            named = any(re.search(wanted.reason, s) and re.search(me, s)
                        for s in ran.said.splitlines())  # fmt: skip
            self.check("blame", named, "no notice about the loss")
        if self.end in ("fails", "goes on") and not trial.strikes_launcher:
            waits = [s for s in ran.said.splitlines() if " waited " in s]
            named = any(re.search(rf"waited .* for .*?(worker|rank) {trial.rank}\b", s)
                        for s in waits)  # fmt: skip
            if trial.fault in ("stop", "gil"):
                self.check("notice", named or not wanted.notice, f"not told: {waits}")
                self.check("blame", named or not waits, f"the wrong rank is slow: {waits}")

    def _whole(self) -> None:
        """Checkpoints are whole, and nothing half-written is left where a record is."""
        folder = self.run / "checkpoints"
        damaged = [checkpoint.damage(path) for path in sorted(folder.glob("step-*"))]
        self.check("checkpoints", not any(damaged), [d for d in damaged if d])
        parts = list(folder.glob(".step-*.part")) if (self.run / "run.json").exists() else []
        if not self.trial.own:
            self.check("checkpoints", not parts, parts)

    # --- going on

    def _resume(self) -> Ran | None:
        completed = self.end.startswith("goes on")
        if completed and self.expected.exact and self.end == "goes on":
            self._compare("completed")
        saved = any((self.run / "checkpoints").glob("step-*"))
        steps = STEPS + MORE_STEPS if completed else STEPS
        ran = self.conduct(self.command(steps, resume=True), "again")
        self._left_nothing(ran)
        self.check("hang", ran.code is not None, "the resumed run hangs")
        if ran.code is None:
            self.check("resumed", False, ran.stacks)
        elif not saved and not self.trial.own:
            refused = ran.code == 2 and "no checkpoint to resume from" in ran.said
            self.check("resumed", refused, f"exit {ran.code}: {ran.said[-500:]}")
        else:
            record = self._record()
            right = ran.code == 0 and record is not None and record["status"] == "completed"
            self.check("resumed", right, f"exit {ran.code}: {ran.said[-1500:]}")
            if right and self.expected.exact and not completed:
                self._compare("resumed")
        self._whole()
        return ran

    def _compare(self, what: str) -> None:
        if not self.compares:
            return
        self.compared = True
        whole = unbroken(self.trial, self.base)
        here = _weights(self.run, self.trial.own)
        same = whole.keys() == here.keys() and all(torch.equal(whole[k], here[k]) for k in whole)
        far = max((float((whole[k] - here[k]).abs().max()) for k in whole if k in here), default=0)
        self.check("exact", same, f"{what}: {far:g} away from an unbroken run")


def _weights(run: Path, own: bool) -> dict[str, torch.Tensor]:
    if own:
        return dict(torch.load(run / "weights.pt", weights_only=True))
    return dict(load_file(run / "model.safetensors"))


def unbroken(trial: Trial, base: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run of this setting that nothing struck; it is made once."""
    words = (trial.setting.name, trial.transport, trial.workers, "own" if trial.own else "train")
    name = re.sub(r"\W+", "-", " ".join(map(str, words)))
    return _unbroken(trial, base, name) if not (base / name).is_dir() else _weights(
        base / name, trial.own
    )  # fmt: skip


def _unbroken(trial: Trial, base: Path, name: str) -> dict[str, torch.Tensor]:
    with _locked(base / f"{name}.lock"):
        if not (base / name).is_dir():
            whole = Conducted(trial, base)
            try:
                ran = whole.conduct(whole.command(plan=False), "said")
                assert ran.code == 0, f"an unbroken run failed: {ran.said}"
                shutil.copytree(whole.run, base / f"{name}.part", dirs_exist_ok=True)
                (base / f"{name}.part").rename(base / name)
            finally:
                shutil.rmtree(whole.folder, ignore_errors=True)
        return _weights(base / name, trial.own)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _made(base: Path) -> Path:
    (base / "home").mkdir(parents=True, exist_ok=True)
    return base


def perform(number: int, base: Path, keep: bool = False, compares: bool = True) -> dict[str, Any]:
    """Run one trial and return its result; its folder is removed, unless it is kept.

    `compares`: where weights must be exact, compare them with those of an unbroken run.
    """
    conducted = Conducted(trial_of(number), _made(base), compares)
    try:
        result = conducted.conducted()
    finally:
        if not keep:
            with contextlib.suppress(OSError):
                shutil.rmtree(conducted.folder)
    if keep:
        result["folder"] = str(conducted.folder)
    return result
