"""The local launcher in a fresh interpreter.

For callers that must not fork: notebooks, programs with threads or CUDA. Only the session travels
there (package.py).
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from functools import partial
from multiprocessing.connection import Connection

import torch

from paceline.common.parents import die_with_parent
from paceline.errors import PacelineError, RunFailed
from paceline.launch.messages import Hear
from paceline.launch.package import pack, unpack
from paceline.launch.signals import LEAVING, delayed, relay, relaying
from paceline.request.session import Session

MAIN = "from paceline.launch.fresh import main; main()"


def run_in_fresh_process(session: Session, hear: Hear) -> None:
    """Run the session from a new process; pass on its messages and raise its failure."""
    package = pack(session, session.job.config.plugin)
    ours, theirs = socket.socketpair()
    connection = Connection(ours.detach())
    process: subprocess.Popen[bytes] | None = None
    ended = False
    try:
        with delayed():
            process = subprocess.Popen(
                [sys.executable, "-c", MAIN, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends that one
            )
            theirs.close()
        connection.send_bytes(package)
        asks = partial(_ask_to_leave, process)
        with relaying(asks):
            while True:
                kind, content = connection.recv()
                if kind == "end":
                    break
                hear(kind, content)
        ended, failure = True, pickle.loads(content["error"])
    except (EOFError, ConnectionError):
        assert process is not None
        code = process.wait()
        raise RunFailed(
            f"the process that starts the workers ended with exit code {code} during the run"
        ) from None
    finally:
        connection.close()
        if process is not None:
            if not ended:
                process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if failure is not None:
        raise failure


def _ask_to_leave(process: subprocess.Popen[bytes], number: int) -> None:
    process.send_signal(LEAVING)


def main() -> None:
    """Run the session that the parent sends; the fresh interpreter calls this."""
    from paceline.launch.local import run_processes

    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # the parent answers Ctrl-\
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the parent asks this to end
    signal.signal(LEAVING, relay)  # or to leave with a checkpoint
    torch.set_num_threads(1)  # starts no pool of threads before the workers are forked
    connection = Connection(int(sys.argv[1]))
    failure: PacelineError | None = None
    try:
        session = unpack(connection.recv_bytes())
        run_processes(session, lambda kind, content: connection.send((kind, content)))
    except PacelineError as error:
        failure = error
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # the workers have been ended; the parent writes the record
    connection.send(("end", {"error": pickle.dumps(failure)}))
