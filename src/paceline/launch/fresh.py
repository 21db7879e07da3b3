"""The same launcher in a fresh interpreter, for callers that must not fork: notebooks, programs
with threads or CUDA.

Only what the job needs travels, by cloudpickle: classes defined in a notebook or a script work, and
it is not run again.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from paceline.errors import PacelineError, RunFailed
from paceline.launch.package import pack, unpack
from paceline.request.session import Session

Hear = Callable[[str, dict[str, Any]], None]


def run_in_fresh_process(session: Session, hear: Hear) -> None:
    package = pack(session, session.job.config.plugin)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from paceline.launch.fresh import main; main()",
            str(theirs.fileno()),
            str(os.getpid()),
        ],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    connection = Connection(ours.detach())
    ended = False
    try:
        connection.send_bytes(package)
        while True:
            kind, content = connection.recv()
            if kind == "end":
                break
            hear(kind, content)
        ended, failure = True, pickle.loads(content["error"])
    except (EOFError, ConnectionError):
        code = process.wait()
        raise RunFailed(
            f"the launcher's process ended with exit code {code} before the run did"
        ) from None
    finally:
        connection.close()
        if not ended and process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if failure is not None:
        raise failure


def main() -> None:
    from paceline.launch.local import die_with_parent, run_processes

    die_with_parent(int(sys.argv[2]))
    torch.set_num_threads(1)  # no pool of threads before the workers are forked
    connection = Connection(int(sys.argv[1]))
    session = unpack(connection.recv_bytes())
    failure: PacelineError | None = None
    try:
        run_processes(session, lambda kind, content: connection.send((kind, content)))
    except PacelineError as error:
        failure = error
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # the workers are ended; the caller writes the record
    connection.send(("end", {"error": pickle.dumps(failure)}))
