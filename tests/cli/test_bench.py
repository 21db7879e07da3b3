"""`paceline bench`: every benchmark measures something at its smallest size, and prints it."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from paceline.bench.measure import blocks, parallel, updates
from paceline.bench.measure import privacy as private_steps
from paceline.bench.measure import strategies as contenders
from paceline.bench.parts.benchmark import load, names
from paceline.registry import models
from paceline.transport.mpi.transport import MpiTransport


def test_a_benchmark_is_a_file() -> None:
    """`parts`, `measure` and `peers` are folders; every other module can be measured and shown."""
    assert names() == [
        "balance", "codecs", "collectives", "network", "parallel", "prepare", "privacy", "shards",
        "strategies",
    ]  # fmt: skip
    for name in names():
        benchmark = load(name)
        assert benchmark.OPTIONS
        assert callable(benchmark.measure)
        assert callable(benchmark.show)


@pytest.mark.processes
def test_bench_strategies(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and the server's updates are measured; the throughput of whole runs is made up."""
    monkeypatch.setattr(contenders, "_peer", lambda *_: 1000.0)
    monkeypatch.setattr(contenders, "_ours", lambda *_, **__: 2000.0)
    monkeypatch.setattr(contenders, "BLOCKS", 1)
    monkeypatch.setattr(blocks, "STEPS", 1)
    monkeypatch.setattr(
        contenders,
        "updates_per_s",
        lambda name: updates.updates_per_s(name, 3) if name == "shm" else 1.0,
    )
    monkeypatch.setattr(updates, "WARM_UP", 1)
    words = ("bench", "strategies", "--rounds", "1", "--steps", "5", "--batch-size", "4")
    code, out, err = cli(*words, "--json")
    assert code == 0, err
    found = json.loads(out)
    ratios = {r["title"]: r["median"] for r in found["ratios"]}
    assert ratios["serial / usual loop"] == 2.0
    assert ratios["allreduce / no communication, in blocks"] > 0
    assert 0 < found["in_step_bound"]["median"] <= 1
    assert all(r["median"] > 0 for r in found["updates_per_s"].values())
    shown = show(cli, monkeypatch, "strategies", found)
    assert "serial / usual loop" in shown
    assert "ps:consistency=async on shm, 300,500 parameters" in shown


@pytest.mark.processes
def test_bench_collectives(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MPI, whose ranks are new processes; the slow test has it."""
    monkeypatch.setattr(MpiTransport, "available", classmethod(lambda cls: False))
    words = ("bench", "collectives", "--workers", "2", "--sizes", "4KB", "--rounds", "1")
    code, out, err = cli(*words, "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = {(r["transport"], r["collective"]): r for r in found["rows"]}
    assert {("gloo", "native"), ("shm", "native"), ("shm", "ring")} <= set(rows)
    assert all(r["median_s"] > 0 for r in rows.values())
    assert rows[("gloo", "native")]["times_gloo"] == 1.0
    shown = show(cli, monkeypatch, "collectives", found)
    assert "2 workers, 4.1 kB" in shown
    assert "halving-doubling" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("collectives --sizes big", "'big' is not a size like 4KB or 10MB"),
        ("collectives --workers 1", "--workers 1: give integers of 2 or more"),
        ("collectives --workers two", "--workers two: give integers of 2 or more"),
        ("privacy --batch-sizes 64,x", "--batch-sizes 64,x: give integers of 1 or more"),
        ("prepare --millions many", "--millions many: give numbers like 0.3,5"),
        ("codecs --model nosuch", "unknown model 'nosuch'"),
        ("strategies --rounds 0", "0 is not in the range x>=1"),
        ("network --target 2.5", "2.5 is not in the range"),
    ],
)
def test_mistakes(cli, words: str, message: str) -> None:
    code, out, err = cli("bench", *words.split())
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_bench_privacy(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model and one of Opacus' modes; memory, which takes new processes, is made up."""
    made_up = {"before": 1, "peak": 1_000_000}
    monkeypatch.setattr(private_steps, "MODELS", {"mlp:hidden=8": (1.8, "contiguous")})
    monkeypatch.setattr(private_steps, "MODES", ("hooks", "nosuch"))
    monkeypatch.setattr(private_steps, "_memory", lambda *_: made_up)
    monkeypatch.setattr(private_steps, "WARM_UP", 1)
    monkeypatch.setattr(private_steps, "LOOP_STEPS", 1)
    words = ("bench", "privacy", "--rounds", "2", "--steps", "1", "--batch-sizes", "4")
    code, out, err = cli(*words, "--json")
    assert code == 0, err
    found = json.loads(out)
    (case,) = found["cases"]
    assert {"private", "plain", "one sample at a time", "Opacus, hooks"} <= set(
        case["samples_per_s"]
    )
    assert case["ratios"][0]["title"] == "private / plain"
    shown = show(cli, monkeypatch, "privacy", found)
    assert "Opacus, nosuch, mlp:hidden=8: left out" in shown
    assert "memory, 1.0 MB" in " ".join(shown.split())


@pytest.mark.processes
def test_bench_parallel(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small models: a split model, PyTorch's pipeline, and the whole model, in turns."""
    shapes = {"tensor": ("mlp:hidden=300x300", (16,)), "domain": ("cnn:dropout=0", (1, 24, 24))}

    def small(name: str) -> Any:
        torch.manual_seed(0)
        if name == "pipeline":
            model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
            return model, torch.randn(16, 8), torch.randint(0, 8, (16,)), ["pipeline:micro=8"]
        spec, shape = shapes[name]
        model = models.build(spec, input_shape=shape, classes=3)
        return model, torch.randn(4, *shape), torch.randint(0, 3, (4,)), [name]

    monkeypatch.setattr(parallel, "case_of", small)
    code, out, err = cli("bench", "parallel", "--rounds", "1", "--steps", "1", "--json")
    assert code == 0, err
    cases = json.loads(out)["cases"]
    assert set(cases) == {"pipeline", "tensor", "domain"}
    assert set(cases["pipeline"]["ratios"]) == {
        "one process", "one process, 2 threads", "PyTorch's",
    }  # fmt: skip
    assert 0 <= cases["pipeline"]["idle"]["median"] < 1
    assert cases["pipeline"]["idle_in_theory"] == pytest.approx(1 / 9)
    assert cases["tensor"]["held"] == pytest.approx(0.5, abs=0.02)
    shown = " ".join(str(part) for part in load("parallel").show(json.loads(out)))
    assert "the timetable has 11.1%" in shown


@pytest.mark.slow
@pytest.mark.processes
def test_bench_shards(cli) -> None:
    words = ("bench", "shards", "--shards", "2", "--megabytes", "1", "--rounds", "2")
    code, out, err = cli(*words, "--steps", "5")
    assert code == 0, err
    assert "2 shards of 1 MB" in out
    assert "training, shards / memory" in out


NETWORK = {
    "data": "mnist", "model": "cnn-wide", "workers": 4, "batch_size": 8, "target": 0.9,
    "links": "100mbit", "rounds": 1,
    "all_reduce": {"bytes": 10_000_000, "seconds": 1.3, "min": 1.2, "max": 1.4, "of_theory": 1.09},
    "rows": [
        {"contender": "ddp", "seconds": 10.0, "steps": 40, "compute_s": 0.01, "codec_s": None,
         "exchange_s": 0.4, "sent_bytes": 8e6, "sooner": 1.0},
        {"contender": "allreduce/sign", "seconds": None, "steps": 3000, "compute_s": 0.01,
         "codec_s": 0.002, "exchange_s": 0.05, "sent_bytes": 5e5, "sooner": None},
    ],
    "bound": 9.5, "of_bound": None,
}  # fmt: skip
POLARS = {
    "start_s": 0.5, "read_s": 0.1, "count_s": 0.2, "write_s": 0.3, "work_s": 0.6,
    "faster_than_pandas": 3.0, "ratios": [2.5, 3.5],
}  # fmt: skip
PREPARE = {"rounds": 2, "cases": [{"rows": 336_776, "contenders": {"polars": POLARS}}]}
ROW = {"title": "balanced / ideal", "median": 0.86, "min": 0.71, "max": 0.91, "unit": "ratio"}
BALANCE = {
    "data": "mnist", "rounds": 5, "steps": 400, "batch_size": 64, "slower": 3.0,
    "rows": [{**ROW, "goal": ">= 0.85"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "result", "told"),
    [
        ("network", NETWORK, "an all-reduce of 10.0 MB by ring takes 1.300 s (1.200 - 1.400)"),
        ("network", NETWORK, "cnn-wide on mnist, 4 hosts, 100mbit, batch 8 each, until 90%"),
        ("network", NETWORK, "allreduce/sign never 3000 10 2 50 500 kB"),
        ("network", NETWORK, "9.50; no contender reached the accuracy"),
        ("prepare", PREPARE, "336,776 rows of flights, medians of 2 round(s), seconds"),
        ("prepare", PREPARE, "│ polars │ 0.50 │ 0.10 │ 0.20 │ 0.30 │ 0.60 │ 3.00 │ 2.50 - 3.50 │"),
        ("balance", BALANCE, "│ balanced / ideal │ 0.86 │ 0.71 - 0.91 │ >= 0.85 │"),
    ],
)
def test_tables(
    cli, monkeypatch: pytest.MonkeyPatch, name: str, result: dict[str, Any], told: str
) -> None:
    assert told in " ".join(show(cli, monkeypatch, name, result).split())


def show(cli, monkeypatch: pytest.MonkeyPatch, name: str, result: dict[str, Any]) -> str:
    """Return what `paceline bench NAME` prints for a result."""
    monkeypatch.setattr(load(name), "measure", lambda say, **options: dict(result))
    code, out, err = cli("bench", name)
    assert code == 0, err
    return out


def test_bench_codecs(cli) -> None:
    words = ("bench", "codecs", "--rounds", "1", "--numbers", "100003")
    code, out, err = cli(*words, "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = {r["codec"]: r for r in found["codecs"]}
    assert rows["sign"]["smaller"] > 30
    assert rows["topk"]["per_worker_bytes"] == 3 * rows["topk"]["message_bytes"]
    assert rows["int8"]["per_worker_bytes"] < found["ring_bytes"] / 3.9
    assert rows["powersgd"]["against_hook"]["median"] > 0
    assert all(r["memcpys"]["median"] > 0 for r in rows.values())
    assert "per worker, P=4" in cli("bench", "codecs", "--rounds", "1", "--numbers", "10000")[1]


@pytest.mark.slow
@pytest.mark.processes
def test_pytorchs_hooks_do_not_end_the_process() -> None:
    """The hooks' callbacks hold the process group in gloo's own threads. Freed at the wrong moment,
    it ended the process once in fifty times.
    """
    program = (
        "from paceline.bench.measure.codecs import bench_codecs\n"
        "for _ in range(150): bench_codecs('cnn', 4, 1, 20_000, print)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.slow
@pytest.mark.processes
def test_bench_balance(cli) -> None:
    code, out, err = cli(
        "bench", "balance", "--rounds", "1", "--steps", "30", "--slower", "2", "--json"
    )
    assert code == 0, err
    titles = [r["title"] for r in json.loads(out)["rows"]]
    assert "balanced / ideal" in titles


@pytest.mark.slow
@pytest.mark.processes
def test_bench_collectives_with_mpi(cli) -> None:
    code, out, err = cli(
        "bench", "collectives", "--workers", "2", "--sizes", "4KB", "--rounds", "1", "--json"
    )
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {(r["transport"], r["collective"]) for r in rows} >= {
        ("gloo", "native"),
        ("shm", "native"),
        ("shm", "ring"),
    }
    assert all(r["median_s"] > 0 for r in rows)
    assert (
        next(r for r in rows if (r["transport"], r["collective"]) == ("gloo", "native"))[
            "times_gloo"
        ]
        == 1.0
    )
    code, out, _ = cli("bench", "collectives", "--workers", "2", "--sizes", "4096", "--rounds", "1")
    assert "x gloo" in out
    for bad in (["--sizes", "big"], ["--workers", "1"], ["--workers", "two"]):
        assert cli("bench", "collectives", *bad)[0] == 2
