"""`paceline`: the group of commands, and how every one of them ends."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import click

from paceline import __version__
from paceline.cli.entry import until_interrupted
from paceline.cli.groups import Group
from paceline.common.shortage import out_of_memory
from paceline.errors import Interrupted, PacelineError, WorkerFailed, on_the_command_line
from paceline.launch.signals import Ending, ending, ignore

COMMANDS = {
    "train": "paceline.cli.train:train",
    "study": "paceline.cli.study:study",
    "report": "paceline.cli.report:report",
    "runs": "paceline.cli.runs:runs",
    "show": "paceline.cli.runs:show",
    "evaluate": "paceline.cli.runs:evaluate",
    "status": "paceline.cli.status:status",
    "watch": "paceline.cli.watch:watch",
    "explain": "paceline.cli.explain:explain",
    "list": "paceline.cli.listing:listing",
    "data": "paceline.cli.data:data",
    "prepare": "paceline.cli.prepare:prepare",
    "profile": "paceline.cli.profile:profile",
    "plan": "paceline.cli.plan:plan",
    "bench": "paceline.cli.bench:bench",
    "doctor": "paceline.cli.doctor:doctor",
    "launch": "paceline.cli.launch:launch",
    "testbed": "paceline.cli.testbed:testbed",
    "cluster": "paceline.cli.cluster:cluster",
    "privacy": "paceline.cli.privacy:privacy",
    "completion": "paceline.cli.completion:completion",
}


class LazyGroup(Group):
    """Imports a command when it is needed, so that help and completion are quick."""

    what = "command"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paceline")
def cli() -> None:
    """Train a PyTorch model with several workers, and measure which strategy is the fastest and the
    most accurate on your machine.

    \b
    Examples:
      paceline train --data fashion-mini                one worker, nothing to download
      paceline data fetch mnist
      paceline train --strategy allreduce --workers 2   cnn on mnist, gradients averaged every step
      paceline study                                    measure and compare all strategies
      paceline list strategies
    """


def main() -> None:
    """Run the command line and exit. The command `paceline` is in entry.py."""
    sys.exit(run())


def run() -> int:
    """Run the command line and return its exit code.

    An error of ours is one sentence; `--debug` shows its traceback.
    """
    with ending() as end, on_the_command_line():
        code = until_interrupted(lambda: _ended(end), end)
        if end.heard is not None:
            ignore()
    return code


def _ended(end: Ending) -> int:
    """Run the command and return the exit code."""
    debug = "--debug" in sys.argv
    try:
        code = cli.main(standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort as stop:  # click wraps Ctrl-C
        why = stop.__cause__
        raise (why if isinstance(why, KeyboardInterrupt) else Interrupted()) from None
    except PacelineError as error:
        if error.told:
            os._exit(error.exit_code)
        if isinstance(error, WorkerFailed) and error.worker_traceback:
            click.echo(error.worker_traceback.rstrip(), err=True)
        elif debug:
            traceback.print_exc()
        click.echo(f"paceline: {error}", err=True)
        code = error.exit_code
        if "mpi4py.MPI" in sys.modules:
            # Other ranks may wait for this one; mpirun ends them when this rank exits at once.
            sys.stderr.flush()
            os._exit(code)
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    except Exception as error:
        if end.raised:  # an output that is closed with the terminal, say
            raise Interrupted(end.reason) from None
        if debug:
            traceback.print_exc()
        told = out_of_memory(error) or (
            f"internal error, {type(error).__name__}: {error} (run the command again with --debug,"
            " and report what it prints)"
        )
        click.echo(f"paceline: {told}", err=True)
        code = 1
    return code if isinstance(code, int) else 0
