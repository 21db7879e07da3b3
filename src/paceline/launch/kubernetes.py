"""Write manifests for Kubernetes: an indexed Job with a headless Service, or a Kubeflow TrainJob.

Each pod runs torchrun, which starts the ranks of its node. The ranks get the run's secret from a
Kubernetes Secret. No pod can go on alone, so that all pods start again when one has failed;
`--resume auto` then goes on from the last checkpoint.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.common.yaml import as_yaml
from paceline.errors import BadRequest
from paceline.launch.secret import SECRET, SECRET_FILE
from paceline.launch.slurm import TIME
from paceline.request.earlier import AUTO

PORT = 29500  # of torchrun's store in pod 0
LABEL = "app.kubernetes.io/name"
KUBEFLOW = "trainer.kubeflow.org"
FOLDER, KEY = "/var/run/paceline", "secret"  # where the Secret is mounted, and its only entry
GRACE_S = 60  # between SIGTERM and SIGKILL: for a last checkpoint
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?|Ki)?")
LONGEST_NAME = 45  # the names of pods and their hosts are longer
Kind = Literal["job", "trainjob"]
NOTE = """\
# Written by `paceline launch --kubernetes`: {what}.
# Its form was checked against the schemas of Kubernetes and Kubeflow, and its pods' command was run
# outside Kubernetes. It has NOT been run on a cluster: look it over before you apply it.
#
#   kubectl apply -f {file}
#   kubectl logs -f {logs}
"""
NOTE_SECRET = """\
#
# The Secret below keeps strangers out of the run. Do not publish this file: with --secret-name NAME
# it names a Secret that exists already instead.
"""


@dataclass(frozen=True)
class Pods:
    """The pods that a job asks Kubernetes for."""

    image: str
    nodes: int = 1
    ranks_per_node: int = 1
    job_name: str = "paceline"
    namespace: str | None = None
    cpus: str | None = None  # of each pod, as are memory and GPUs
    memory: str | None = None
    gpus: int | None = None
    volume: str | None = None  # CLAIM:PATH
    secret_name: str | None = None  # of a Secret that exists; None: one is written
    secret_as: Literal["file", "env"] = "file"
    retries: int = 3  # how often all pods may start again
    time: str | None = None

    def __post_init__(self) -> None:
        if not self.image or re.search(r"\s", self.image):
            raise BadRequest(
                f"--image {self.image!r}: name a container image that has Paceline, such as"
                " registry/paceline:1"
            )
        for name, least in {"nodes": 1, "ranks_per_node": 1, "gpus": 1, "retries": 0}.items():
            if (number := getattr(self, name)) is not None and number < least:
                raise BadRequest(f"{_flag(name)} {number}: it must be {least} or more")
        for name in ("job_name", "namespace", "secret_name"):
            word = getattr(self, name)
            if word is not None and not (NAME.fullmatch(word) and len(word) <= LONGEST_NAME):
                raise BadRequest(
                    f"{_flag(name)} {word!r} is not a name of Kubernetes: write at most"
                    f" {LONGEST_NAME} small letters, digits and -, a letter first"
                )
        for name in ("cpus", "memory"):
            given = getattr(self, name)
            if given is not None and not QUANTITY.fullmatch(given):
                raise BadRequest(
                    f"{_flag(name)} {given!r} is not a quantity of Kubernetes: write"
                    f" {'2, 1.5 or 500m' if name == 'cpus' else '8Gi or 500Mi'}"
                )
        if self.volume is not None:
            claim, _, path = self.volume.partition(":")
            if not NAME.fullmatch(claim) or not re.fullmatch(r"/[^:\s]+", path):
                raise BadRequest(
                    f"--volume {self.volume!r}: write CLAIM:/PATH, a PersistentVolumeClaim and"
                    " where the pods see it"
                )
        if self.time is not None and not TIME.fullmatch(self.time):
            raise BadRequest(
                f"--time {self.time!r} is not a time limit: write minutes (90), hours (1:30:00) or"
                " days (2-12:00:00)"
            )

    @property
    def tasks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def tasks_per_node(self) -> int:
        return self.ranks_per_node

    def __str__(self) -> str:
        pods = f"{self.nodes} pod{'s' if self.nodes > 1 else ''}"
        ranks = f"{self.ranks_per_node} rank{'s' if self.ranks_per_node > 1 else ''}"
        return f"{pods} with {ranks}{' each' if self.nodes > 1 else ''}"

    @property
    def secret(self) -> str:
        return self.secret_name or f"{self.job_name}-secret"

    def environment(self) -> list[dict[str, Any]]:
        if self.secret_as == "file":
            return [{"name": SECRET_FILE, "value": f"{FOLDER}/{KEY}"}]
        of = {"secretKeyRef": {"name": self.secret, "key": KEY}}
        return [{"name": SECRET, "valueFrom": of}]

    def mounted(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the volumes of a pod, and where its container mounts them."""
        volumes: list[dict[str, Any]] = []
        mounts: list[dict[str, Any]] = []
        if self.secret_as == "file":
            # Only its owner, root, can read the file: Paceline refuses one that others can read.
            of = {"secretName": self.secret, "defaultMode": 0o400, "optional": False}
            volumes.append({"name": "secret", "secret": of})
            mounts.append({"name": "secret", "mountPath": FOLDER, "readOnly": True})
        if self.volume is not None:
            claim, _, path = self.volume.partition(":")
            volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": claim}})
            mounts.append({"name": "shared", "mountPath": path})
        return volumes, mounts

    def resources(self) -> dict[str, Any]:
        """Return limits and requests that are the same, so that a pod gets what it may use."""
        asked = {"cpu": self.cpus, "memory": self.memory}
        asked["nvidia.com/gpu"] = None if self.gpus is None else str(self.gpus)
        given = {name: amount for name, amount in asked.items() if amount is not None}
        return {"requests": given, "limits": given} if given else {}

    def deadline(self) -> dict[str, int]:
        return {} if self.time is None else {"activeDeadlineSeconds": seconds_of(self.time)}


def seconds_of(time: str) -> int:
    """Return the seconds of a time as Slurm writes it: 90 (minutes), 90:00, 1:30:00, 2-12:00:00."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def check_folder(pods: Pods, options: Mapping[str, Any]) -> None:
    """Refuse a run whose folder would be lost with its pod."""
    resume = options.get("resume")
    out = options.get("out") or (resume if resume != AUTO else None)
    if not out:
        raise BadRequest(
            "--out is missing: pods that start again go on with what is in it. Give --out"
            " PATH/run after --, inside --volume CLAIM:PATH"
        )
    if pods.volume is None:
        raise BadRequest(
            f"--out {out} would be lost with its pod: give --volume CLAIM:PATH, a claim that all"
            " pods can write (ReadWriteMany), and a folder inside PATH"
        )
    path = pods.volume.partition(":")[2].rstrip("/")
    if out != path and not out.startswith(f"{path}/"):
        raise BadRequest(f"--out {out} is not inside {path}, where --volume is mounted")


def words_of(command: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return what torchrun starts: `paceline train ... --resume auto`, or the user's script.

    `options`: those of `train`, where it is that.
    """
    if not command:
        raise BadRequest(
            "no command was given: write a script, or train and its options, after the options"
        )
    # Kubernetes would replace $(NAME) by a variable of the container.
    words = [word.replace("$(", "$$(") for word in command]
    if command[0] != "train":
        return words
    again = [] if options.get("resume") else ["--resume", AUTO]
    return ["--no-python", "paceline", *words, *again]


def indexed_job(words: Sequence[str], pods: Pods) -> list[dict[str, Any]]:
    """Return a headless Service, by which pods find pod 0, and a Job whose pods have numbers."""
    name, labels = pods.job_name, {LABEL: pods.job_name}
    arguments = [
        f"--nnodes={pods.nodes}",
        f"--nproc-per-node={pods.ranks_per_node}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",  # which the Job's controller sets
        f"--master-addr={name}-0.{name}",
        f"--master-port={PORT}",
        *words,
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(pods, name),
        "spec": {
            "clusterIP": "None",  # headless: the name of a pod is its address
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "torchrun", "port": PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(pods, name),
        "spec": {
            "completionMode": "Indexed",
            "completions": pods.nodes,
            "parallelism": pods.nodes,
            # One failure ends all pods, and each of them counts.
            "backoffLimit": pods.retries * pods.nodes,
            **pods.deadline(),
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "subdomain": name,
                    **_pod(pods, "OnFailure"),
                    "containers": [_container(pods, "rank", arguments)],
                },
            },
        },
    }
    return [*_secret(pods), service, job]


def train_job(words: Sequence[str], pods: Pods) -> list[dict[str, Any]]:
    """Return a TrainJob and its TrainingRuntime. Kubeflow sets PET_*, which torchrun reads.

    Restarts are a matter of the runtime, so that the job has one of its own.
    """
    name = pods.job_name
    container = _container(pods, "node", [*words])
    mounts = {"volumeMounts": found} if (found := container.pop("volumeMounts", None)) else {}
    runtime = {
        "apiVersion": f"{KUBEFLOW}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**_metadata(pods, name), "labels": {f"{KUBEFLOW}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": pods.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": pods.retries},  # of all pods together
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {
                                    "labels": {f"{KUBEFLOW}/trainjob-ancestor-step": "trainer"}
                                },
                                "spec": {
                                    "backoffLimit": 0,
                                    "template": {
                                        "spec": {
                                            **_pod(pods, "Never"),
                                            "containers": [
                                                {"name": "node", "image": pods.image, **mounts}
                                            ],
                                        }
                                    },
                                },
                            },
                        }
                    ],
                }
            },
        },
    }
    resources = {"resourcesPerNode": of} if (of := pods.resources()) else {}
    job = {
        "apiVersion": f"{KUBEFLOW}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pods, name),
        "spec": {
            "runtimeRef": {"apiGroup": KUBEFLOW, "kind": "TrainingRuntime", "name": name},
            **pods.deadline(),
            "trainer": {
                "image": pods.image,
                "command": container["command"],
                "args": container["args"],
                "env": container["env"],
                "numNodes": pods.nodes,
                "numProcPerNode": pods.ranks_per_node,
                **resources,
            },
        },
    }
    return [*_secret(pods), runtime, job]


def manifest(words: Sequence[str], pods: Pods, kind: Kind, file: str) -> str:
    """Return the text of the file, with a comment that says what it is."""
    if kind == "job":
        documents, what = indexed_job(words, pods), "an indexed Job with a headless Service"
        logs = f"job/{pods.job_name}"
    else:
        documents = train_job(words, pods)
        what = "a TrainJob of Kubeflow Trainer 2 with its runtime"
        logs = f"-l jobset.sigs.k8s.io/jobset-name={pods.job_name}"
    note = NOTE.format(what=what, file=file, logs=logs)
    note += "" if pods.secret_name else NOTE_SECRET
    return note + as_yaml(documents)


def _metadata(pods: Pods, name: str) -> dict[str, Any]:
    where = {} if pods.namespace is None else {"namespace": pods.namespace}
    return {"name": name, **where}


def _secret(pods: Pods) -> list[dict[str, Any]]:
    if pods.secret_name is not None:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": _metadata(pods, pods.secret),
            "type": "Opaque",
            "stringData": {KEY: secrets.token_hex(32)},
        }
    ]


def _pod(pods: Pods, again: str) -> dict[str, Any]:
    volumes, _ = pods.mounted()
    return {
        "restartPolicy": again,
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,  # ranks do not talk to Kubernetes
        **({"volumes": volumes} if volumes else {}),
    }


def _container(pods: Pods, name: str, arguments: list[str]) -> dict[str, Any]:
    _, mounts = pods.mounted()
    resources = {"resources": of} if (of := pods.resources()) else {}
    return {
        "name": name,
        "image": pods.image,
        "command": ["torchrun"],
        "args": arguments,
        "env": pods.environment(),
        **resources,
        **({"volumeMounts": mounts} if mounts else {}),
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
