"""The folder of a run: claimed by one process, so that no other writes to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from paceline.common.files import sweep
from paceline.errors import BadRequest
from paceline.privacy.ledger import read_account
from paceline.privacy.plan import begin_session
from paceline.record.lock import HELD, alone_in
from paceline.record.reader import read_worker_events
from paceline.request.earlier import run_folder
from paceline.request.job import Job
from paceline.request.session import Session
from paceline.transport.status.line import FOLDER


def claim(
    job: Job,
    restarted: Callable[[Path], bool] = lambda out: False,
    held: ExitStack | None = None,
) -> Session:
    """Make the run's folder, or take over the one that is to be resumed.

    Making `events/` is the claim: it succeeds once. `restarted` tells whether a launcher has
    started the ranks of the run in that folder again; they may begin again, as a further session.
    Until `held` is closed no other process can continue the run.
    """
    out, begins_again = _take(job, restarted)
    if held is not None:
        held.enter_context(alone_in(out, HELD))
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    sweep(out)
    if begins_again:
        shutil.rmtree(out / "events")
        (out / "events").mkdir()
    if job.resume_from is not None:
        earlier = run_folder(job.config.resume or "")
        if not same_folder(out, earlier) and (earlier / "events").is_dir():
            # The record of the resumed run covers its whole history.
            shutil.copytree(earlier / "events", out / "events", dirs_exist_ok=True)
    number = _next_session(out)
    if job.protection is not None:
        number = begin_session(out, job.protection, number)
    return Session(job, out, number)


def claim_own(out: Path, resume: bool, restarted: Callable[[Path], bool], held: ExitStack) -> int:
    """Claim the folder of a loop of the user's own; return the number of its session there.

    `resume`: the folder may hold a record, which then goes on.
    """
    clear = False
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "events").mkdir()
    except FileExistsError:
        if not (resume or restarted(out)):
            if not _nothing_happened(out):
                raise BadRequest(
                    f"out={out} holds a run already: choose another folder, or go on with that run"
                    f" by join(out=..., resume=True) and pace.load(...)"
                ) from None
            clear = True
    except OSError as error:
        raise BadRequest(f"out={out} cannot be written: {error.strerror}") from None
    held.enter_context(alone_in(out, HELD))
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    sweep(out)
    if clear:
        shutil.rmtree(out / "events")
        (out / "events").mkdir()
    return _next_session(out)


def _next_session(out: Path) -> int:
    sessions = (event["session"] for own in read_worker_events(out) for event in own)
    return 1 + max(sessions, default=-1)


def _take(job: Job, restarted: Callable[[Path], bool]) -> tuple[Path, bool]:
    """Return the folder, and whether to clear it: an earlier run there made no step."""
    out, attempt = job.out, 1
    while True:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "events").mkdir()
            return out, False
        except FileExistsError:
            if job.resume_from and same_folder(out, run_folder(job.config.resume or "")):
                return out, False
            if restarted(out) or job.found == "begun":
                _refuse_to_spend_twice(job, out)
                return out, False
            if job.out_is_given and _nothing_happened(out):
                return out, True
            if job.out_is_given:
                raise BadRequest(
                    f"out={out} holds a run already: choose another folder, or continue that run"
                    f" with --resume {out}"
                ) from None
            attempt += 1
            out = job.out.with_name(f"{job.out.name}.{attempt}")
        except OSError as error:
            raise BadRequest(f"out={out} cannot be written: {error.strerror}") from None


def _refuse_to_spend_twice(job: Job, out: Path) -> None:
    """Refuse to begin a private run again, since its steps would spend the budget once more."""
    if job.protection is not None and any(entry.steps for entry in read_account(out)):
        raise BadRequest(
            f"privacy: the run in {out} was started again before its first checkpoint, and the"
            " privacy that it has spent cannot be recovered: choose another folder and a smaller"
            " --checkpoint-every"
        )


def _nothing_happened(out: Path) -> bool:
    """Whether the run there ended before its first step and left nothing that could be resumed."""
    made_steps = any(e["kind"] == "step" for own in read_worker_events(out) for e in own)
    spent = (out / "privacy").exists() and any(entry.steps for entry in read_account(out))
    kept = (out / "checkpoints").exists()
    return (out / "run.json").is_file() and not made_steps and not spent and not kept


def same_folder(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
