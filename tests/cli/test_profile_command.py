"""`paceline profile`: a real profile with a tiny budget, one of a run, one of a table, mistakes."""

import json
from pathlib import Path

import pytest

import paceline
from paceline.planning.compute import PARTS
from paceline.planning.stored import read_profile
from paceline.registry import codecs

HEADER = "workers,hosts,batch_size,step_s\n"
ROWS = HEADER + "1,1,32,0.1\n1,1,32,0.12\n1,1,128,0.3\n8,2,32,0.15\n"


@pytest.mark.processes
def test_a_real_profile(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, two batch sizes, every codec, the links of two transports."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = cli(
        *("profile", "--model", "mlp", "--data", "fashion-mini", "--seconds", "2"),
        *("--batch-sizes", "8,64", "--transports", "shm,gloo", "--out", "p.json"),
    )
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80
    assert "mlp on fashion-mini: " in out
    assert "profile: p.json" in out
    assert err == ""  # no bar where output is piped
    found = read_profile("p.json")
    compute = found.compute
    assert compute.batch_sizes == (8, 64)
    assert compute.threads == 1
    for steps in compute.steps:
        assert steps.count >= 4  # two rounds on two workers, at least
        parts = [getattr(steps, part) for part in PARTS]
        assert all(part > 0 for part in parts)
        assert steps.cpu_s is not None
        assert steps.cpu_s > 0
        assert max(parts) < steps.quantiles_s[-1] * max(compute.speeds)
    assert len(compute.speeds) == 2
    assert sum(compute.speeds) == pytest.approx(2.0, rel=1e-4)
    assert compute.together is not None
    assert compute.core_share is not None
    assert 0 < compute.core_share <= 1
    model = found.model
    assert model.trained == model.parameters
    # The backward pass goes from the last tensor to the first.
    assert len(compute.ready) == len(model.tensors)
    assert compute.ready[0] > compute.ready[-1]
    assert {c.name for c in found.codecs} == set(codecs.names()) - {"none"}
    assert [link.transport for link in found.links] == ["shm", "gloo"]
    for link in found.links:
        assert link.latency_s + 1e6 * link.s_per_byte > 0
        assert link.s_per_byte_added > 0
    assert found.memory is not None
    assert found.memory.peak_bytes > model.gradient_bytes
    assert str(Path.cwd()) not in Path("p.json").read_text()
    assert not Path("profile").exists()  # no run's folder is left


@pytest.mark.processes
def test_one_worker_has_no_links_and_one_batch_size_predicts_no_other(cli) -> None:
    words = ("profile", "--model", "mlp", "--data", "fashion-mini", "--seconds", "0.5")
    code, out, err = cli(*words, "--workers", "1", "--batch-sizes", "32", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["links"] == []
    assert found["compute"]["speeds"] == [1.0]
    said = " ".join(found["missing"])
    assert "Links need two workers" in said
    assert "One batch size was measured, 32" in said
    assert "note: One batch size was measured, 32" in " ".join(err.split())
    assert read_profile("profile.json").compute.batch_sizes == (32,)


@pytest.mark.processes
def test_a_profile_of_a_run(cli) -> None:
    paceline.train(
        model="mlp", data="fashion-mini", steps=20, batch_size=16, workers=2, out="run", threads=1
    )
    code, out, err = cli("profile", "run", "--out", "p.json")
    assert code == 0, err
    assert "A record does not hold the parts of a step" in " ".join(out.split())
    found = read_profile("p.json")
    assert found.source == "record"
    assert found.compute.batch_sizes == (16,)
    assert found.compute.steps[0].count == 2 * (20 - 5)
    assert len(found.compute.speeds) == 2
    assert found.model.name == "mlp"
    assert found.model.trained == found.model.parameters > 100_000


def test_a_profile_of_a_table(cli) -> None:
    Path("steps.csv").write_text(ROWS)
    code, out, err = cli("profile", "--measurements", "steps.csv", "--parameters", "25.6M")
    assert code == 0, err
    assert "25,600,000 parameters, gradients of 102 MB" in " ".join(out.split())
    found = read_profile("profile.json")
    assert found.source == "measurements"
    assert found.compute.batch_sizes == (32, 128)
    assert found.measurements[0].workers == 8
    code, out, _ = cli("profile", "--measurements", "steps.csv", "--parameters", "1000", "--json")
    assert code == 0  # a profile may be replaced
    assert json.loads(out)["model"]["parameters"] == 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model nosuch --data fashion-mini", "unknown model 'nosuch'"),
        ("--data nosuch", "unknown data"),
        ("--batch-sizes 0 --data fashion-mini", "--batch-sizes 0: give integers of 1 or more"),
        ("--batch-sizes 16,x", "--batch-sizes 16,x: give integers of 1 or more"),
        ("--batch-sizes 999999 --data fashion-mini", "training samples each; use --batch-sizes"),
        ("--seconds 0", "0 is not in the range"),
        ("--workers 3", "3 is not in the range"),
        ("--data fashion-mini --transports carrier-pigeon", "unknown transport"),
        ("--data fashion-mini --transports inproc", "transport inproc cannot be measured here"),
        ("--data fashion-mini --set lr", "--set lr: write --set name=value"),
        ("--data fashion-mini --set threads=2", "threads is no option of a profile"),
        ("--data fashion-mini --set device=cuda", "cuda"),
        ("--out folder/p.json", "the folder folder does not exist"),
        ("--out steps.csv", "exists and is not a profile"),
        ("--out .", "is a folder"),
        ("norun", "norun is not a run"),
        ("norun --model cnn", "--model has no effect beside RUN"),
        ("norun --measurements steps.csv", "RUN or --measurements, one of the two"),
        ("--measurements steps.csv", "needs the number of the model's parameters"),
        ("--measurements none.csv --parameters 10", "none.csv does not exist"),
        ("--measurements steps.csv --parameters 0", "the model has 1 or more"),
        ("--measurements steps.csv --parameters many", "is not a number"),
        ("--measurements steps.csv --parameters 9 --seconds 3", "--seconds has no effect beside"),
        ("--parameters 10", "--parameters goes with --measurements"),
    ],
)
def test_mistakes(cli, words: str, said: str) -> None:
    Path("steps.csv").write_text(ROWS)
    code, out, err = cli("profile", *words.split())
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert "Traceback" not in err
    assert not Path("profile.json").exists()
