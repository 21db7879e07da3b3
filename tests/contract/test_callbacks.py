"""Callbacks see what worker 0 records, in order, and a callback that raises ends the run."""

import csv
import json
import sqlite3
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import identical, make_pairs

import paceline
from paceline.callbacks import scalars
from paceline.cli.main import cli
from paceline.errors import UnknownName
from paceline.launch import callbacks as calling
from paceline.record.reader import read_events
from paceline.registry import callbacks, strategies
from paceline.strategies.base import traits_of


class Keep(paceline.Callback):
    """Keeps everything that it is called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.threads: set[int] = set()

    def on_start(self, run: Any) -> None:
        self.note("start", run)

    def on_step(self, event: Any) -> None:
        self.note("step", event)

    def on_evaluation(self, event: Any) -> None:
        self.note("evaluation", event)

    def on_checkpoint(self, event: Any) -> None:
        self.note("checkpoint", event)

    def on_end(self, run: Any) -> None:
        self.note("end", run)

    def note(self, kind: str, content: Any) -> None:
        self.seen.append((kind, content))
        self.threads.add(threading.get_ident())

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.seen]

    def of(self, kind: str) -> list[Any]:
        return [content for found, content in self.seen if found == kind]


class Raises(Keep):
    """Raises at its `at`-th call of one method."""

    def __init__(self, method: str, at: int = 1, error: BaseException | None = None) -> None:
        super().__init__()
        self.method, self.at = method, at
        self.error = error or ZeroDivisionError("division\nby zero")

    def note(self, kind: str, content: Any) -> None:
        super().note(kind, content)
        if kind == self.method and self.kinds.count(kind) == self.at:
            raise self.error


class Database(paceline.Callback):
    """A logger as people write them: sqlite3 refuses a connection that another thread made."""

    def on_start(self, run: Any) -> None:
        self.connection = sqlite3.connect(run.out / "losses.db")
        self.connection.execute("create table losses (step integer, loss real)")

    def on_step(self, event: Any) -> None:
        self.connection.execute("insert into losses values (?, ?)", (event["step"], event["loss"]))

    def on_end(self, run: Any) -> None:
        self.connection.commit()
        self.connection.close()


def recorded(out: Path, kind: str) -> list[dict[str, Any]]:
    events = read_events(out / "events" / "worker-0.jsonl")
    return [event for event in events if event["kind"] == kind]


ON_THREADS = [e.name for e in strategies if not traits_of(e.make).needs_processes]


@pytest.mark.parametrize("strategy", ON_THREADS)
def test_a_callback_sees_what_worker_0_records(run_inproc, strategy: str) -> None:
    kept = Keep()
    run = run_inproc(
        strategy=strategy,
        workers=1 if strategy == "serial" else 2,
        steps=6,
        evaluate_every="2",
        checkpoint_every="3",
        callbacks=[kept],
    )
    for kind in ("step", "evaluation", "checkpoint"):
        assert kept.of(kind) == recorded(run.out, kind)
    assert kept.kinds[0] == "start"
    assert kept.kinds[-1] == "end"
    assert Counter(kept.kinds)["step"] == 6
    steps = [content["step"] for kind, content in kept.seen[1:-1]]
    assert steps == sorted(steps)
    (begun,), (ended,) = kept.of("start"), kept.of("end")
    assert (begun.out, begun.total_steps, begun.from_step) == (run.out, 6, 0)
    assert begun.config == json.loads((run.out / "config.json").read_text())
    assert begun.config["callbacks"] == ["<Keep>"]
    assert ended.record == run.record
    assert begun.record is None
    assert len(kept.threads) == 1


def test_callbacks_change_nothing_in_the_training(run_inproc) -> None:
    options = {"strategy": "allreduce", "workers": 2, "steps": 8, "evaluate_every": "3"}
    plain, called = (
        run_inproc(**options),
        run_inproc(**options, callbacks=[Keep(), Database, "csv"]),
    )
    assert identical(plain.weights, called.weights)
    assert called.record["config"]["callbacks"] == ["<Keep>", "<Database>", "csv"]
    with sqlite3.connect(called.out / "losses.db") as base:
        losses = [loss for (loss,) in base.execute("select loss from losses order by step")]
    base.close()
    assert losses == [event["loss"] for event in recorded(plain.out, "step")]


def test_an_event_belongs_to_the_callback(run_inproc) -> None:
    class Clears(paceline.Callback):
        def on_step(self, event: Any) -> None:
            event.clear()

    kept = Keep()
    run = run_inproc(steps=2, callbacks=[Clears, kept])
    assert kept.of("step") == recorded(run.out, "step")


@pytest.mark.parametrize(
    ("method", "at"),
    [("start", 1), ("step", 1), ("step", 6), ("evaluation", 1), ("checkpoint", 2), ("end", 1)],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_callback_that_raises_ends_the_run(
    run_inproc, tmp_path: Path, method: str, at: int, workers: int
) -> None:
    wrong, kept = Raises(method, at), Keep()
    with pytest.raises(paceline.BadRequest) as raised:
        run_inproc(
            steps=6,
            workers=workers,
            checkpoint_every="2",
            evaluate_every="2",
            callbacks=[wrong, kept],
            out="run",
        )
    assert str(raised.value) == f"callback Raises.on_{method} raised ZeroDivisionError: division"
    assert raised.value.exit_code == 2
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    record = paceline.Run.open("run").record
    assert record["status"] == ("completed" if method == "end" else "failed")
    assert record["error"] == (None if method == "end" else str(raised.value))
    assert wrong.kinds[-1] == method, "it is not called again"
    assert kept.of("end")[0].record == record
    assert kept.of("step") == recorded(Path("run"), "step")
    if method in ("checkpoint", "end"):
        assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()


def test_a_failed_run_can_be_resumed_without_the_callback(run_inproc) -> None:
    with pytest.raises(paceline.BadRequest, match=r"Raises\.on_step raised SystemExit"):
        run_inproc(
            steps=10**9,
            checkpoint_every="2",
            callbacks=[Raises("step", 2, SystemExit())],
            out="run",
        )
    made = paceline.Run.open("run").steps
    run = run_inproc(steps=made + 2, resume="run", out="run")
    assert (run.record["status"], run.steps) == ("completed", made + 2)


def test_a_resumed_run_calls_with_new_events_only(run_inproc) -> None:
    first, second = Keep(), Keep()
    options = {"checkpoint_every": "2", "out": "run", "evaluate_every": "2"}
    run_inproc(steps=4, callbacks=[first, "csv"], **options)
    with Path("run/events/worker-0.jsonl").open("a") as file:
        file.write('{"kind": "ste')  # the worker was killed while it wrote
    before = rows("run/metrics.csv")
    run_inproc(steps=8, resume="run", callbacks=[second, "csv"], **options)
    assert [event["step"] for event in second.of("step")] == [5, 6, 7, 8]
    assert (second.of("start")[0].from_step, second.of("start")[0].total_steps) == (4, 8)
    after = rows("run/metrics.csv")
    assert after[: len(before)] == before
    assert [int(r["step"]) for r in after if r["kind"] == "step"] == [*range(1, 9)]


def rows(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_names_are_called_again_after_a_resume_and_objects_are_not(
    run_inproc, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Keep()
    run_inproc(steps=4, checkpoint_every="2", callbacks=[kept, "csv:file=t.csv"], out="run")
    seen = len(kept.seen)
    again = run_inproc(steps=6, resume="run", out="run")
    assert again.record["config"]["callbacks"] == ["csv:file=t.csv"]
    assert "callbacks <Keep> were given in Python and are not called" in capsys.readouterr().err
    assert len(kept.seen) == seen
    assert [int(r["step"]) for r in rows("run/t.csv") if r["kind"] == "step"] == [*range(1, 7)]


def fails_at(call: int) -> Any:
    """A loss that raises; its first call tries it out before the run."""
    calls = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) >= call:
            raise RuntimeError("no loss")
        return torch.nn.functional.cross_entropy(outputs, targets)

    return loss


def test_a_run_whose_workers_fail_still_ends_its_callbacks(run_inproc) -> None:
    late, early = Keep(), Keep()
    with pytest.raises(paceline.PacelineError, match="no loss"):
        run_inproc(steps=50, loss=fails_at(5), callbacks=[late])
    assert late.of("end")[0].record["status"] == "failed"
    assert [event["step"] for event in late.of("step")] == [1, 2, 3]
    with pytest.raises(paceline.PacelineError, match="no loss"):
        run_inproc(steps=2, loss=fails_at(1), callbacks=[early])
    assert early.kinds == ["start", "end"]
    assert early.of("start")[0].total_steps is None
    assert "no loss" in early.of("end")[0].record["error"]


def test_a_private_run_shows_what_its_record_holds(run_inproc) -> None:
    kept = Keep()
    run = run_inproc(
        steps=4, privacy="noise=1.0,delta=1e-5,clip=1.0", callbacks=[kept, "csv"], workers=2
    )
    assert [event["loss"] for event in kept.of("step")] == [None] * 4
    table = [row for row in rows(run.out / "metrics.csv") if row["kind"] == "step"]
    assert [row["loss"] for row in table] == [""] * 4
    assert {row["samples"] for row in table} == {str(e["n"]) for e in recorded(run.out, "step")}


def test_the_table_of_csv(run_inproc) -> None:
    run = run_inproc(steps=5, evaluate_every="2", callbacks="csv")
    table, steps = rows(run.out / "metrics.csv"), recorded(run.out, "step")
    assert list(table[0]) == [
        "kind", "step", "epoch", "on", "t", "train_s", "loss", "accuracy", "metric", "value",
        "samples", "compute_s", "sync_s", "sent_bytes", "received_bytes",
    ]  # fmt: skip
    assert [float(r["loss"]) for r in table if r["kind"] == "step"] == [e["loss"] for e in steps]
    evaluated = [r for r in table if r["kind"] == "evaluation"]
    assert [int(r["step"]) for r in evaluated] == [2, 4, 5]
    assert float(evaluated[-1]["accuracy"]) == run.test_accuracy
    assert (evaluated[-1]["metric"], evaluated[-1]["on"]) == ("accuracy", "test")
    run = run_inproc(steps=4, evaluate_every="2", callbacks="csv", validation=0.2)
    evaluated = [r for r in rows(run.out / "metrics.csv") if r["kind"] == "evaluation"]
    assert [r["on"] for r in evaluated] == [e["on"] for e in recorded(run.out, "evaluation")]
    assert {r["on"] for r in evaluated} == {"validation", "test"}


def test_the_names_that_loggers_give(run_inproc) -> None:
    run = run_inproc(steps=4, validation=0.2, ema=0.9)
    on_validation, on_test = recorded(run.out, "evaluation")[-2:]
    found = scalars.of_evaluation(on_validation)
    assert {"validation/loss", "validation/accuracy", "validation-ema/loss"} <= {*found}
    assert len(found) == 2 * (1 + len(on_validation["metrics"]))
    assert scalars.of_evaluation(on_test)["test/accuracy"] == run.test_accuracy


def test_a_callback_that_hangs_is_named_and_left_alone(
    run_inproc, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calling, "END_S", 0.05)
    released = threading.Event()

    class Hangs(Keep):
        def on_end(self, run: Any) -> None:
            released.wait(60)

    with pytest.raises(paceline.PacelineError, match="no loss"):
        run_inproc(steps=50, loss=fails_at(4), callbacks=[Hangs], deadline_s=0.01)
    said = capsys.readouterr().err
    released.set()
    assert "waiting for callback" in said
    assert "Hangs.on_end did not return within 0.05 s: the run has ended without it" in said


def test_a_callback_that_is_behind_gets_its_end_after_a_failure(
    run_inproc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "END_S", 0.2)

    class Slow(Keep):
        def on_step(self, event: Any) -> None:
            super().on_step(event)
            threading.Event().wait(0.05)

    slow = Slow()
    with pytest.raises(paceline.PacelineError, match="no loss"):
        run_inproc(
            steps=200,
            loss=fails_at(100),
            callbacks=[slow],
            evaluate_every="1000",
            data=make_pairs(60),
        )
    assert slow.kinds[-1] == "end"
    assert 1 <= len(slow.of("step")) < 98


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "callbacks: 7 is not a callback: give a name"),
        ([print], "is not a callback: give a name"),
        ([dict], "is not a callback: give a name"),
        (["csv", "csv"], "callbacks: csv is given twice"),
        (["csv:fiel=x"], "callback 'csv' has no option 'fiel'. Did you mean 'file'"),
        ([Raises], r"callback Raises cannot be made without arguments: give an object of it"),
        (["json:loads"], "cannot be made"),
        (["collections:Counter"], "is a Counter, not a paceline.Callback"),
    ],
)
def test_what_is_no_callback_is_refused(run_inproc, given: Any, message: str) -> None:
    with pytest.raises(paceline.BadRequest, match=message):
        run_inproc(steps=1, callbacks=given, out="run")
    assert not Path("run").exists()


def test_an_unknown_name_is_answered_with_the_nearest(run_inproc) -> None:
    with pytest.raises(UnknownName, match=r"unknown callback 'cvs'\. Did you mean 'csv'"):
        run_inproc(callbacks="cvs")


def test_a_name_of_a_module_and_a_registered_class(run_inproc) -> None:
    Path("mine.py").write_text(
        "import paceline\n"
        "class Count(paceline.Callback):\n"
        "    def __init__(self, start: int = 0): self.count = start\n"
        "    def on_start(self, run): self.out = run.out\n"
        "    def on_step(self, event): self.count += 1\n"
        "    def on_end(self, run): (run.out / 'count').write_text(str(self.count))\n"
    )
    run = run_inproc(steps=3, callbacks=["mine:Count:start=10"])
    assert (run.out / "count").read_text() == "13"
    assert run.record["config"]["callbacks"] == ["mine:Count:start=10"]
    callbacks.register("keep-all")(Keep)
    assert run_inproc(steps=1, callbacks=[{"name": "keep-all"}]).steps == 1


def test_objects_are_refused_where_spark_starts_worker_0(run_inproc) -> None:
    with pytest.raises(paceline.BadRequest, match="<Keep> cannot be called with launcher=spark"):
        run_inproc(callbacks=[Keep()], launcher="spark")


def test_help_and_list_name_the_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["list", "callbacks", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["csv"]["options"]["file"]["default"] == "metrics.csv"
    assert [*found] == callbacks.names()
