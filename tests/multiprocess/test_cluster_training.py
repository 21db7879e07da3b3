"""A real Spark cluster of three workers, from the table to the model, as a person would type it:
`make test-slow`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.data.fetch import fetch
from paceline.errors import DataUnavailable
from paceline.spark.java import pyspark_missing
from paceline.spark.standalone import Cluster, standing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(pyspark_missing() is not None, reason=str(pyspark_missing())),
]
PACELINE = str(Path(sys.executable).with_name("paceline"))
HERE = Path(__file__).parent.parent.parent / "data"


def paceline(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [PACELINE, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def data_dir(name: str) -> Path:
    """The data set, from where it was fetched before, or fetched now."""
    folder = HERE if (HERE / name).is_dir() else Path("fetched")
    try:
        fetch(name, folder)
    except DataUnavailable as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    paceline("cluster", "up", "--workers", "3", "--memory", "1g")
    found = standing()
    assert found is not None
    yield found
    paceline("cluster", "down")
    assert found.processes() == []


def test_flights_through_a_lost_executor(cluster: Cluster, tmp_path: Path) -> None:
    """Prepared on the cluster, trained on it by three ranks; an executor is killed in the middle,
    and it ends as it should.
    """
    flights = data_dir("flights")
    paceline(
        "prepare",
        "flights",
        "--data-dir",
        str(flights),
        "--engine",
        "spark",
        "--master",
        cluster.master,
        "--out",
        "late",
    )
    manifest = json.loads(Path("late/manifest.json").read_text())
    assert manifest["engine"] == "spark"
    assert manifest["rows"]["train"] + manifest["rows"]["test"] == 327_346
    assert {s["host"] for s in manifest["shards"]} == {os.uname().nodename}
    line = [
        "train",
        "--data",
        "shards:late",
        "--model",
        "mlp:hidden=64",
        "--metric",
        "auc",
        "--optimizer",
        "adam",
    ]
    line += [
        "--lr",
        "0.001",
        "--batch-size",
        "128",
        "--epochs",
        "2",
        "--checkpoint-every",
        "150",
        "--strategy",
        "allreduce",
    ]
    line += ["--launcher", "spark", "--master", cluster.master, "--workers", "3", "--out", "run"]
    with open("said", "w") as said:
        process = subprocess.Popen([PACELINE, *line], stdout=said, stderr=said)
        try:
            until = time.monotonic() + 300
            while (
                not list(Path("run/checkpoints").glob("step-*"))
                and process.poll() is None
                and time.monotonic() < until
            ):
                time.sleep(0.1)
            victims = cluster.executors()
            assert len(victims) == 3
            victims[1].kill()
            code = process.wait(500)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(30)
    text = Path("said").read_text()
    assert code == 0, text[-3000:]
    assert "going on from step-" in text
    record: dict[str, Any] = json.loads(Path("run/run.json").read_text())
    assert record["status"] == "completed"
    assert record["attempts"] == 2
    assert record["config"]["launcher"] == "spark"
    # every row once per epoch, in spite of it
    assert record["result"]["samples"] == 2 * manifest["rows"]["train"]
    assert record["result"]["metric"]["value"] >= 0.70
    assert all(
        address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for _, address, _ in cluster.listening()
    )


def test_people_prepared_by_spark_and_trained_in_private_over_mpi(
    cluster: Cluster, tmp_path: Path
) -> None:
    """From the census table to a private model, in one report: AUC, epsilon, the time of each
    stage.
    """
    adult = data_dir("adult")
    paceline(
        "prepare",
        "adult",
        "--data-dir",
        str(adult),
        "--engine",
        "spark",
        "--master",
        cluster.master,
        "--out",
        "people",
    )
    paceline("cluster", "down")
    said = paceline(
        "train", "--data", "shards:people", "--model", "mlp:hidden=32", "--metric", "auc",
        "--transport", "mpi", "--workers", "3", "--strategy", "allreduce",
        "--privacy", "epsilon=3,delta=1e-5,clip=1.0", "--batch-size", "128", "--lr", "0.5",
        "--optimizer", "sgd",
        "--epochs", "3", "--out", "run",
    ).stderr  # fmt: skip
    assert "hold exact counts" in said
    record = json.loads(Path("run/run.json").read_text())
    assert record["privacy"]["epsilon"] <= 3.0
    assert record["result"]["metric"]["value"] > 0.85
    assert set(record["data"]["seconds"]) == {"start", "read", "count", "write"}
    assert "report" not in record["data"]  # exact counts are no part of a private record
    paceline("report", "run", "--no-figures")
    page = Path("run/report.html").read_text()
    for words in (
        "From the table to the model",
        "starting the engine",
        "What privacy promises",
        "auc 0.",
    ):
        assert words in page
