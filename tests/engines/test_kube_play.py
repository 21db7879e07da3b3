"""The pods of `paceline launch --kubernetes`, run by `podman kube play` in real containers.

Podman 4.3 takes manifests of kind Pod, not of kind Job. So the test does what the controller of an
indexed Job does: it makes a Pod of the template for each index, with its name and its variables.
The image is nearly empty: the pods see this machine's programs through volumes.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.launch.kubernetes import KEY
from tests.commands import PACELINE, ROOT, run
from tests.engines import containers
from tests.engines.engine import needs, same_weights, until, used
from tests.engines.test_kubernetes import (
    LONG,
    OPTIONS,
    SLOW,
    _expanded,
    in_the_middle,
    reference,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
INSTALL = "apt-get install podman runc iptables netavark aardvark-dns"
STORE = containers.home() / "kube-play"


class Podman:
    """Podman with settings, images and a network of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, f"pl-{uuid.uuid4().hex[:8]}"
        self.env = {**os.environ, **containers.settings(STORE)}
        self.image = f"localhost/{self.name}"
        self.network = f"{self.name}-net"

    def __call__(self, *words: str, check: bool = True, **more: Any) -> str:
        done = subprocess.run(
            ["podman", *words],
            env=self.env, capture_output=True, text=True, timeout=120, check=False, **more,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"podman {words}: {done.stderr}"
        return done.stdout + done.stderr

    def start(self) -> None:
        root = self.folder / "root"
        for name in ("proc", "sys", "dev", "tmp", "run", "etc", "usr"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            (root / name).symlink_to(f"usr/{name}")
        packed = subprocess.run(
            ["tar", "-C", str(root), "-c", "."], check=True, capture_output=True
        ).stdout
        (self.folder / "root.tar").write_bytes(packed)
        self("import", str(self.folder / "root.tar"), self.image)
        self("network", "create", self.network)

    def end(self) -> None:
        for path in self.folder.glob("pod-*.yaml"):
            self("kube", "down", str(path), check=False)
        self("network", "rm", "-f", self.network, check=False)
        self("volume", "rm", "-f", self.name, check=False)
        self("secret", "rm", f"{self.name}-secret", check=False)
        self("rmi", "-a", "-f", check=False)


@pytest.fixture
def podman(tmp_path: Path) -> Iterator[Podman]:
    needs("Podman", ("podman", "runc", "iptables"), INSTALL, root=True)
    with containers.alone(STORE):
        made = Podman(tmp_path)
        used("kube_play", made("--version"))
        try:
            made.start()
            yield made
        finally:
            made.end()


def pods_of(job: dict[str, Any], mounted: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the pods that the controller of an indexed Job makes, with this machine's programs."""
    name = job["metadata"]["name"]
    for index in range(job["spec"]["completions"]):
        template = copy.deepcopy(job["spec"]["template"])
        spec = template["spec"]
        spec |= {"hostname": f"{name}-{index}", "restartPolicy": "Never"}
        [container] = spec["containers"]
        known = {"JOB_COMPLETION_INDEX": str(index)}
        container["args"] = [_expanded(word, known) for word in container["args"]]
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        known |= {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "HOME": "/tmp"}
        container["env"] += [{"name": key, "value": value} for key, value in known.items()]
        container["imagePullPolicy"] = "Never"
        for number, folder in enumerate(mounted):
            volume = f"host-{number}"
            spec.setdefault("volumes", []).append({"name": volume, "hostPath": {"path": folder}})
            container["volumeMounts"].append(
                {"name": volume, "mountPath": folder, "readOnly": True}
            )
        meta = {"name": f"{name}-{index}", "labels": template["metadata"]["labels"]}
        yield (
            f"{name}-{index}",
            {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec},
        )


def written(podman: Podman, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Let `paceline launch --kubernetes` write a Job; keep its Secret, and return the Job."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    path = folder / "job.yaml"
    words = ["launch", "--kubernetes", str(path), "--image", podman.image, "--nodes", "2"]
    words += ["--volume", f"{podman.name}:/shared", "--job-name", podman.name]
    # Podman 4.3 does not set the mode of a secret's file, so that Paceline would refuse it.
    words += ["--secret-as", "env", "--", "train", *flags, "--out", "/shared/run"]
    done = run([PACELINE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    secret, _, job = yaml.safe_load_all(path.read_text())
    # Kubernetes keeps it so; Podman 4.3 reads no `stringData`.
    kept = {KEY: base64.b64encode(secret["stringData"][KEY].encode()).decode()}
    podman("secret", "create", secret["metadata"]["name"], "-", input=json.dumps(kept))
    return dict(job)


def play(podman: Podman, job: dict[str, Any], folder: Path) -> list[str]:
    """Start the pods of a Job; return the names of their containers."""
    python = Path(os.path.realpath(sys.executable)).parent.parent
    mounted = ["/usr", str(ROOT), os.path.realpath(sys.prefix), str(python)]
    mounted = [one for one in dict.fromkeys(mounted) if one == "/usr" or not one.startswith("/usr")]
    names = []
    for index, (name, pod) in enumerate(pods_of(job, mounted)):
        names.append(f"{name}-rank")
        path = folder / f"pod-{index}.yaml"
        path.write_text(yaml.safe_dump(pod))
        own = f"{podman.network}:alias={name}.{podman.name}"  # the name of the headless service
        podman("kube", "play", "--network", own, str(path))
    return names


STATE = ("inspect", "--format", "{{.State.Running}} {{.State.ExitCode}}")


def ended(podman: Podman, names: list[str]) -> tuple[list[str], list[str]]:
    """Wait for the end of all containers; return their states and what they printed."""
    try:
        until("both pods end", lambda: all("false" in podman(*STATE, n) for n in names), 420, 2.0)
    finally:
        said = [podman("logs", name, check=False) for name in names]
        print(*said, *(podman(*STATE, name, check=False) for name in names))
    return [podman(*STATE, name).strip() for name in names], said


def exported(podman: Podman, folder: Path) -> dict[str, Any]:
    """Copy the claim's content to `folder`; return the record."""
    podman("volume", "export", podman.name, "--output", str(folder / "out.tar"))
    subprocess.run(["tar", "-C", str(folder), "-xf", str(folder / "out.tar")], check=True)
    found: dict[str, Any] = json.loads((folder / "run" / "run.json").read_text())
    return found


def test_the_pods_of_a_job_train(podman: Podman, tmp_path: Path) -> None:
    job = written(podman, OPTIONS, tmp_path)
    states, said = ended(podman, play(podman, job, tmp_path))
    assert states == ["false 0"] * 2, said
    record = exported(podman, tmp_path)
    assert record["status"] == "completed"
    assert [one["host"] for one in record["workers"]] == [f"{podman.name}-{n}" for n in range(2)]
    assert "record: /shared/run/run.json" in said[0]
    assert same_weights(tmp_path / "run", reference(tmp_path / "alone", OPTIONS))


def test_the_pods_are_stopped_and_played_again(podman: Podman, tmp_path: Path) -> None:
    """Podman, as a kubelet, sends SIGTERM and waits: the run leaves with a checkpoint."""
    job = written(podman, SLOW, tmp_path)
    names = play(podman, job, tmp_path)
    place = podman("volume", "inspect", "--format", "{{.Mountpoint}}", podman.name).strip()
    in_the_middle(Path(place) / "run")
    stops = [subprocess.Popen(["podman", "stop", "--time=60", n], env=podman.env) for n in names]
    assert [stop.wait(90) for stop in stops] == [0, 0]
    states, said = ended(podman, names)
    assert not {"false 0", "false 137"} & set(states), said  # 137: it was killed
    record = exported(podman, tmp_path)
    assert record["status"] == "interrupted", said
    assert 0 < record["result"]["steps"] < SLOW["steps"]
    for path in tmp_path.glob("pod-*.yaml"):
        podman("kube", "down", str(path))
    states, said = ended(podman, play(podman, job, tmp_path))
    assert states == ["false 0"] * 2, said
    assert "going on from step" in said[0]
    assert exported(podman, tmp_path)["status"] == "completed"
    assert same_weights(tmp_path / "run", reference(tmp_path / "alone", LONG))
