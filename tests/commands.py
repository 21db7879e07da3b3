"""Start `paceline ...` and `python ...` as real processes without importing PyTorch each time.

A clean process with one thread imports Paceline once per session and forks a child per command.
The child has its own arguments, environment, folder, streams and signal handlers, and the test
process is its parent: `Popen` is `subprocess.Popen` in everything else. A module that a child
would import anyway is there already, so tests about imports start an interpreter of their own.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

ROOT = Path(__file__).parent.parent
PACELINE = Path(sys.executable).with_name("paceline")
SMALL_TRAIN = ["train", "--data", "fashion-mini", "--model", "mlp:hidden=16"]
SMALL_TRAIN += ["--strategy", "allreduce", "--steps", "4"]
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
HANDLED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE)


class Popen(subprocess.Popen[Any]):
    """A process that runs `paceline ARGUMENTS` or `python [-c CODE | -m MODULE | FILE] ...`."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env,
                       startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite,
                       errread, errwrite, *rest: Any) -> None:  # fmt: skip
        new_session = bool(rest[5])  # restore_signals, gid, gids, uid, umask, start_new_session
        request = {
            "args": [str(part) for part in args],
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "new_session": new_session,
        }
        streams = [given if given != -1 else own for own, given in
                   enumerate((p2cread, c2pwrite, errwrite))]  # fmt: skip
        self.pid = _start(request, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(
    args: Any, input: Any = None, timeout: float = 100, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with this module's `Popen`."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def free_port(among: Sequence[int] = (0,)) -> int:
    for port in random.sample(among, len(among)):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return int(found.getsockname()[1])
    raise AssertionError("no port is free")


def free_job(step: int) -> int:
    """The number of a Slurm job whose step meets at a free port: srun's ranks compute it from the
    numbers of both.
    """
    return (free_port(range(20_000 + step, 40_000, 64)) - 20_000) // 64


# --- the process that forks

_parent: tuple[socket.socket, subprocess.Popen[bytes]] | None = None


def children() -> list[psutil.Process]:
    """All processes below this one, except the one that forks."""
    forks = _parent[1].pid if _parent else None
    return [one for one in psutil.Process().children(recursive=True) if one.pid != forks]


def _start(request: dict[str, Any], streams: list[int]) -> int:
    """Fork a child there, make it a child of this process, and return its pid."""
    global _parent
    if _parent is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.commands", str(theirs.fileno())]
            process = subprocess.Popen(
                command, cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True
            )
        ours.settimeout(120)
        _parent = ours, process
        atexit.register(_end, ours, process)
    # The child is forked twice; meanwhile its new parent is this process, not init.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(_parent[0], [json.dumps(request).encode()], streams)
        return int(_parent[0].recv(100))
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _end(line: socket.socket, process: subprocess.Popen[bytes]) -> None:
    line.close()
    process.wait(30)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(line: socket.socket) -> None:
    """Fork a child for every request, until the tests' process is gone."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    import torch._dynamo  # noqa: F401  (the first optimizer of a process imports it: 1 s)

    from paceline.privacy import native
    from paceline.registry import ALL

    for registry in ALL.values():
        registry.discover()
    native.loops()
    gc.collect()
    gc.freeze()  # so that a child's collector copies no page of this
    while True:
        content, streams, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if not content:
            return
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                line.close()
                os.close(told)
                os.close(tell)
                _become(json.loads(content), streams)
            os.write(tell, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)  # now the child has its new parent
        line.send(os.read(told, 100))
        for used in (told, tell, *streams):
            os.close(used)


def _become(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Be what the request asks for, and end as an interpreter does, except that its modules are not
    torn down one by one.
    """
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it
    if request["new_session"]:
        os.setsid()
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
    for stream in streams:
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    code = 1
    try:
        _run(request["args"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(args: list[str]) -> None:
    program, arguments = args[0], args[1:]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *(p for p in sys.path if p not in paths)]
    if program == str(PACELINE):
        from paceline.cli.main import main

        sys.argv = args
        sys.path.insert(0, str(PACELINE.parent))
        sys.exit(main())
    assert program == sys.executable, f"{program}: only python and paceline are started here"
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main_module = ModuleType("__main__")
        sys.modules["__main__"] = main_module
        exec(compile(arguments[1], "<string>", "exec"), main_module.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _line:
        _serve(_line)
