"""Ranks as workers of Ray Train (TorchTrainer), on a Ray cluster or on one that lasts for the run.

Ray Train starts all ranks again when it loses one of them; they continue from the last checkpoint
(launch/restarts.py). What ranks print and why they fail reaches the driver through the desk.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.common.extras import need
from paceline.errors import (
    BadRequest,
    Interrupted,
    PacelineError,
    RunFailed,
    from_plain,
)
from paceline.launch.driver import conclude, content, keep, stopped, with_traceback
from paceline.launch.ray_desk import Desk
from paceline.launch.ray_rank import LEAVE, Rank, Work, in_rank
from paceline.launch.ray_reports import STORAGE
from paceline.launch.run import Listen
from paceline.launch.seat import find as find_seat
from paceline.launch.seat import refuse_inside_a_launcher
from paceline.launch.signals import Ending, ending, relaying
from paceline.launch.spark import shown
from paceline.ray.session import Session
from paceline.record.machine import environment
from paceline.record.reader import read_run
from paceline.request.job import Job

MAX_FAILURES = 3  # how often Ray Train starts the ranks again
START_FAILURES = 2  # how often it tries again to find room for them
TAKE_S = 0.1  # between two looks at the desk
LAST_S = 60.0  # for the desk to hand over the last of what ranks have told
ABORT_S = 10.0  # for Ray to end its workers after Ctrl-C
LEAVE_S = 60.0  # for the ranks to leave with a checkpoint after a SIGTERM
ADDRESS = "RAY_ADDRESS"  # set by `ray job submit`
ENDS = {  # what Ray says about an actor, and what it means for a rank
    r"node has died|node was terminated|NODE_DIED": "its node is gone",
    r"OUT_OF_MEMORY|OutOfMemoryError|running low on memory": "its node had no memory left",
    r"unavailable|health check .*timed out": "it or its node no longer answers",
    r"actor died|actor is dead|worker process has died": "its process ended",
}
# The store of Ray's process group, as the record describes it.
STORE = "holds the gloo keys of Ray's own process group; the run's board is not there"


@dataclass(frozen=True)
class Wishes:
    """What a user of Ray Train may ask for beside the options of a run."""

    max_failures: int = MAX_FAILURES
    storage_path: str | None = None  # None: in the run's folder
    reports: bool = False  # report to Ray Train, with checkpoints


@dataclass
class Heard:
    """What the ranks have told the driver."""

    record: dict[str, Any] | None = None
    failures: dict[int, PacelineError] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)  # of Ray's groups: one for each start
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the last start
    left: Interrupted | None = None  # the ranks have left with a checkpoint

    def take(self, kind: str, content: dict[str, Any], listen: Listen) -> None:
        if kind == "line":
            listen("line", {"text": shown(content["text"])})
        elif kind == "began":
            if content["store"] not in self.stores:
                self.stores.append(content["store"])
            self.ranks[content["rank"]] = content
        elif kind == "record":
            self.record = content
        elif kind == "left":
            self.left = self.left or Interrupted(content["text"], content["number"])
        elif kind == "failed":
            self.failures[content["rank"]] = from_plain(content["error"])
        elif kind == "ended":  # Ray's word on the ranks of an attempt
            self.losses.append(content["text"])
            listen("line", {"text": f"paceline: {shown(content['text'])}"})

    @property
    def failure(self) -> PacelineError | None:
        """The failure of rank 0, which knows the cause of all; else that of the lowest rank."""
        return self.failures[min(self.failures)] if self.failures else None


def run_on_ray(
    rank: Rank, job: Job, listen: Listen, wishes: Wishes | None = None
) -> tuple[dict[str, Any], Any]:
    """Run all ranks on the cluster. Returns the record and Ray Train's result.

    Writes run.json in every case, as far as the run has begun.
    """
    refuse_inside_a_launcher(find_seat())
    out, wishes = job.out.resolve(), wishes or Wishes()
    before = content(out / "run.json")
    cpus = job.threads
    address = job.config.master or os.environ.get(ADDRESS) or "local"
    heard = Heard()
    with ending() as end:
        try:
            with Session(address, job.ranks * cpus) as session:
                session.enough(job.ranks, cpus)
                result = _fit(session, rank, job, out, cpus, listen, wishes, heard, end)
        except (KeyboardInterrupt, PacelineError) as error:
            end.settling = True
            failure = error if isinstance(error, PacelineError | Interrupted) else stopped(end)
            conclude(job, out, listen, failure, before)
            if heard.ranks and content(out / "run.json") != before:
                keep(_with_ray(read_run(out), heard), out)
            raise failure from None
    assert heard.record is not None
    record = _with_ray(heard.record, heard)
    keep(record, out)
    return record, result


def _with_ray(record: dict[str, Any], heard: Heard) -> dict[str, Any]:
    """Return the record with what only the driver knows."""
    own = {"command": environment()["command"], "ray": _about(heard)}
    about = {**record["environment"], **own}
    return {**record, "attempts": len(heard.stores), "environment": about}


def _fit(
    session: Session,
    rank: Rank,
    job: Job,
    out: Path,
    cpus: int,
    listen: Listen,
    wishes: Wishes,
    heard: Heard,
    end: Ending,
) -> Any:
    """Run Ray Train to its end, and hear the ranks meanwhile. Returns its result."""
    ray, train = session.ray, need("ray.train", "ray[train]", "ray", "launcher=ray")
    torch_trainer = need("ray.train.torch", "ray[train]", "ray", "launcher=ray")
    desk = _beside(ray, ray.get_runtime_context().get_node_id(), Desk).remote()
    work = Work(
        rank,
        {**job.asked, "out": str(out)},
        os.getcwd(),
        f"ray-{secrets.token_hex(8)}",
        secrets.token_hex(32),
        desk,
        wishes.reports,
        job.config.waits.lost_s,
    )

    def paceline_rank() -> None:
        in_rank(work)

    trainer = torch_trainer.TorchTrainer(
        paceline_rank,
        scaling_config=train.ScalingConfig(
            num_workers=job.ranks,
            use_gpu=job.config.device.startswith("cuda"),
            resources_per_worker={"CPU": cpus},
        ),
        torch_config=torch_trainer.TorchConfig(backend="gloo"),
        run_config=train.RunConfig(
            name=work.run,
            storage_path=wishes.storage_path or str(out / STORAGE),
            failure_config=train.FailureConfig(
                max_failures=wishes.max_failures, controller_failure_limit=START_FAILURES
            ),
            callbacks=[_losses(train, desk)],
        ),
    )
    # Ray would set a handler of its own for Ctrl-C there. It is given Ray Train's controller.
    controllers: list[Any] = []
    trainer._register_sigint_handler = controllers.append
    hearing = _Hearing(session, desk, heard, listen, _Waiting(session, job, listen), end)
    hearing.start()
    error, result = None, None
    try:
        with relaying(hearing.ask):
            result = trainer.fit()
    except (KeyboardInterrupt, SystemExit):
        _abort(ray, controllers)
        raise KeyboardInterrupt from None
    except Exception as raised:
        error = raised
    finally:
        end.cannot_leave()
        hearing.stop()
    if heard.left is not None:
        raise heard.left
    if (failure := heard.failure) is not None:
        raise with_traceback(failure)
    if error is not None:
        raise _reason(error, heard, job.ranks, out) from None
    if heard.record is None:
        raise RunFailed("the ranks ended without a record")
    return result


class _Hearing(threading.Thread):
    """Hears the ranks, at the desk, while the main thread waits for Ray Train."""

    def __init__(
        self,
        session: Session,
        desk: Any,
        heard: Heard,
        listen: Listen,
        waiting: _Waiting,
        end: Ending,
    ) -> None:
        super().__init__(name="ray-desk", daemon=True)
        self._ray, self._desk, self._heard = session.ray, desk, heard
        self._listen, self._waiting, self._end = listen, waiting, end
        self._wish: int | None = None
        self._told = False  # that the ranks can leave
        self._answer: Any = None  # of the desk, while it is awaited
        self._over = threading.Event()

    def run(self) -> None:
        with suppress(self._ray.exceptions.RayError):  # the desk is gone: Ray Train ends as well
            over, until = False, float("inf")
            while not over or (self._answer is not None and time.monotonic() < until):
                if self._over.wait(TAKE_S) and not over:
                    over, until = True, time.monotonic() + LAST_S
                for kind, content in self._take():
                    self._heard.take(kind, content, self._listen)
                self._waiting.look(over or bool(self._heard.ranks))
                self._look_at_leaving()

    def _take(self) -> Any:
        """Return what was told at the desk. A busy desk is waited for, so that nothing is lost."""
        if self._answer is None:
            self._answer = self._desk.take.remote()
        try:
            told = self._ray.get(self._answer, timeout=ABORT_S)
        except self._ray.exceptions.GetTimeoutError:
            return []
        self._answer = None
        return told

    def ask(self, number: int) -> None:
        """Ask the ranks to leave with a checkpoint. A handler of signals may call this."""
        self._wish = number

    def _look_at_leaving(self) -> None:
        if self._heard.ranks and not self._told:
            self._told = True
            self._end.can_leave(LEAVE_S)
        if self._wish is not None:
            wish, self._wish = self._wish, None
            self._desk.put.remote(LEAVE, int(wish))

    def stop(self) -> None:
        """Hear what is left, and end."""
        self._over.set()
        self.join()
        with suppress(Exception):
            self._ray.kill(self._desk)


class _Waiting:
    """Tells the user, after the deadline, that Ray has no room for the ranks yet."""

    def __init__(self, session: Session, job: Job, listen: Listen) -> None:
        self._session, self._listen, self._ranks = session, listen, job.ranks
        self._due = time.monotonic() + max(10.0, job.config.deadline_s)

    def look(self, begun: bool) -> None:
        if begun or time.monotonic() < self._due or not self._session.waits_for_room():
            return
        self._due = float("inf")
        self._listen(
            "notice",
            {
                "text": f"Ray has not started the {self._ranks} ranks yet, because its cluster"
                " has too few free CPUs at the moment; the run waits"
            },
        )


def _losses(train: Any, desk: Any) -> Any:
    """Return a callback of Ray Train that tells at the desk which ranks it has lost."""

    class Losses(train.UserCallback):  # type: ignore[misc]
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Any]) -> None:
            desk.tell.remote("ended", {"text": lost_ranks(worker_exceptions)})

    return Losses()


def lost_ranks(failures: dict[int, Any]) -> str:
    """Say which ranks Ray has lost, and how. Ranks that only noticed that are left out."""
    told = {rank: _how(error) for rank, error in sorted(failures.items())}
    gone = {rank: how for rank, how in told.items() if how}
    if gone:
        return "Ray lost " + ", ".join(f"rank {rank} ({how})" for rank, how in gone.items())
    first = min(failures)
    return f"Ray lost a rank: {_first_line(failures[first])}"


def _how(error: Any) -> str:
    """Say how a worker's process ended; empty if it has not ended but raised an error."""
    text = str(error)
    return next((how for sign, how in ENDS.items() if re.search(sign, text)), "")


def _reason(error: BaseException, heard: Heard, ranks: int, out: Path) -> PacelineError:
    """Return why Ray Train has given up."""
    if heard.losses:
        again = f"; continue with --resume {out}" if (out / "checkpoints").is_dir() else ""
        return RunFailed(f"{heard.losses[-1]}, {len(heard.losses)} time(s){again}")
    text = str(error)
    if "ModuleNotFoundError" in text and "paceline" in text:
        return BadRequest(
            "the nodes of the Ray cluster do not have Paceline: pip install paceline there"
        )
    if re.search(r"placement group|StartupTimeout|resource", text, re.IGNORECASE):
        return RunFailed(f"Ray found no room for {ranks} ranks: {_first_line(error)}")
    return RunFailed(f"Ray Train failed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def _abort(ray: Any, controllers: list[Any]) -> None:
    """End Ray Train and its workers."""
    for controller in controllers:
        with suppress(Exception):  # it ends while it answers
            ray.get(controller.abort.remote(), timeout=ABORT_S)
        with suppress(Exception):
            ray.kill(controller)


def _beside(ray: Any, node: str, what: Any) -> Any:
    """Return an actor class that takes no CPU and runs on a certain node."""
    places = need("ray.util.scheduling_strategies", "ray[train]", "ray", "launcher=ray")
    there = places.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(what).options(num_cpus=0, scheduling_strategy=there)


def _about(heard: Heard) -> dict[str, Any]:
    """What the record says about Ray: where each rank was, and the store that Ray opened."""
    nodes = [
        {"rank": rank, "node": told["node"], "address": told["ip"]}
        for rank, told in sorted(heard.ranks.items())
    ]
    return {
        "version": need("ray", "ray[train]", "ray", "launcher=ray").__version__,
        "ranks": nodes,
        "losses": heard.losses,
        "store": {"address": heard.stores[-1], "authenticated": False, "note": STORE},
    }
