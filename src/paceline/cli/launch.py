"""`paceline launch`"""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from paceline.cli.asked import options_of_train
from paceline.cli.kubernetes import OWN as FOR_KUBERNETES
from paceline.cli.kubernetes import kubernetes_options, write_manifests

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
FOR_HOSTS = ("ssh", "python", "cd", "interface")
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
    "--hosts",
    default=None,
    metavar="HOST,...",
    help="processes on these machines, by ssh: a,b:2,me@c (two on b)",
)
@click.option(
    "--hosts-file", default=None, metavar="FILE", help="the same, with a machine per line"
)
@click.option(
    "--ssh",
    default="ssh",
    show_default=True,
    metavar="COMMAND",
    help="hosts: how they are reached: 'ssh -p 2222 -i KEY'",
)
@click.option(
    "--python",
    default=None,
    metavar="PATH",
    help="hosts: the interpreter there  [default: the path of this one]",
)
@click.option(
    "--cd", default=None, metavar="DIR", help="hosts: the folder there  [default: this one]"
)
@click.option(
    "--interface",
    default=None,
    metavar="NAME",
    help="hosts: the first one's network interface, or address, that the others reach",
)
@click.option(
    "--slurm",
    default=None,
    metavar="FILE",
    help="start nothing, but write a batch script for Slurm (-: print it)",
)
@click.option(
    "--nodes",
    default=1,
    show_default=True,
    type=int,
    help="Slurm: number of nodes; Kubernetes: of pods",
)
@click.option(
    "--tasks-per-node", default=1, show_default=True, type=int, help="Slurm: processes on each node"
)
@click.option("--cpus-per-task", default=None, type=int, help="Slurm: cores for each process")
@click.option(
    "--time",
    default=None,
    metavar="T",
    help="Slurm, Kubernetes: time limit: 90 (minutes), 1:30:00, 2-12:00:00",
)
@click.option("--partition", default=None, metavar="NAME", help="Slurm: partition of the cluster")
@click.option(
    "--job-name",
    default="paceline",
    show_default=True,
    metavar="NAME",
    help="Slurm, Kubernetes: name of the job",
)
@click.option(
    "--setup",
    multiple=True,
    metavar="LINE",
    help="Slurm: shell lines before the run (may be repeated)",
)
@click.option("--force", is_flag=True, help="Slurm, Kubernetes: replace FILE if it exists")
@kubernetes_options
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
    kubernetes: str | None,
    hosts: str | None,
    hosts_file: str | None,
    ssh: str,
    python: str | None,
    cd: str | None,
    interface: str | None,
    debug: bool,
    script: str,
    arguments: tuple[str, ...],
    **wishes: Any,
) -> None:
    """Run your own training loop (it calls paceline.join) in several processes of this machine, run
    it or `train` on several machines by ssh, or write a batch script for Slurm or manifests for
    Kubernetes.

    Arguments after SCRIPT are passed to the script.

    \b
    Examples:
      paceline launch -n 4 train.py
      paceline launch -n 3 train.py --lr 0.1
      paceline launch --hosts a,b:2 -- train --data mnist --out /shared/run
      paceline launch --hosts a,me@b --ssh 'ssh -p 2222' --cd /shared/code train.py
      paceline launch --slurm job.sh --nodes 2 --tasks-per-node 4 -- train --strategy allreduce
      paceline launch --slurm job.sh --nodes 2 --setup 'source ~/venv/bin/activate' train.py
      paceline launch --kubernetes job.yaml --image me/paceline:1 --nodes 2 --volume data:/shared \
          -- train --strategy allreduce --out /shared/run
    """
    from paceline.errors import BadRequest

    given = {
        name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if kubernetes is not None:
        if slurm is not None:
            raise BadRequest("--slurm and --kubernetes are two clusters: write one file at a time")
        write_manifests(kubernetes, (script, *arguments), wishes, given)
        return
    if stray := [name for name in FOR_KUBERNETES if name in given]:
        flag = stray[0].replace("_", "-")
        raise BadRequest(f"--{flag} is for Kubernetes: add --kubernetes FILE")
    for name in FOR_KUBERNETES:
        wishes.pop(name)
    by_ssh = hosts is not None or hosts_file is not None
    if slurm is not None and by_ssh:
        raise BadRequest("--slurm and --hosts cannot be used together: Slurm chooses the hosts")
    if not by_ssh and (stray := [name for name in FOR_HOSTS if name in given]):
        raise BadRequest(f"--{stray[0]} is for other machines: add --hosts a,b")
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
    if by_ssh:
        wanted = ranks if "ranks" in given else None
        _on_hosts(
            (hosts, hosts_file), (script, *arguments), wanted, threads, ssh, python, cd, interface
        )
        return
    from paceline.launch.script import launch as start

    start(script, arguments, ranks, threads)


def _on_hosts(
    where: tuple[str | None, str | None],
    command: tuple[str, ...],
    ranks: int | None,
    threads: int | None,
    ssh: str,
    python: str | None,
    cd: str | None,
    interface: str | None,
) -> None:
    """Start `train` or a script on several machines."""
    import os
    import sys
    from dataclasses import replace

    from paceline.errors import BadRequest
    from paceline.launch.ssh.command import ssh_words
    from paceline.launch.ssh.hosts import deal, read_hosts, read_hosts_file
    from paceline.launch.ssh.request import check, lost_after_s, shared_folder
    from paceline.launch.ssh.start import Wanted, launch_on_hosts

    hosts, file = where
    if hosts is not None and file is not None:
        raise BadRequest("--hosts and --hosts-file cannot be used together: give one of them")
    words = ssh_words(ssh)
    dealt = deal(read_hosts(hosts) if hosts is not None else read_hosts_file(str(file)), ranks)
    if command[:2] == ("paceline", "train"):
        command = command[1:]
    options: dict[str, Any] = {}
    folder = None
    if command[0] == "train":
        options = options_of_train(command[1:])
        check(options, dealt)
        folder = shared_folder(options)
        command = (*command, *(() if threads is None else ("--threads", str(threads))))
    wanted = Wanted(dealt, command, words, python or sys.executable, cd or os.getcwd(), folder)
    launch_on_hosts(
        replace(wanted, interface=interface, threads=threads, lost_s=lost_after_s(options))
    )


def _write(file: str, command: tuple[str, ...], wishes: dict[str, Any]) -> None:
    import os
    import sys

    from paceline.errors import BadRequest
    from paceline.launch.slurm import Allocation, batch_script, check, save
    from paceline.launch.slurm_cluster import next_command, refuse_unknown_partition

    setup, force = wishes.pop("setup"), wishes.pop("force")
    allocation = Allocation(**wishes)
    refuse_unknown_partition(allocation.partition)
    if command[:2] == ("paceline", "train"):
        command = command[1:]
    options: dict[str, Any] = {}
    if command[0] == "train":
        options = options_of_train(command[1:])
        check(options, allocation)
    elif not os.path.isfile(command[0]):
        raise BadRequest(f"{command[0]} is not a file: give your script, or train and its options")
    here = os.path.dirname(os.path.abspath(sys.executable))
    text = batch_script(command, allocation, setup, here, options)
    if file == "-":
        click.echo(text, nl=False)
        return
    save(text, file, force)
    click.echo(f"{file}: {allocation}, a process for every task. {next_command(file)}")
