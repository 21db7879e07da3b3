"""`paceline launch`"""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

FOR_SLURM = (
    "nodes",
    "tasks_per_node",
    "cpus_per_task",
    "time",
    "partition",
    "job_name",
    "setup",
    "force",
)
NOT_FOR_SLURM = {"ranks": "--nodes and --tasks-per-node", "threads": "--cpus-per-task"}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--ranks",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="processes (workers and servers)",
)
@click.option(
    "--threads",
    default=None,
    type=click.IntRange(1),
    help="threads per process  [default: cores // ranks]",
)
@click.option(
    "--slurm",
    default=None,
    metavar="FILE",
    help="start nothing, but write a batch script for Slurm (-: print it)",
)
@click.option("--nodes", default=1, show_default=True, type=int, help="Slurm: number of nodes")
@click.option(
    "--tasks-per-node", default=1, show_default=True, type=int, help="Slurm: processes on each node"
)
@click.option("--cpus-per-task", default=None, type=int, help="Slurm: cores for each process")
@click.option(
    "--time",
    default=None,
    metavar="T",
    help="Slurm: time limit: 90 (minutes), 1:30:00, 2-12:00:00",
)
@click.option("--partition", default=None, metavar="NAME", help="Slurm: partition of the cluster")
@click.option(
    "--job-name",
    default="paceline",
    show_default=True,
    metavar="NAME",
    help="Slurm: name of the job",
)
@click.option(
    "--setup",
    multiple=True,
    metavar="LINE",
    help="Slurm: shell lines before the run (may be repeated)",
)
@click.option("--force", is_flag=True, help="Slurm: replace FILE if it exists")
@click.option("--debug", is_flag=True, help="show tracebacks")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    ranks: int,
    threads: int | None,
    slurm: str | None,
    debug: bool,
    script: str,
    arguments: tuple[str, ...],
    **wishes: Any,
) -> None:
    """Run your own training loop (it calls paceline.join) in several processes of this machine, or
    write a batch script for Slurm.

    Arguments after SCRIPT are passed to the script.

    \b
    Examples:
      paceline launch -n 4 train.py
      paceline launch -n 3 train.py --lr 0.1
      paceline launch --slurm job.sh --nodes 2 --tasks-per-node 4 -- train --data mnist
      paceline launch --slurm job.sh --nodes 2 --setup 'source ~/venv/bin/activate' train.py
    """
    from paceline.errors import BadRequest

    given = {
        name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if slurm is not None:
        for name, instead in NOT_FOR_SLURM.items():
            if name in given:
                raise BadRequest(
                    f"--{name} is for processes on this machine; with --slurm give {instead}"
                )
        _write(slurm, (script, *arguments), wishes)
        return
    if stray := [name for name in FOR_SLURM if name in given]:
        raise BadRequest(f"--{stray[0].replace('_', '-')} is for a batch script: add --slurm FILE")
    from paceline.launch.script import launch as start

    start(script, arguments, ranks, threads)


def _write(file: str, command: tuple[str, ...], wishes: dict[str, Any]) -> None:
    import os
    import sys

    from paceline.errors import BadRequest
    from paceline.launch.slurm import Allocation, batch_script, check, save

    setup, force = wishes.pop("setup"), wishes.pop("force")
    allocation = Allocation(**wishes)
    if command[:2] == ("paceline", "train"):
        command = command[1:]
    options: dict[str, Any] = {}
    if command[0] == "train":
        options = _options_of_train(command[1:])
        check(options, allocation)
    elif not os.path.isfile(command[0]):
        raise BadRequest(f"{command[0]} is not a file: give your script, or train and its options")
    here = os.path.dirname(os.path.abspath(sys.executable))
    text = batch_script(command, allocation, setup, here, options)
    if file == "-":
        click.echo(text, nl=False)
        return
    save(text, file, force)
    click.echo(f"{file}: {allocation}, a process for every task. Next: sbatch {file}")


def _options_of_train(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Read the options that `paceline train` would get from its file, flags and settings."""
    from paceline.cli.train import train
    from paceline.common.files import read_toml
    from paceline.request.config import apply_settings

    params = train.make_context("paceline train", list(arguments)).params
    values: dict[str, Any] = read_toml(params["file"]) if params["file"] else {}
    own = ("file", "settings", "as_json", "quiet", "progress", "watch", "debug")
    values.update({k: v for k, v in params.items() if k not in own and v is not None and v != ()})
    return apply_settings(values, list(params["settings"]))
