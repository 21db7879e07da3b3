"""Run a part of a check apart from this process, so that it can crash or hang by itself."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.launch.interpreter import python_with
from paceline.record.checkpoint import load_weights

COMMAND = "from paceline.cli.main import main; main()"
PATIENCE_S = 180.0  # for one training or one collective: each takes seconds where it works
# Without it, cuBLAS may add in another order from one run to the next.
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
PATHS = re.compile(r"(?<![\w.])~?(?:/[^\s/:'\",]+){2,}/?")


class PartFailed(Exception):
    """A training or an exchange of a check did not succeed; its text is for the user."""

    def __init__(self, text: str) -> None:
        super().__init__(scrubbed(text))


def train_by_command(options: Mapping[str, Any], out: Path) -> dict[str, Tensor]:
    """Run `paceline train` with these options and return the weights that it has saved."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    try:
        arguments = ["train", *flags, f"--out={out}", "--quiet"]
        done = python_with(REPEATABLE, COMMAND, arguments, PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise PartFailed(f"the training had not ended after {PATIENCE_S:g} s") from None
    if done.returncode:
        told = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise PartFailed(told[-1].removeprefix("paceline: "))
    return load_weights(out / "model.safetensors")


def in_child(body: Callable[[], Any]) -> Any:
    """Return what `body` returns in a forked process; raise PartFailed after PATIENCE_S."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(body, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE_S):
            raise PartFailed(f"no result after {PATIENCE_S:g} s")
        try:
            result, error = ours.recv()
        except EOFError:
            process.join()
            raise PartFailed(f"the process ended with exit code {process.exitcode}") from None
    finally:
        if process.is_alive():
            process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()
    if error is not None:
        raise PartFailed(error)
    return result


def _report(body: Callable[[], Any], pipe: Connection) -> None:
    try:
        pipe.send((body(), None))
    except Exception as error:
        pipe.send((None, (str(error).splitlines() or [type(error).__name__])[0]))


def scrubbed(text: str) -> str:
    """Remove what a person may not want to send: paths and this host's name."""
    text = PATHS.sub("PATH", text)
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "HOST", text) if host else text
