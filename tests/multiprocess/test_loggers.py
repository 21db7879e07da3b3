"""Each logger is tested by reading back what it wrote with the library that reads it.

The packages are extras: `pip install 'paceline[tensorboard,mlflow,wandb]'`. `make test` installs
tensorboard; the tests of the two larger ones are slow tests, and skipped where they are missing.
"""

import importlib
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import make_pairs, small_net

import paceline
from paceline.callbacks import base
from paceline.record.reader import read_events

LOSS, ACCURACY = "train/loss", "test/accuracy"
# Their own and their dependencies' warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _no_reports_about_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages report their own use to their makers, unless they are told not to."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def trained(name: str, **options: Any) -> paceline.Run:
    return paceline.train(
        **{
            "model": small_net,
            "data": (make_pairs(60), make_pairs(20, seed=1)),
            "transport": "inproc",
            "memory_format": "contiguous",
            "batch_size": 4,
            "workers": 2,
            "steps": 6,
            "evaluate_every": "3",
            "lr": 0.125,
            "callbacks": name,
            "out": "run",
            "progress": False,
            **options,
        }
    )


def recorded(kind: str, field: str) -> dict[int, float]:
    events = read_events(Path("run/events/worker-0.jsonl"))
    return {e["step"]: e[field] for e in events if e["kind"] == kind}


def fails_at(call: int) -> Any:
    calls: list[int] = []

    def loss(outputs: Any, targets: Any) -> Any:
        import torch

        calls.append(1)
        if len(calls) >= call:
            raise RuntimeError("no loss")
        return torch.nn.functional.cross_entropy(outputs, targets)

    return loss


PRIVATE = {"privacy": "noise=1.0,delta=1e-5,clip=1.0"}


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_extra_is_told_before_a_worker_starts(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(base, "find_spec", lambda m: None if m == module else found("json"))
    with pytest.raises(paceline.BadRequest) as refused:
        trained(name)
    install = f"pip install 'paceline[{name}]'"
    assert str(refused.value) == f"callback {name} needs the package {module}: {install}"
    assert not Path("run").exists()


# --- TensorBoard


def scalars_of(folder: str) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(folder, size_guidance={"scalars": 0})
    read.Reload()
    return {name: {e.step: e.value for e in read.Scalars(name)} for name in read.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written() -> None:
    pytest.importorskip("tensorboard")
    run = trained("tensorboard:folder=tb")
    found = scalars_of("run/tb")
    assert found[LOSS] == pytest.approx(recorded("step", "loss"))
    assert found[ACCURACY] == pytest.approx(recorded("evaluation", "accuracy"))
    assert found[ACCURACY][6] == pytest.approx(run.test_accuracy)
    assert found["time/train_s"][6] == pytest.approx(recorded("step", "train_s")[6])
    assert run.record["config"]["callbacks"] == ["tensorboard:folder=tb"]
    assert threading.active_count() == 1


def test_tensorboard_forgets_what_a_resume_has_undone() -> None:
    pytest.importorskip("tensorboard")
    # At its fourth call worker 0 has made more steps than the checkpoint has.
    with pytest.raises(paceline.PacelineError, match="no loss"):
        trained("tensorboard", checkpoint_every="2", loss=fails_at(9), workers=1)
    before = scalars_of("run/tensorboard")[LOSS]
    trained("tensorboard", resume="run", lr=0.5, loss="cross-entropy", workers=1)
    found = scalars_of("run/tensorboard")[LOSS]
    assert found == pytest.approx(recorded("step", "loss"))
    assert [*found] == [1, 2, 3, 4, 5, 6]
    assert before[1] == found[1]


def test_tensorboard_of_a_private_run_has_no_loss() -> None:
    pytest.importorskip("tensorboard")
    trained("tensorboard", **PRIVATE)
    found = scalars_of("run/tensorboard")
    assert LOSS not in found
    assert len(found["time/train_s"]) == 6


# --- MLflow


def history(uri: str) -> tuple[Any, dict[str, dict[int, float]]]:
    """The only run of the experiment, and all its metrics."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    metrics = {
        name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }
    return run, metrics


@pytest.mark.slow
@pytest.mark.native_threads
@pytest.mark.parametrize("given", ["", "MLFLOW_TRACKING_URI"])
def test_mlflow_reads_what_was_written(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{Path('elsewhere.db' if given else 'run/mlflow.db').resolve()}"
    if given:
        monkeypatch.setenv(given, uri)
    run = trained("mlflow")
    assert Path("run/mlflow.db").exists() == (not given)
    logged, metrics = history(uri)
    assert metrics[LOSS] == recorded("step", "loss")
    assert metrics[ACCURACY] == recorded("evaluation", "accuracy")
    assert metrics["run/samples_per_s"] == {6: run.samples_per_s}
    assert logged.info.status == "FINISHED"
    assert (logged.data.params["lr"], logged.data.params["strategy"]) == ("0.125", "allreduce")


@pytest.mark.slow
@pytest.mark.native_threads
def test_mlflow_of_a_private_and_of_a_failed_run() -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    trained("mlflow", **PRIVATE)
    _, metrics = history(f"sqlite:///{Path('run/mlflow.db').resolve()}")
    assert LOSS not in metrics
    assert len(metrics["time/train_s"]) == 6
    with pytest.raises(paceline.PacelineError, match="no loss"):
        trained("mlflow", loss=fails_at(6), out="failed")
    logged, _ = history(f"sqlite:///{Path('failed/mlflow.db').resolve()}")
    assert logged.info.status == "FAILED"


# --- Weights & Biases


def wandb_records(folder: Path) -> list[Any]:
    """The records of the only offline run.

    The file is a log in LevelDB's format: blocks of 32 KiB, in which each piece of a record has
    its checksum, its length and its kind (1: whole, 2: first, 3: middle, 4: last).
    """
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("offline-run-*/run-*.wandb")
    content, block = path.read_bytes(), 32768
    assert content[:4] == b":W&B"
    at, whole, found = 7, b"", []
    while at + 7 <= len(content):
        left = block - at % block
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return found


def wandb_history(records: list[Any]) -> dict[int, dict[str, str]]:
    rows: dict[int, dict[str, str]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
            rows.setdefault(int(row["_step"]), {}).update(row)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_wandb_offline_holds_what_was_written(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in [n for n in sys.modules if n.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    if fails:
        with pytest.raises(paceline.PacelineError, match="no loss"):
            trained("wandb:project=mine", loss=fails_at(20), workers=1, steps=50)
    else:
        trained("wandb:project=mine")
    assert psutil.Process().children(recursive=True) == [], "its process has ended"
    records = wandb_records(Path("run/wandb"))
    rows, losses = wandb_history(records), recorded("step", "loss")
    assert {s: float(row[LOSS]) for s, row in rows.items()} == losses
    accuracy = {s: float(row[ACCURACY]) for s, row in rows.items() if ACCURACY in row}
    assert accuracy == recorded("evaluation", "accuracy")
    times = {s: float(row["_timestamp"]) for s, row in rows.items()}
    assert set(times.values()) <= {
        *recorded("step", "t").values(),
        *recorded("evaluation", "t").values(),
    }
    (begun,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    (ended,) = [r.exit for r in records if r.WhichOneof("record_type") == "exit"]
    config = {item.key: item.value_json for item in begun.config.update}
    assert (begun.project, config["lr"], config["workers"]) == ("mine", "0.125", "12"[fails - 1])
    assert ended.exit_code == fails


@pytest.mark.slow
def test_wandb_of_a_private_run_has_no_loss_and_its_mode_is_obeyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb")
    trained("wandb", **PRIVATE)
    rows = wandb_history(wandb_records(Path("run/wandb")))
    assert [LOSS in row for row in rows.values()] == [False] * 6
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    trained("wandb", out="disabled")
    assert not Path("disabled/wandb").exists()
    wandb.teardown()
