"""What every fault must end as: the table that the trials are held against.

goes on       exit 0, the record says completed
goes on without   the same, and the record's `lost` names the worker
fails         exit 1, the record says failed; one sentence names the rank and the reason
interrupted   exit 128 + the signal's number, the record says interrupted
vanishes      the signal's own end: no run.json, but the run can be resumed
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tests.faults.trial import Trial

SIGNALS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
}
MEMORY = r"(?i)memory"
SLOW = r"no answer|waited|give.up"
UNSTARTED = r"MPI has not started"
GONE = r"gone|lost|closed|connection|no answer|does not answer|unreachable|Broken pipe"


@dataclass(frozen=True)
class Expected:
    ends: tuple[str, ...]  # any of these
    reason: str = ""  # a regular expression that the sentence must match, where the run fails
    notice: bool = False  # a notice must say that the others wait for the struck rank
    exact: bool = False  # the weights, in the end or after a resume, are those of an unbroken run
    seconds: float = 0.0  # that the fault itself may take


#   fault        target    strategy          ends
#   ------------ --------- ----------------- ---------------------------------------------------
#   kill segv    worker    survives, not 0   goes on without (mpi: fails, mpirun ends all)
#   term         worker    others            fails: the rank, the signal
#                server    all               fails: the rank, the signal
#   memory       any rank  all               fails: the rank, "memory" (it raises: no death)
#   stop gil     any rank  all               pause: goes on, a notice names the rank
#                                            --give-up-s: fails, the rank, "no answer"
#   cut          any rank  gloo              fails: "gone"; survives: that, or goes on without
#                          shm, mpi          only the board is cut: goes on, or fails: "gone"
#   link         any rank  all               2.5 s: goes on; longer than --lost-s: fails, the
#                                            rank, "gone"; survives: that, or goes on without
#                          mpi, connect      2.5 s: goes on, or fails: "MPI has not started"
#   int hup      launcher                    interrupted
#   term         launcher                    interrupted, after a checkpoint once it trains; goes
#                                            on where the last step comes before that
#   kill segv    launcher                    vanishes
#   stop gil     launcher                    goes on
#   kill segv    own rank                    fails: "rank N of own_loop.py ended with signal ..."
#   term         own rank                    the same, or the exit code that its own handler gave
#   memory       own rank                    fails: "rank N of own_loop.py ended with exit code 1"


def expected(trial: Trial) -> Expected:
    """Return what the table says about a trial."""
    exact = trial.setting.exact
    if trial.strikes_launcher:
        return _of_launcher(trial, exact)
    if trial.own:
        return _of_own_rank(trial, exact)
    return _of_rank(trial, exact)


def _of_launcher(trial: Trial, exact: bool) -> Expected:
    if trial.fault in ("stop", "gil"):
        return Expected(("goes on",), exact=exact, seconds=trial.pause_s)
    if trial.fault == "term" and not trial.own:
        return Expected(("interrupted", "goes on"), exact=exact)
    ends = "vanishes" if trial.fault in ("kill", "segv") else "interrupted"
    return Expected((ends,), exact=exact)


def _of_rank(trial: Trial, exact: bool) -> Expected:
    setting = trial.setting
    mourned = setting.survives and 0 < trial.rank < trial.workers and trial.transport != "mpi"
    exact = exact and not trial.serves  # a server's memory is lost with it
    if trial.fault in ("memory", "cut"):  # the others may have saved what they made without it
        exact = exact and not mourned
    if trial.fault in ("kill", "segv", "term"):
        if mourned:
            return Expected(("goes on without",), SIGNALS[trial.fault].name)
        return Expected(("fails",), SIGNALS[trial.fault].name, exact=exact)
    if trial.fault == "memory":
        return Expected(("fails",), MEMORY, exact=exact)
    if trial.fault in ("stop", "gil"):
        if trial.give_up_s is not None:
            return Expected(("fails",), SLOW, exact=exact, seconds=trial.give_up_s)
        # ddp waits inside the backward pass, where waiting and computing look the same.
        # While MPI starts, no rank knows whom it waits for.
        told = setting.in_step and setting.kind != "ddp" and trial.workers > 1
        told = told and not (trial.transport == "mpi" and trial.point == "connect")
        return Expected(("goes on",), notice=told, exact=setting.exact, seconds=trial.pause_s)
    either = ("goes on without", "goes on", "fails")
    if trial.fault == "cut":
        if trial.point == "connect":  # there may be no connection yet
            return Expected(either, GONE, exact=exact)
        alone = trial.transport == "gloo" and not setting.survives
        return Expected(("fails",) if alone else either, GONE, exact=exact)
    if trial.pause_s and trial.transport == "mpi" and trial.point == "connect":
        return Expected(("goes on", "fails"), UNSTARTED, exact=exact, seconds=20.0)
    if trial.pause_s:
        return Expected(("goes on",), exact=setting.exact, seconds=trial.pause_s)
    exact = exact and not mourned  # the others have saved what they made without it
    return Expected(either if mourned else ("fails",), GONE, exact=exact, seconds=20.0)


def _of_own_rank(trial: Trial, exact: bool) -> Expected:
    exact = exact and not trial.serves
    if trial.fault in ("kill", "segv"):
        return Expected(("fails",), f"signal {SIGNALS[trial.fault].name}", exact=exact)
    if trial.fault == "term":  # a rank with a record ends by an exception, then by the signal
        return Expected(("fails",), r"signal SIGTERM|exit code (1|143)", exact=exact)
    if trial.fault == "memory":
        return Expected(("fails",), r"exit code 1", exact=exact)
    if trial.fault in ("stop", "gil"):
        if trial.give_up_s is not None:
            return Expected(("fails",), "exit code 1", exact=exact, seconds=trial.give_up_s)
        return Expected(("goes on",), exact=exact, seconds=trial.pause_s)
    return Expected(("goes on", "fails"), "exit code 1|signal", exact=exact)
