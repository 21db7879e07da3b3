"""`paceline launch --kubernetes`: its options, and the file that it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from paceline.cli.asked import options_of_train

OWN = (
    "kind",
    "image",
    "ranks_per_node",
    "namespace",
    "cpus",
    "memory",
    "gpus",
    "volume",
    "secret_name",
    "secret_as",
    "retries",
)
SHARED = ("nodes", "job_name", "time", "force")  # with --slurm
INSTEAD = {
    "ranks": "--nodes and --ranks-per-node",
    "threads": "--cpus",
    "tasks_per_node": "--ranks-per-node",
    "cpus_per_task": "--cpus",
    "partition": "--namespace",
    "setup": "an --image that needs none",
}


def kubernetes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `--kubernetes` to a command."""
    for option in reversed(
        [
            click.option(
                "--kubernetes",
                default=None,
                metavar="FILE",
                help="start nothing, but write manifests for Kubernetes (-: print them)",
            ),
            click.option(
                "--kind",
                type=click.Choice(["job", "trainjob"]),
                default="job",
                show_default=True,
                help="Kubernetes: an indexed Job, or a TrainJob of Kubeflow Trainer 2",
            ),
            click.option(
                "--image", default="", help="Kubernetes: container image that has Paceline"
            ),
            click.option(
                "--ranks-per-node",
                default=1,
                show_default=True,
                type=int,
                help="Kubernetes: processes in each pod",
            ),
            click.option(
                "--cpus", default=None, metavar="N", help="Kubernetes: cores of each pod: 2, 500m"
            ),
            click.option(
                "--memory", default=None, metavar="SIZE", help="Kubernetes: of each pod: 8Gi"
            ),
            click.option("--gpus", default=None, type=int, help="Kubernetes: GPUs of each pod"),
            click.option(
                "--volume",
                default=None,
                metavar="CLAIM:PATH",
                help="Kubernetes: a claim that all pods mount at PATH, for --out",
            ),
            click.option(
                "--secret-name",
                default=None,
                metavar="NAME",
                help="Kubernetes: a Secret that exists, entry `secret`  [default: write one]",
            ),
            click.option(
                "--secret-as",
                type=click.Choice(["file", "env"]),
                default="file",
                show_default=True,
                help="Kubernetes: env for images whose user is not root",
            ),
            click.option(
                "--retries",
                default=3,
                show_default=True,
                type=int,
                help="Kubernetes: how often all pods may start again",
            ),
            click.option("--namespace", default=None, metavar="NAME", help="Kubernetes: namespace"),
        ]
    ):
        command = option(command)
    return command


def write_manifests(
    file: str, command: tuple[str, ...], wishes: dict[str, Any], given: set[str]
) -> None:
    """Check what was asked for, and write the file. `given`: the options on the command line."""
    from paceline.errors import BadRequest
    from paceline.launch.kubernetes import Pods, check_folder, manifest, words_of
    from paceline.launch.slurm import check, save

    for name, instead in INSTEAD.items():
        if name in given:
            flag = name.replace("_", "-")
            raise BadRequest(f"--{flag} is not for Kubernetes: with --kubernetes give {instead}")
    kind, force = wishes["kind"], wishes["force"]
    if "image" not in given:
        raise BadRequest("--kubernetes needs --image IMAGE: a container image that has Paceline")
    names = [name for name in (*OWN, *SHARED) if name not in ("kind", "force")]
    pods = Pods(**{name: wishes[name] for name in names})
    if command[:2] == ("paceline", "train"):
        command = command[1:]
    options: dict[str, Any] = {}
    if command[:1] == ("train",):
        options = options_of_train(command[1:])
        check(options, pods, "Kubernetes")
        check_folder(pods, options)
    text = manifest(words_of(command, options), pods, kind, file)
    if file == "-":
        click.echo(text, nl=False)
        return
    save(text, file, force, mode=0o600)
    click.echo(f"{file}: {pods}. It was not run on a cluster. Next: kubectl apply -f {file}")
