"""`join(out=DIR)`: the record of a loop of the user's own is that of `train`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_own_code import made
from tests.small import identical, make_pairs, small_net
from torch import Tensor, nn

import paceline
from paceline.errors import BadRequest
from paceline.record.reader import read_run, read_worker_events
from paceline.registry import strategies
from paceline.report.command import command_of
from paceline.report.reading import read_study
from paceline.run.loop.conclusion import Conclusion, collect
from paceline.run.loop.record import Recorded
from paceline.run.own_loop import Pace
from paceline.strategies.base import traits_of
from paceline.transport.inproc import Hub
from paceline.transport.metered import Metered
from paceline.watch.run import RunView

cross_entropy = nn.functional.cross_entropy
Body = Callable[[Pace], Any]


def on_recorded_paces(workers: int, body: Body, out: Path, strategy: str = "allreduce") -> None:
    """`body(pace)` on every rank of an in-process line, with a record in `out`."""
    known = {"strategy": strategy, "workers": workers, "codec": "none", "seed": 0}

    def on_rank(line: Any) -> None:
        record = Recorded(line, Conclusion(out, known, "paceline launch script.py", line.rank))
        body(Pace(strategies.build(strategy), line, workers, "none", 0, 0, record=record))

    for result in Hub(workers).run(on_rank):
        if isinstance(result, BaseException):
            raise result


def losses_of(out: Path, rank: int = 0) -> list[float | None]:
    return [e["loss"] for e in read_worker_events(out)[rank] if e["kind"] == "step"]


def kinds_of(out: Path, rank: int = 0) -> list[str]:
    return [e["kind"] for e in read_worker_events(out)[rank]]


def steps(pace: Pace, model: nn.Module, batches: Any) -> None:
    for x, y in batches:
        pace.step(cross_entropy(model(x), y))


# --- what is in it


@pytest.mark.parametrize("strategy", ["allreduce", "ring-reduce:exchange=gradients"])
@pytest.mark.parametrize("workers", [2, 3])
def test_steps_samples_and_bytes(strategy: str, workers: int, tmp_path: Path) -> None:
    """42 rows in steps of 4 per worker, two passes: the last step of a pass is smaller."""
    trained: dict[str, Tensor] = {}

    def body(pace: Pace) -> None:
        model, optimizer = made(small_net)
        model, optimizer, batches = pace.prepare(model, optimizer, make_pairs(42), batch_size=4)
        for _ in range(2):
            steps(pace, model, batches)
            with pace.consensus():
                correct = 0.25 + pace.epoch / 4
            pace.evaluated(accuracy=correct, loss=1 / pace.epoch)
        pace.save(tmp_path)
        pace.finish()
        if pace.leads:
            trained.update(model.state_dict())

    on_recorded_paces(workers, body, tmp_path, strategy)
    run = paceline.Run.open(tmp_path)
    result = run.record["result"]
    per_epoch = -(-42 // (4 * workers))
    assert (run.record["status"], result["steps"]) == ("completed", 2 * per_epoch)
    assert result["samples"] == 2 * 42 == sum(w["samples"] for w in run.record["workers"])
    assert (result["test_accuracy"], result["test_loss"]) == (0.75, 0.5)
    assert identical(run.weights, trained)
    # An all-reduce moves 2 (P - 1) times the buffer, over all ranks.
    numbers = sum(w.numel() for w in trained.values())
    for way in ("sent", "received"):
        moved = sum(w[f"payload_{way}_bytes"] for w in run.record["workers"])
        assert moved == 2 * per_epoch * 2 * (workers - 1) * 4 * numbers
    config = run.record["config"]
    assert (config["model"], config["optimizer"], config["lr"]) == ("Sequential", "SGD", 0.1)
    assert (config["data"], config["batch_sizes"]) == ("tensors", [4] * workers)
    assert {"epochs", "until_accuracy", "profile"} <= {k for k, v in config.items() if v is None}
    assert {"start", "sample", "evaluation", "checkpoint", "summary"} <= set(kinds_of(tmp_path))
    assert "evaluation" not in kinds_of(tmp_path, rank=1)
    assert json.loads((tmp_path / "config.json").read_text()).items() <= config.items()
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > per_epoch


def in_process() -> list[str]:
    """The strategies of several workers that need neither servers nor torch.distributed."""
    found = {name: traits_of(strategies.entry(name).make) for name in strategies.names()}
    return [n for n, t in found.items() if not t.serves and t.flat and t.most_workers is None]


@pytest.mark.parametrize("strategy", in_process())
def test_every_strategy_leaves_a_record(strategy: str, tmp_path: Path) -> None:
    def body(pace: Pace) -> None:
        model, _, batches = pace.prepare(*made(small_net), make_pairs(24), batch_size=4)
        for _ in range(2):
            steps(pace, model, batches)
            pace.save(tmp_path)
        pace.finish()

    on_recorded_paces(3, body, tmp_path, strategy)
    record = read_run(tmp_path)
    assert (record["status"], record["result"]["steps"]) == ("completed", 4)
    assert [w["samples"] for w in record["workers"]] == [16] * 3
    view = RunView(tmp_path, tmp_path)
    view.refresh()
    picture = view.picture()
    assert (picture["phase"], picture["step"]) == ("ended", 4)
    assert picture["title"] == "Sequential on tensors"


def test_the_report_says_that_it_is_a_loop_of_ones_own(tmp_path: Path) -> None:
    def body(pace: Pace) -> None:
        model, _, batches = pace.prepare(*made(small_net), make_pairs(8), batch_size=4)
        steps(pace, model, batches)
        pace.evaluated(accuracy=0.5)
        pace.finish()

    on_recorded_paces(2, body, tmp_path)
    study = read_study(tmp_path)
    assert command_of(study, study.lines[0]) == "paceline launch script.py"
    page = paceline.render(tmp_path, figures=False).read_text()
    assert "An own loop" in page
    assert "paceline launch script.py" in page
    assert "paceline train" not in page


def test_what_is_not_training_is_counted_apart(tmp_path: Path) -> None:
    def body(pace: Pace) -> None:
        model, _, batches = pace.prepare(*made(small_net), make_pairs(16), batch_size=4)
        for _ in range(2):
            steps(pace, model, batches)
            pace.state_dict()
            pace.check()
        pace.finish()

    on_recorded_paces(2, body, tmp_path, "local-sgd:every=100")
    for worker in read_run(tmp_path)["workers"]:
        assert worker["payload_sent_bytes"] == 0
        assert worker["evaluate_sent_bytes"] > 0
    asides = [e["what"] for e in read_worker_events(tmp_path)[0] if e["kind"] == "aside"]
    assert asides == ["evaluation", "check", "between passes", "evaluation", "check"]


def test_losses_are_those_that_the_loop_gave(tmp_path: Path) -> None:
    inputs, targets = make_pairs(24)
    plain, other = made(small_net)
    expected = []
    for x, y in zip(inputs.split(6), targets.split(6), strict=True):
        other.zero_grad()
        loss = cross_entropy(plain(x), y)
        loss.backward()
        other.step()
        expected.append(loss.item())

    def joined(name: str) -> tuple[Pace, nn.Module, torch.optim.Optimizer]:
        pace = paceline.join("serial", out=tmp_path / name)
        model, optimizer, _ = pace.prepare(*made(small_net))
        return pace, model, optimizer

    pairs = list(zip(inputs.split(6), targets.split(6), strict=True))
    pace, model, _ = joined("step")
    steps(pace, model, pairs)
    pace.finish()
    assert losses_of(tmp_path / "step") == expected

    for name in ("silent", "logged"):
        pace, model, optimizer = joined(name)
        for x, y in pairs:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            (pace.log_loss(loss) if name == "logged" else loss).backward()
            optimizer.step()
        pace.finish()
    assert losses_of(tmp_path / "logged") == expected
    assert losses_of(tmp_path / "silent") == [None] * 4
    assert read_run(tmp_path / "silent")["result"]["train_loss"] is None

    pace, model, _ = joined("accumulated")
    for x, y in pairs:
        for half, those in zip(x.split(3), y.split(3), strict=True):
            pace.backward(cross_entropy(model(half), those) / 2)
        pace.step()
    pace.finish()
    assert losses_of(tmp_path / "accumulated") == pytest.approx(expected, rel=1e-5)


def test_of_several_models_the_first_one_counts_steps(tmp_path: Path) -> None:
    def body(pace: Pace) -> None:
        first, opt, batches = pace.prepare(*made(small_net), make_pairs(16), batch_size=4)
        second, opt2, _ = pace.prepare(*made(small_net))
        for x, y in batches:
            for _ in range(2):
                pace.step(cross_entropy(second(x), y), optimizer=opt2)
            pace.step(cross_entropy(first(x), y), optimizer=opt)
        pace.finish()

    on_recorded_paces(2, body, tmp_path)
    record = read_run(tmp_path)
    assert (record["result"]["steps"], record["result"]["samples"]) == (2, 16)
    numbers = sum(p.numel() for p in small_net().parameters())
    assert record["workers"][0]["payload_sent_bytes"] == 2 * 3 * 4 * numbers
    assert {name.split(".")[0] for name in paceline.Run.open(tmp_path).weights} == {"0", "1"}


def test_without_out_nothing_is_written_or_counted(tmp_path: Path) -> None:
    pace = paceline.join("serial")
    model, _, batches = pace.prepare(*made(small_net), make_pairs(8), batch_size=4)
    steps(pace, model, batches)
    pace.evaluated(accuracy=0.5)
    assert not isinstance(pace.ctx.transport, Metered)
    pace.finish()
    assert list(tmp_path.iterdir()) == []


# --- evaluations


def test_evaluations_of_two_sets_with_other_metrics(tmp_path: Path) -> None:
    pace = paceline.join("serial", out=tmp_path / "run")
    model, _, batches = pace.prepare(*made(small_net), make_pairs(8), batch_size=4)
    pace.evaluated(on="validation", perplexity=torch.tensor(9.0), higher_is_better=False)
    steps(pace, model, batches)
    pace.evaluated(on="validation", perplexity=4.0, higher_is_better=False)
    pace.finish()
    result = read_run(tmp_path / "run")["result"]
    shown = {"name": "perplexity", "value": 4.0, "higher_is_better": False}
    assert result["validation"]["metric"] == shown
    assert result["test_accuracy"] is None
    pace.evaluated(loss=float("nan"), accuracy=0.75)  # after the end
    result = read_run(tmp_path / "run")["result"]
    assert (result["test_accuracy"], result["test_loss"], result["steps"]) == (0.75, None, 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "needs a number"),
        ({"accuracy": 97.3}, "a share from 0 to 1"),
        ({"accuracy": 0.5, "on": "train"}, "one of test, validation"),
        ({"f1": "high"}, "must be a number, not a str"),
        ({"loss": torch.zeros(2)}, "must be a number, not a Tensor"),
    ],
)
def test_bad_numbers_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        paceline.join("serial").evaluated(**given)


# --- folders, and going on


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    pace = paceline.join("serial", out=out)
    with pytest.raises(BadRequest, match="holds a run already"):
        paceline.join("serial", out=out)
    with pytest.raises(BadRequest, match="continued by another process"):
        paceline.join("serial", out=out, resume=True)
    with pytest.raises(BadRequest, match="is not finished"):
        read_study(out)
    pace.finish()  # without a step: the folder can be used
    with paceline.join("serial", out=out) as pace:
        model, _, batches = pace.prepare(*made(small_net), make_pairs(8), batch_size=4)
        steps(pace, model, batches)
    assert read_run(out)["result"]["steps"] == 2
    with pytest.raises(BadRequest, match="resume=True"):
        paceline.join("serial", out=out)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="is a file"):
        paceline.join("serial", out=tmp_path / "file")
    with pytest.raises(BadRequest, match="say which with out="):
        paceline.join("serial", resume=True)


def test_a_record_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    """The first script is interrupted two steps after its checkpoint."""
    out = tmp_path / "run"

    def loop(epochs: int, more: int = 0) -> None:
        with paceline.join("serial", out=out, resume=True) as pace:
            model, _, batches = pace.prepare(*made(small_net), make_pairs(16), batch_size=4)
            if (out / "checkpoints").exists():
                pace.load(out)
            while pace.epoch < epochs:
                steps(pace, model, batches)
                pace.save(out)
            for x, y in batches if more else ():
                pace.step(cross_entropy(model(x), y))
                if pace.steps == 4 * epochs + more:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop(1, more=2)
    record = read_run(out)
    assert (record["status"], record["result"]["steps"]) == ("interrupted", 6)
    loop(3)
    record = read_run(out)
    assert (record["status"], record["result"]["steps"]) == ("completed", 12)
    assert record["result"]["samples"] == 48
    numbers = [e["step"] for e in read_worker_events(out)[0] if e["kind"] == "step"]
    assert numbers == list(range(1, 13))
    times = [e["train_s"] for e in read_worker_events(out)[0] if e["kind"] == "step"]
    assert times == sorted(times)


def test_steps_that_a_load_undoes_are_not_counted(tmp_path: Path) -> None:
    pace = paceline.join("serial", out=tmp_path / "run")
    model, _, batches = pace.prepare(*made(small_net), make_pairs(16), batch_size=4)
    steps(pace, model, batches)
    pace.save(tmp_path / "kept")
    steps(pace, model, batches)
    pace.load(tmp_path / "kept")
    steps(pace, model, batches)
    pace.finish()
    result = read_run(tmp_path / "run")["result"]
    assert (result["steps"], result["samples"]) == (8, 32)


def test_a_script_that_fails_to_go_on_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with paceline.join("serial", out=out) as pace:
        model, _, batches = pace.prepare(*made(small_net), make_pairs(8), batch_size=4)
        steps(pace, model, batches)
    before = read_run(out)
    with pytest.raises(BadRequest, match="no checkpoint"):  # noqa: SIM117
        with paceline.join("serial", out=out, resume=True) as pace:
            pace.load(tmp_path / "nowhere")
    assert read_run(out) == before


# --- failures


def test_a_loop_that_raises_leaves_its_record(tmp_path: Path) -> None:
    def script() -> None:
        with paceline.join("serial", out=tmp_path / "run") as pace:
            model, _, batches = pace.prepare(*made(small_net), make_pairs(8), batch_size=4)
            steps(pace, model, batches)
            raise ZeroDivisionError("odd")

    with pytest.raises(ZeroDivisionError):
        script()
    record = read_run(tmp_path / "run")
    assert (record["status"], record["error"]) == ("failed", "ZeroDivisionError: odd")
    assert (record["result"]["steps"], record["workers"][0]["rank"]) == (2, 0)
    assert "No run was completed" in paceline.render(tmp_path / "run", figures=False).read_text()


def test_ranks_without_a_common_folder_send_their_events(tmp_path: Path) -> None:
    def on_rank(line: Any) -> None:
        own = tmp_path / f"host{line.rank}"
        own.mkdir()
        (own / f"worker-{line.rank}.jsonl").write_text(f"{line.rank}\n" * (line.rank + 1))
        collect(line, lambda rank: own / f"worker-{rank}.jsonl")

    assert Hub(3).run(on_rank) == [None] * 3
    assert [p.name for p in sorted((tmp_path / "host0").iterdir())] == [
        f"worker-{rank}.jsonl" for rank in range(3)
    ]
    assert (tmp_path / "host0" / "worker-2.jsonl").read_text() == "2\n2\n2\n"
    assert len(list((tmp_path / "host1").iterdir())) == 1
