"""Made-up records: a study on disk whose every figure is known."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from paceline.report.reading import read_study
from paceline.report.render import tables_of


def worker(rank: int, **known: Any) -> dict[str, Any]:
    """Return one worker's part of run.json."""
    return {
        "rank": rank,
        "role": "worker",
        "host": "h",
        "samples": 1000,
        "steps": 10,
        "compute_s": 1.0,
        "sync_s": 0.0,
        "idle_s": 0.0,
        "cpu_percent": 99.0,
        "cpu_user_s": 1.0,
        "cpu_system_s": 0.0,
        "encode_s": 0.0,
        "decode_s": 0.0,
        "payload_sent_bytes": 0,
        "payload_received_bytes": 0,
        "messages_sent": 0,
        "setup_sent_bytes": 0,
        "evaluate_sent_bytes": 0,
        "finish_sent_bytes": 0,
        "rss_peak_bytes": 100_000_000,
        "pss_peak_bytes": 50_000_000,
        "disk_read_bytes": 0,
        "disk_write_bytes": 0,
        "net_sent_bytes": 0,
        "net_received_bytes": 0,
        "memory_sent_bytes": 0,
        "memory_received_bytes": 0,
        "measured_s": 2.0,
        "measuring_s": 0.01,
        "staleness_mean": None,
        "staleness_max": None,
        "missed_mean": None,
        "overlap_rate": None,
        "replica_distance_max": None,
        "traffic": [],
        **known,
    }


def run(
    strategy: str = "serial",
    workers: int = 1,
    train_s: float = 2.0,
    accuracy: float | None = 0.95,
    *,
    samples: int = 2000,
    reached_s: float | None = None,
    each: list[dict[str, Any]] | None = None,
    error: str | None = None,
    cores: int = 2,
    threads: int = 1,
    target: float | None = None,
    **config: Any,
) -> dict[str, Any]:
    """Return the content of a run.json."""
    share = {"samples": samples / workers, "compute_s": train_s}
    found = [worker(r, **{**share, **(each[r] if each else {})}) for r in range(workers)]
    return {
        "schema": 1,
        "status": "failed" if error else "completed",
        "error": error,
        "config": {
            "strategy": strategy,
            "workers": workers,
            "threads": threads,
            "model": "cnn",
            "data": "mnist",
            "seed": 0,
            "target_accuracy": target,
            "until_accuracy": None,
            "oversubscribed": workers * threads > cores,
            **config,
        },
        "environment": {
            "cpu": "a cpu",
            "cores": cores,
            "torch": "2",
            "python": "3.11",
            "paceline": "0",
        },
        "chosen": {},
        "result": {
            "test_accuracy": accuracy,
            "test_loss": 0.1,
            "train_loss": 0.1,
            "metric": None,
            "steps": 10,
            "samples": samples,
            "train_s": train_s,
            "wall_s": train_s + 1,
            "samples_per_s": samples / train_s,
            "time_to_accuracy_s": reached_s,
            "steps_to_accuracy": None if reached_s is None else 5,
        },
        "workers": [] if error else found,
        "machine": None,
    }


def write_study(
    folder: Path, runs: list[dict[str, Any]], events: bool = False, **about: Any
) -> Path:
    """Write a study's folder.

    Runs with the same strategy, workers and varied options are seeds of one setting.
    """
    planned, seeds = [], {}
    for record in runs:
        config = record["config"]
        varied = {
            "strategy": config["strategy"],
            **{k: str(v) for k, v in config.get("varied", {}).items()},
        }
        label = ", ".join(v if k == "strategy" else f"{k}={v}" for k, v in varied.items())
        key = (label, config["workers"], config["threads"])
        seed = seeds[key] = seeds.get(key, -1) + 1
        if config["threads"] > 1:
            label, varied = (
                f"{label}, threads={config['threads']}",
                {**varied, "threads": str(config["threads"])},
            )
        name = f"{label.replace(' ', '').replace(':', '-')}-p{config['workers']}-s{seed}"
        own = folder / "runs" / name
        (own / "events").mkdir(parents=True)
        (own / "run.json").write_text(json.dumps(record))
        if events:
            for w in record["workers"]:
                (own / "events" / f"worker-{w['rank']}.jsonl").write_text(
                    "\n".join(json.dumps(e) for e in _events(record, w))
                )
        planned.append(
            {
                "name": name,
                "label": label,
                "workers": config["workers"],
                "seed": seed,
                "varied": varied,
            }
        )
    content = {
        "schema": 1,
        "name": "made-up",
        "definition": {"title": "Made up", "scaling": "strong"},
        "runs": planned,
        **about,
    }
    (folder / "study.json").write_text(json.dumps(content))
    return folder


def _events(record: dict[str, Any], w: dict[str, Any]) -> list[dict[str, Any]]:
    base = {"rank": w["rank"], "session": 0}
    steps = w["steps"]
    found: list[dict[str, Any]] = [
        {**base, "kind": "start", "t": 0.0, "clock": 0.0, "role": "worker"}
    ]
    for i in range(1, steps + 1):
        t = i * record["result"]["train_s"] / steps
        times = {
            "compute_s": w["compute_s"] / steps,
            "sync_s": (w["sync_s"] or 0) / steps,
            "train_s": t,
        }
        step = {
            "step": i,
            "epoch": 0,
            "n": w["samples"] / steps,
            "loss": 1.0,
            "sent": 0,
            "received": 0,
            "messages": 0,
        }
        found.append({**base, "kind": "step", "t": t, **times, **step})
        if w["rank"] == 0 and i % 2 == 0:
            accuracy = (record["result"]["test_accuracy"] or 0.0) * i / steps
            found.append(
                {
                    **base,
                    "kind": "evaluation",
                    "t": t,
                    "step": i,
                    "train_s": t,
                    "loss": 1 / i,
                    "accuracy": accuracy,
                }
            )
        used = {
            "cpu_user_s": t,
            "cpu_system_s": 0.0,
            "rss_bytes": 10**8,
            "disk_read_bytes": 0,
            "disk_write_bytes": i,
        }
        net = {"net_sent_bytes": 1000 * i, "net_received_bytes": 1000 * i}
        found.append({**base, "kind": "sample", "t": t, "elapsed_s": t, **used, **net})
    return found


def recompute(folder: Path) -> int:
    """Check the report's figures against run.json files alone; return the number of settings."""
    about = json.loads((folder / "study.json").read_text())
    records = {
        p["name"]: json.loads((folder / "runs" / p["name"] / "run.json").read_text())
        for p in about["runs"]
    }
    settings: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for planned in about["runs"]:
        settings.setdefault((planned["label"], planned["workers"]), []).append(
            records[planned["name"]]
        )
    rows = {(r["series"], r["workers"]): r for r in tables_of(read_study(folder))["lines"]}
    assert set(rows) == set(settings)

    def speed(record: dict[str, Any]) -> float:
        result = record["result"]
        return float(result.get("steady_samples_per_s") or result["samples_per_s"])

    def gain(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> float:
        """The geometric mean of the ratios of speed, seed by seed."""
        pairs = zip(runs, base, strict=True)
        return math.exp(fmean(math.log(speed(own) / speed(other)) for own, other in pairs))

    for (label, workers), runs in settings.items():
        row = rows[label, workers]
        serial = next(r for (name, _), r in settings.items() if name == "serial")
        assert row["speedup_serial"] == pytest.approx(gain(runs, serial), rel=1e-4)
        if (label, 1) in settings:
            own = gain(runs, settings[label, 1])
            assert row["speedup"] == pytest.approx(own, rel=1e-4)
            assert row["efficiency"] == pytest.approx(own / workers, rel=1e-4)
        each = [w for r in runs for w in r["workers"] if w["role"] == "worker"]
        for column, key in (
            ("sent_bytes", "payload_sent_bytes"),
            ("net_sent_bytes", "net_sent_bytes"),
        ):
            moved = [
                sum(rank[key] for rank in r["workers"])  # servers count
                / sum(w["steps"] for w in r["workers"] if w["role"] == "worker")
                for r in runs
            ]
            assert row[column] == pytest.approx(fmean(moved), rel=1e-4)
        for part in ("compute", "sync", "idle"):
            assert row[f"{part}_ms"] == pytest.approx(
                fmean(1e3 * w[f"{part}_s"] / w["steps"] for w in each), rel=1e-4
            )
        for run_ in runs:  # the parts of a worker's time add up to its training time
            slowest = max(
                w["compute_s"] + w["sync_s"] + w["idle_s"]
                for w in run_["workers"]
                if w["role"] == "worker"
            )
            assert slowest == pytest.approx(run_["result"]["train_s"], rel=0.02)
    with (folder / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(records)
    for line in table:
        assert float(line["train_s"]) == records[line["run"]]["result"]["train_s"]
        own = records[line["run"]]
        base = next(r for r in serial if r["config"]["seed"] == own["config"]["seed"])
        assert float(line["speedup_serial"]) == pytest.approx(speed(own) / speed(base), rel=1e-6)
    with (folder / "workers.csv").open() as file:
        ranks = list(csv.DictReader(file))
    assert len(ranks) == sum(len(r["workers"]) for r in records.values())
    return len(settings)
