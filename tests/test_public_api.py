"""What `import paceline` gives, and what it does not."""

import inspect

import pytest

import paceline
from tests.conftest import identical


def test_public_names() -> None:
    assert sorted(paceline.__all__) == [
        "BadRequest", "Callback", "Pace", "PacelineError", "Run", "RunFailed", "SplitModel",
        "compare", "join", "load", "load_data", "plan", "prepare", "profile", "ray_train", "render",
        "split", "study", "train",
    ]  # fmt: skip
    for name in paceline.__all__:
        assert inspect.getdoc(getattr(paceline, name)), f"{name} is not documented"
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = paceline.nosuch


def test_errors_are_also_the_built_in_kinds() -> None:
    assert issubclass(paceline.BadRequest, ValueError)
    assert issubclass(paceline.RunFailed, RuntimeError)


def test_options_of_train_are_those_of_the_command_line() -> None:
    from paceline.request.config import Config

    promised = {
        "model", "data", "data_dir", "loss", "metric", "shard", "partition", "strategy",
        "workers", "transport", "codec", "optimizer", "lr", "lr_schedule", "momentum",
        "weight_decay", "batch_size", "global_batch_size", "epochs", "steps", "until_accuracy",
        "until_converged", "init", "memory_format", "threads", "device", "seed", "out",
        "resume", "checkpoint_every", "plugin", "privacy", "servers", "overlap", "profile",
        "balance", "lr_scaling", "launcher",
    }  # fmt: skip
    assert set(Config.options()) == promised | {
        "evaluate_every", "evaluate_samples", "target_accuracy", "data_share", "sample_every_s",
        "deadline_s", "faults", "network", "master", "accumulate", "clip_norm", "precision",
        "compile", "groups", "ema", "validation", "patience", "best_by", "keep", "step",
        "callbacks", "give_up_s", "lost_s", "insecure", "max_time", "parallel", "grid", "cut",
    }  # fmt: skip


def test_a_run_has_its_results_as_attributes(run_inproc) -> None:
    run = run_inproc(steps=3)
    assert run.test_accuracy == run.record["result"]["test_accuracy"]
    assert "samples_per_s" in dir(run)
    assert "3 steps" in repr(run)
    assert identical(run.model.state_dict(), run.weights)
    again = paceline.Run.open(run.out)
    assert again.record == run.record
    with pytest.raises(AttributeError, match="its results are"):
        _ = run.accuracy
    assert identical(again.model.state_dict(), run.weights)  # tests.small:small_net is importable
