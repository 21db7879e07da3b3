"""Manifests for Kubernetes: what is written and refused, and the schemas of the real thing."""

import importlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.cli.launch import launch
from paceline.common.yaml import as_yaml
from paceline.errors import BadRequest, on_the_command_line
from paceline.launch.kubernetes import Pods, indexed_job, seconds_of, train_job, words_of
from paceline.launch.secret import secret_of

IMAGE = ["--image", "registry.example/paceline:1"]
TRAIN = ["train", "--strategy", "allreduce", "--data", "fashion-mini", "--out", "/shared/run"]
VOLUME = ["--volume", "data:/shared"]
EVERYTHING = {
    "nodes": 2,
    "ranks_per_node": 4,
    "job_name": "mnist",
    "namespace": "team-a",
    "cpus": "1.5",
    "memory": "8Gi",
    "gpus": 1,
    "volume": "data:/shared",
    "retries": 5,
    "time": "1:30:00",
}


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    with on_the_command_line():
        yield


def call(*words: str) -> str:
    return (
        CliRunner()
        .invoke(launch, list(words), catch_exceptions=False, standalone_mode=False)
        .output
    )


def installed(module: str, package: str) -> Any:
    """A package that only these tests use; skip where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        pytest.skip(f"pip install {package}")


def kinds(documents: list[dict[str, Any]]) -> list[str]:
    return [one["kind"] for one in documents]


# --- what is written


def test_an_indexed_job_with_a_headless_service() -> None:
    pods = Pods("i", **EVERYTHING)
    secret, service, job = indexed_job(words_of(TRAIN, {"out": "/shared/run"}), pods)
    assert kinds([secret, service, job]) == ["Secret", "Service", "Job"]
    assert {one["metadata"]["namespace"] for one in (secret, service, job)} == {"team-a"}
    assert service["spec"]["clusterIP"] == "None"
    spec, template = job["spec"], job["spec"]["template"]
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (10, 5400)
    pod = template["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"] == "mnist"
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("OnFailure", False)
    [container] = pod["containers"]
    assert container["command"] == ["torchrun"]
    assert container["args"] == [
        "--nnodes=2",
        "--nproc-per-node=4",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=mnist-0.mnist",
        "--master-port=29500",
        "--no-python",
        "paceline",
        *TRAIN,
        "--resume",
        "auto",
    ]
    asked = {"cpu": "1.5", "memory": "8Gi", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"requests": asked, "limits": asked}
    assert [(v["name"], *v) for v in pod["volumes"]] == [
        ("secret", "name", "secret"),
        ("shared", "name", "persistentVolumeClaim"),
    ]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "data"}
    assert container["volumeMounts"][1] == {"name": "shared", "mountPath": "/shared"}


def test_the_secret_is_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    secret, _, job = indexed_job(["a.py"], Pods("i"))
    [pod] = [job["spec"]["template"]["spec"]]
    [container] = pod["containers"]
    [volume], [mount] = pod["volumes"], container["volumeMounts"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"] == "paceline-secret"
    mode = volume["secret"]["defaultMode"]
    assert mode & 0o077 == 0
    [(key, value)] = secret["stringData"].items()
    [variable] = container["env"]
    assert variable == {"name": "PACELINE_SECRET_FILE", "value": f"{mount['mountPath']}/{key}"}
    # what a rank reads, as the kubelet mounts it
    file = tmp_path / key
    file.write_text(value)
    file.chmod(mode)
    assert secret_of({"PACELINE_SECRET_FILE": str(file)}) == value.encode()
    assert indexed_job(["a.py"], Pods("i"))[0]["stringData"] != secret["stringData"]


def test_a_secret_that_exists_or_as_a_variable() -> None:
    pods = Pods("i", secret_name="mine", secret_as="env")
    service, job = indexed_job(["a.py"], pods)
    assert kinds([service, job]) == ["Service", "Job"]
    pod = job["spec"]["template"]["spec"]
    assert "volumes" not in pod
    [variable] = pod["containers"][0]["env"]
    assert variable == {
        "name": "PACELINE_SECRET",
        "valueFrom": {"secretKeyRef": {"name": "mine", "key": "secret"}},
    }
    written = indexed_job(["a.py"], Pods("i", secret_as="env"))[0]["stringData"]["secret"]
    assert secret_of({"PACELINE_SECRET": written}) == bytes.fromhex(written)


def test_a_train_job_leaves_its_ranks_to_kubeflow() -> None:
    pods = Pods("i", **EVERYTHING)
    secret, runtime, job = train_job(words_of(TRAIN, {"out": "/shared/run"}), pods)
    assert kinds([secret, runtime, job]) == ["Secret", "TrainingRuntime", "TrainJob"]
    trainer, spec = job["spec"]["trainer"], job["spec"]
    assert spec["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"] == ["torchrun"]
    assert trainer["args"] == ["--no-python", "paceline", *TRAIN, "--resume", "auto"]
    assert [one["name"] for one in trainer["env"]] == ["PACELINE_SECRET_FILE"], "PET_* are its own"
    inside = runtime["spec"]["template"]["spec"]
    assert inside["failurePolicy"] == {"maxRestarts": 5}
    [replicated] = inside["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert [c["name"] for c in pod["containers"]] == ["node"]
    assert [m["name"] for m in pod["containers"][0]["volumeMounts"]] == ["secret", "shared"]


def test_what_kubernetes_would_replace_is_escaped() -> None:
    assert words_of(["a.py", "$(HOME)/x", "$y"], {}) == ["a.py", "$$(HOME)/x", "$y"]
    assert words_of(["train", "--out", "o"], {"resume": "auto"})[-2:] == ["--out", "o"]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-12", 216000), ("1-0:00:05", 86405)],
)
def test_times(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_the_file_says_what_it_is_and_is_private(tmp_path: Path, kind: str) -> None:
    said = call("--kubernetes", "j.yaml", "--kind", kind, *IMAGE, *VOLUME, "--nodes", "2", "--",
                *TRAIN)  # fmt: skip
    assert said == (
        "j.yaml: 2 pods with 1 rank each. It was not run on a cluster."
        " Next: kubectl apply -f j.yaml\n"
    )
    text = (tmp_path / "j.yaml").read_text()
    assert "It has NOT been run on a cluster" in text
    assert "Do not publish this file" in text
    assert stat.S_IMODE((tmp_path / "j.yaml").stat().st_mode) == 0o600
    with pytest.raises(BadRequest, match=r"j.yaml exists already"):
        call("--kubernetes", "j.yaml", *IMAGE, "a.py")
    printed = call("--kubernetes", "-", *IMAGE, "--secret-name", "mine", "--force", "a.py", "--x")
    assert "Do not publish" not in printed
    assert "stringData" not in printed
    assert printed.rstrip().splitlines()[-1].strip().startswith("readOnly")


# --- what is refused


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a.py"], "--kubernetes needs --image IMAGE: a container image that has Paceline"),
        (["--image", "a b", "a.py"], "--image 'a b': name a container image"),
        ([*IMAGE, "--nodes", "0", "a.py"], "--nodes 0: it must be 1 or more"),
        ([*IMAGE, "--ranks-per-node", "0", "a.py"], "--ranks-per-node 0: it must be 1 or more"),
        ([*IMAGE, "--gpus", "-1", "a.py"], "--gpus -1: it must be 1 or more"),
        ([*IMAGE, "--retries", "-1", "a.py"], "--retries -1: it must be 0 or more"),
        ([*IMAGE, "--job-name", "My_Job", "a.py"], "--job-name 'My_Job' is not a name of Kube"),
        ([*IMAGE, "--job-name", "a" * 46, "a.py"], "write at most 45 small letters"),
        ([*IMAGE, "--namespace", "A", "a.py"], "--namespace 'A' is not a name"),
        ([*IMAGE, "--secret-name", "a.b", "a.py"], "--secret-name 'a.b' is not a name"),
        ([*IMAGE, "--cpus", "two", "a.py"], "--cpus 'two' is not a quantity .* write 2, 1.5 or"),
        ([*IMAGE, "--memory", "8GB", "a.py"], "--memory '8GB' is not a quantity .* write 8Gi"),
        ([*IMAGE, "--volume", "data", "a.py"], "--volume 'data': write CLAIM:/PATH"),
        ([*IMAGE, "--volume", "data:shared", "a.py"], "--volume 'data:shared': write CLAIM:/PATH"),
        ([*IMAGE, "--time", "soon", "a.py"], "--time 'soon' is not a time limit: write minutes"),
        ([*IMAGE, "-n", "2", "a.py"], "--ranks is not for Kubernetes: .* give --nodes and"),
        ([*IMAGE, "--partition", "p", "a.py"], "--partition is not for Kubernetes: .* --namespace"),
        ([*IMAGE, "--slurm", "j.sh", "a.py"], "--slurm and --kubernetes are two clusters"),
        ([*IMAGE, *VOLUME, "--", "train", "--strategy", "ddp"], "--out is missing: pods that st"),
        ([*IMAGE, "--", *TRAIN], "--out /shared/run would be lost with its pod: give --volume"),
        (
            [*IMAGE, "--volume", "data:/share", "--", *TRAIN],
            "--out /shared/run is not inside /share, where --volume is mounted",
        ),
        (
            [*IMAGE, *VOLUME, "--nodes", "2", "--", *TRAIN, "--workers", "3"],
            "--workers 3, but 2 pods with 1 rank each are 2 processes: leave --workers out",
        ),
        ([*IMAGE, *VOLUME, "--", *TRAIN, "--strategy", "ps"], "Kubernetes has started 1 process"),
        ([*IMAGE, *VOLUME, "--nodes", "2", "--", *TRAIN, "--lr", "fast"], "lr"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        call("--kubernetes", "j.yaml", *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--image", "--cpus", "--volume", "--retries", "--namespace"])
def test_options_of_kubernetes_need_kubernetes(option: str) -> None:
    for slurm in ([], ["--slurm", "-"]):
        with pytest.raises(BadRequest, match=f"{option} is for Kubernetes: add --kubernetes FILE"):
            call(*slurm, option, "1", "train.py")


# --- the text


AWKWARD = [
    "", "a b", "yes", "No", "null", "1", "1.5", "-x", "--x=1", "a: b", "a #b", "'", '"', "\\", "\n",
    "\t", "é", "😀", "\x7f", "\u2028", "$(X)", "{}", "[a]", "*a", "&a", "!a", "|", "%", "@", "`",
    "~", "0x1f", "1e3", "12:30:45", "2026-11-18", "=", "<<", "?", "- a", "/a/b", "a:1", "true",
]  # fmt: skip


def test_yaml_of_plain_data() -> None:
    text = as_yaml([{"a": 1, "b": [{"c": "d e", "f": True}, "x"]}, {"g": {}, "h": [], "i": None}])
    assert text == ('a: 1\nb:\n  - c: "d e"\n    f: true\n  - x\n---\ng: {}\nh: []\ni: null\n')


def test_a_real_reader_reads_what_was_meant() -> None:
    yaml = installed("yaml", "pyyaml")
    documents = [{"list": AWKWARD, "no": {word: word for word in AWKWARD}}, {"a": [[1, [2]], []]}]
    assert list(yaml.safe_load_all(as_yaml(documents))) == documents


# --- the schemas of Kubernetes and Kubeflow


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("more", [{}, EVERYTHING, {"secret_name": "mine", "secret_as": "env"}])
def test_kubernetes_takes_the_job(more: dict[str, Any], version: str) -> None:
    validate = installed("kubernetes_validate", "kubernetes-validate")
    yaml = installed("yaml", "pyyaml")
    text = as_yaml(indexed_job(words_of(TRAIN, {}), Pods("registry.example/p:1", **more)))
    documents = list(yaml.safe_load_all(text))
    assert "Job" in kinds(documents)
    for document in documents:
        validate.validate(document, version, strict=True)
    documents[-1]["spec"]["completion"] = 2
    with pytest.raises(validate.ValidationError):
        validate.validate(documents[-1], version, strict=True)


@pytest.mark.parametrize("more", [{}, EVERYTHING, {"secret_name": "mine", "secret_as": "env"}])
def test_kubeflow_takes_the_train_job(more: dict[str, Any]) -> None:
    """Its models ignore what they do not know, so that they must give back what they were given."""
    models = installed("kubeflow_trainer_api.models", "kubeflow-trainer-api")
    documents = train_job(words_of(TRAIN, {}), Pods("registry.example/p:1", **more))
    runtime, job = (json.loads(json.dumps(one)) for one in documents[-2:])
    assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    job["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        models.TrainerV1alpha1TrainJob.from_dict(job)
