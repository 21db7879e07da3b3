"""A finished run as an object: history, frame, plot, workers, report, model, evaluation."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.conftest import identical
from tests.records import run as made_up
from tests.records import write_study
from tests.small import make_pairs, small_net
from torch import nn

import paceline
from paceline.record.formats import RUN
from paceline.record.shapes import fault
from paceline.report.reading import read_study
from paceline.results.plot import running_mean


class Own(nn.Module):
    """A model of a person's own, importable from this file."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def own_with(hidden: int = 5) -> nn.Module:
    return Own(hidden)


def two_classes() -> nn.Module:
    return small_net(classes=2)


TWO_CLASSES = {
    "model": two_classes,
    "data": (make_pairs(60, classes=2), make_pairs(20, classes=2, seed=1)),
    "metric": "auc",
}


def steps_of(run: paceline.Run) -> list[dict]:
    return [row for row in run.history if row["kind"] == "step"]


def test_history_has_each_step_and_each_evaluation(run_inproc) -> None:
    run = run_inproc(steps=6, evaluate_every=3)
    assert [(r["kind"], r["step"]) for r in run.history] == [
        ("step", 1), ("step", 2), ("step", 3), ("evaluation", 3),
        ("step", 4), ("step", 5), ("step", 6), ("evaluation", 6),
    ]  # fmt: skip
    assert steps_of(run)[-1]["samples_seen"] == run.samples
    assert run.history[-1]["test_accuracy"] == run.test_accuracy
    assert run.history[-1]["test_loss"] == run.test_loss
    assert steps_of(run)[-1]["train_s"] == run.train_s


def test_the_loss_of_a_step_is_the_mean_over_all_workers_samples(run_inproc) -> None:
    serial = run_inproc(global_batch_size=16, steps=6)
    two = run_inproc(global_batch_size=16, steps=6, workers=2)
    assert [r["loss"] for r in steps_of(two)] == pytest.approx(
        [r["loss"] for r in steps_of(serial)], rel=1e-5
    )
    assert [r["samples"] for r in steps_of(two)] == [r["samples"] for r in steps_of(serial)]


def test_history_leaves_out_what_a_resume_has_undone(run_inproc) -> None:
    first = run_inproc(steps=7, checkpoint_every=4)
    straight = [r["loss"] for r in steps_of(first)]
    again = run_inproc(resume=str(first.out), steps=6, out=str(first.out))
    assert [r["step"] for r in steps_of(again)] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in steps_of(again)] == straight[:6]
    assert steps_of(paceline.load(first.out)) == steps_of(again)


def test_another_metric_has_a_column_of_its_own(run_inproc) -> None:
    run = run_inproc(steps=2, **TWO_CLASSES)
    assert run.history[-1]["test_auc"] == run.metric["value"]


def test_frame(run_inproc) -> None:
    run = run_inproc(steps=4, evaluate_every=2)
    frame = run.frame()
    assert len(frame) == 6
    assert {"step", "loss", "test_accuracy", "train_s"} <= set(frame.columns)
    assert list(frame[frame.kind == "step"].loss) == [r["loss"] for r in steps_of(run)]


@pytest.mark.processes  # matplotlib asks the system for its fonts
def test_plot(run_inproc) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'paceline[notebook]'")
    run = run_inproc(steps=4, evaluate_every=2)
    figure = run.plot()
    losses, scores = figure.axes
    assert list(losses.lines[0].get_ydata()) == [r["loss"] for r in steps_of(run)]
    assert (losses.get_ylabel(), scores.get_ylabel()) == ("loss", "accuracy (%)")
    assert scores.get_xlabel() == "step"
    assert scores.lines[0].get_ydata()[-1] == 100 * run.test_accuracy
    figure.savefig("course.png")
    assert Path("course.png").stat().st_size > 5000


def test_many_steps_are_smoothed() -> None:
    assert running_mean([1.0, 2.0, 3.0, 7.0], 2) == [1.0, 1.5, 2.5, 5.0]


@pytest.mark.parametrize(("module", "what"), [("pandas", "frame"), ("matplotlib", "plot")])
def test_a_missing_extra_is_named(run_inproc, monkeypatch, module: str, what: str) -> None:
    run = run_inproc(steps=1)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(paceline.BadRequest, match=r"pip install 'paceline\[notebook\]'"):
        getattr(run, what)()


@pytest.mark.native_threads
def test_workers_and_report(run_inproc) -> None:
    run = run_inproc(steps=2, workers=2)
    assert [w["rank"] for w in run.workers] == [0, 1]
    assert {"compute_s", "sync_s", "idle_s", "payload_sent_bytes", "cpu_percent"} <= set(
        run.workers[0]
    )
    run.workers[0]["rank"] = 9
    assert run.workers[0]["rank"] == 0  # a copy
    page = run.report(figures=False)
    assert page == run.out / "report.html"
    assert "allreduce" in page.read_text()


def test_a_run_shows_itself_in_a_notebook(run_inproc) -> None:
    run = run_inproc(steps=2, workers=2, **TWO_CLASSES)
    shown = run._repr_html_()
    assert f"{100 * run.test_accuracy:.2f}%" in shown
    assert shown.index("test auc") < shown.index("test accuracy")
    assert "peak memory" in shown
    record = json.loads(json.dumps(run.record))
    record["config"]["model"] = "<script>alert(1)</script>"
    assert "<script>" not in paceline.Run(record, run.out)._repr_html_()


def test_a_study_shows_itself_and_is_a_frame(tmp_path: Path) -> None:
    records = [
        made_up("serial", 1, 2.0, seed=0),
        made_up("serial", 1, 2.1, seed=1),
        made_up("allreduce", 2, 1.0, seed=0),
        made_up("allreduce", 2, 1.1, seed=1),
    ]
    found = read_study(write_study(tmp_path / "s", records))
    shown = found._repr_html_()
    assert repr(found) == f"<Study Made up: 2 settings, 4 runs, in {tmp_path / 's'}>"
    assert "allreduce" in shown
    assert "as fast as serial" in shown
    frame = found.frame()
    assert list(frame.train_s) == [2.0, 2.1, 1.0, 1.1]
    assert list(frame.strategy) == ["serial", "serial", "allreduce", "allreduce"]


# --- the model


def test_load_builds_a_named_model_without_its_data(run_inproc) -> None:
    run = run_inproc(model="mlp:hidden=7", steps=2)
    again = paceline.load(run.out)
    assert identical(again.model.state_dict(), run.weights)
    inputs = make_pairs(4)[0]
    assert torch.equal(again.model(inputs), run.model(inputs))
    assert not again.model.training


@pytest.mark.parametrize("model", [Own, small_net, own_with])
def test_load_imports_a_model_by_its_name(run_inproc, model) -> None:
    run = run_inproc(model=model, steps=1)
    assert identical(paceline.load(run.out).model.state_dict(), run.weights)


@pytest.mark.parametrize(
    ("saved", "why"),
    [
        ("<Own>", "was given in Python"),
        ("__main__:Net", "in a script or a notebook"),
        ("nosuchmodule:Net", "there is no module nosuchmodule"),
        ("tests.small:nosuch", "no attribute 'nosuch'"),
        ("tests.x:f.<locals>.Net", "was given in Python"),
        ("timeit:timeit:stmt=print(open('/etc/passwd').read())", "standard library"),
        ("tests.unit.test_results:own_with:hidden=4", "options of a class, not of a function"),
        ("evil:Net", "code from the run's folder"),
    ],
)
def test_load_says_to_pass_the_model_and_runs_no_code(
    run_inproc, monkeypatch, saved: str, why: str
) -> None:
    run = run_inproc(model=Own, steps=1)
    (run.out / "evil.py").write_text("raise SystemExit('this code must not run')")
    monkeypatch.syspath_prepend(str(run.out))
    path = run.out / "run.json"
    record = json.loads(path.read_text())
    record["config"]["model"] = saved
    record["config"]["plugin"] = [str(run.out / "evil.py")]
    path.write_text(json.dumps(record))
    again = paceline.load(run.out)
    with pytest.raises(paceline.BadRequest, match=r"give it with model=") as said:
        _ = again.model
    assert why in str(said.value)
    assert identical(paceline.load(run.out, model=Own).model.state_dict(), run.weights)
    assert identical(paceline.Run.open(run.out, Own()).model.state_dict(), run.weights)


def test_load_imports_nothing_from_inside_the_runs_folder(run_inproc, monkeypatch) -> None:
    run = run_inproc(model=Own, steps=1)
    (run.out / "tests").mkdir()
    (run.out / "tests" / "__init__.py").write_text("raise SystemExit('this code must not run')")
    monkeypatch.chdir(run.out)
    with pytest.raises(paceline.BadRequest, match="would run code from the run's folder"):
        _ = paceline.load(".").model


def test_a_class_with_options_is_built_from_its_saved_name(run_inproc) -> None:
    run = run_inproc(model="tests.unit.test_results:Own:hidden=9", steps=1)
    assert paceline.load(run.out).model.layers[0].out_features == 9


def test_weights_that_do_not_fit_are_one_sentence(run_inproc) -> None:
    run = run_inproc(model=Own, steps=1)
    with pytest.raises(paceline.BadRequest, match="do not fit this model") as said:
        _ = paceline.load(run.out, model=small_net).model
    assert "\n" not in str(said.value)
    with pytest.raises(paceline.BadRequest, match="model cannot be a int"):
        paceline.load(run.out, model=3)


def test_a_record_without_shapes_is_still_read(run_inproc) -> None:
    run = run_inproc(model=Own, steps=1)
    record = {k: v for k, v in run.record.items() if k != "model"}
    assert fault(record, RUN) is None
    (run.out / "run.json").write_text(json.dumps(record))
    assert identical(paceline.load(run.out).model.state_dict(), run.weights)


# --- evaluation


def test_evaluating_the_same_data_gives_the_same_numbers(run_inproc) -> None:
    data = (make_pairs(60), make_pairs(700, seed=1))  # more than one batch of the evaluation
    run = run_inproc(data=data, steps=5)
    found = paceline.load(run.out).evaluate(data)
    assert found == {"loss": run.test_loss, "accuracy": run.test_accuracy, "samples": 700}


def test_evaluating_other_data_with_another_metric(run_inproc) -> None:
    run = run_inproc(steps=5, workers=2, **{**TWO_CLASSES, "metric": "accuracy"})
    inputs, targets = make_pairs(90, classes=2, seed=7)
    found = run.evaluate((make_pairs(5, classes=2), (inputs, targets)), metric="auc")
    outputs = run.model(inputs).detach()
    assert found["loss"] == pytest.approx(
        float(nn.functional.cross_entropy(outputs, targets)), rel=1e-6
    )
    assert found["accuracy"] == float((outputs.argmax(1) == targets).double().mean())
    assert 0 < found["auc"] <= 1


def test_an_evaluation_that_cannot_be_made_is_one_sentence(run_inproc) -> None:
    run = run_inproc(steps=2, evaluate_every=1, lr=100.0)
    assert run.best["step"] == 1
    with pytest.raises(paceline.BadRequest, match="has no test set"):
        run.evaluate(make_pairs(9))
    with pytest.raises(paceline.BadRequest, match=r"given in Python .* give `data`"):
        run.evaluate()
    with pytest.raises(paceline.BadRequest, match=r"no checkpoints.best.*keep=\"best\""):
        run.evaluate((make_pairs(9), make_pairs(9)), which="best")
    with pytest.raises(paceline.BadRequest, match="which=worst: it must be last, best or ema"):
        run.evaluate((make_pairs(9), make_pairs(9)), which="worst")
    with pytest.raises(paceline.BadRequest, match=r"no model-ema.safetensors.*ema=0.999"):
        run.evaluate((make_pairs(9), make_pairs(9)), which="ema")
    own = run_inproc(steps=1, loss=lambda outputs, targets: outputs.square().mean())
    with pytest.raises(
        paceline.BadRequest, match=r"the run's loss was given in Python .* give `loss`"
    ):
        own.evaluate((make_pairs(9), make_pairs(9)))
    (run.out / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(paceline.RunFailed, match="cannot be read"):
        _ = run.model


@pytest.mark.parametrize("steps", [4, 6])  # the second evaluation is the worst, the third the best
def test_evaluating_the_best_weights_and_the_moving_average(run_inproc, steps: int) -> None:
    data = (make_pairs(60), make_pairs(40, seed=1))
    run = run_inproc(
        data=data, steps=steps, evaluate_every=2, keep="best", ema=0.5, lr=5.0, best_by="loss"
    )
    tested = {r["step"]: r["test_loss"] for r in run.history if r["kind"] == "evaluation"}
    best = run.record["result"]["best"]
    assert run.evaluate(data, which="best")["loss"] == tested[best["step"]] == min(tested.values())
    averaged = run.evaluate(data, which="ema")
    assert averaged["loss"] == run.ema["loss"] == run.history[-1]["test_ema_loss"]
    assert averaged["loss"] != run.evaluate(data)["loss"]


def own_step(model: nn.Module, batch) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, label_smoothing=0.1)


def test_a_step_of_ones_own_is_given_again(run_inproc) -> None:
    data = (make_pairs(60), make_pairs(40, seed=1))
    run = run_inproc(data=data, steps=2, step=own_step)
    with pytest.raises(paceline.BadRequest, match=r"a step of your own .*: give `step`"):
        run.evaluate(data)
    assert run.evaluate(data, step=own_step)["loss"] == run.test_loss


def test_several_metrics_and_a_validation_set(run_inproc) -> None:
    options = {**TWO_CLASSES, "metric": "auc,accuracy", "validation": 0.25}
    run = run_inproc(steps=4, evaluate_every=2, **options)
    kinds = [sorted(r) for r in run.history if r["kind"] == "evaluation"]
    assert "validation_auc" in kinds[0]
    assert "test_loss" not in kinds[0]
    assert "test_auc" in kinds[-1]
    found = paceline.load(run.out).evaluate(TWO_CLASSES["data"])
    assert found["auc"] == run.metrics["auc"]
    shown = run._repr_html_()
    assert "validation loss" in shown
    assert "best auc on validation set" in shown
