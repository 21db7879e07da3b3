"""Resources of each worker, the timeline, and the profile."""

import itertools
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import BadRequest
from paceline.record import container
from paceline.record.network import Sockets
from paceline.record.reader import read_worker_events
from paceline.record.resources import Task, Usage
from paceline.record.sampler import Sampler
from paceline.record.trace import spans
from paceline.record.writer import Recorder

SMALL = {
    "data": "fashion-mini",
    "memory_format": "contiguous",
    "progress": False,
    "batch_size": 20,
    "data_share": 0.1,
}


def test_sockets_count_what_was_sent_and_received_also_after_they_are_closed() -> None:
    sockets = Sockets()
    before = sockets.bytes()
    assert before is not None
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        other, _ = server.accept()
        one.sendall(b"x" * 50_000)
        left = 50_000
        while left:
            left -= len(other.recv(left))
        other.sendall(b"y" * 700)
        assert len(one.recv(700, socket.MSG_WAITALL)) == 700
        now = sockets.bytes()
        other.close()
    assert now is not None
    # both ends are this process's
    assert (now[0] - before[0], now[1] - before[1]) == (50_700, 50_700)
    assert sockets.bytes() == now


def test_a_thread_is_told_apart_from_its_process() -> None:
    used: dict[str, float] = {}
    own: dict[str, float] = {}

    def burn(name: str, seconds: float) -> None:
        began = time.thread_time()
        task = Task.own(alone_in_process=False)
        start = Usage.now(task)
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        spent = Usage.now(task).since(start)
        used[name] = spent["cpu_user_s"] + spent["cpu_system_s"]
        own[name] = time.thread_time() - began

    threads = [
        threading.Thread(target=burn, args=(name, s)) for name, s in (("busy", 0.3), ("lazy", 0.0))
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    tick = 1 / os.sysconf("SC_CLK_TCK")  # the kernel counts a thread's time in these
    assert used["busy"] >= 0.3 - 2 * tick
    for name in used:
        assert used[name] <= own[name] + 2 * tick, "not the time of the other thread"


def test_the_container_gives_what_docker_stats_shows() -> None:
    start = container.usage()
    assert start["source"] in ("cgroup v1", "cgroup v2", "system")
    end = json.loads(json.dumps(start))
    end["cpu_s"], end["interfaces"]["new0"] = (
        start["cpu_s"] + 1.5,
        {"sent_bytes": 7, "received_bytes": 9},
    )
    found = container.difference(start, end, 1.0, 123)
    assert found["cpu_percent"] == pytest.approx(150.0)
    assert found["interfaces"]["new0"] == {"sent_bytes": 7, "received_bytes": 9}
    assert found["memory_peak_bytes"] == 123


def test_samples_come_at_least_twice_and_stop(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "events" / "worker-0.jsonl", 0)
    sampler = Sampler(recorder, 0.01, Task(), whole_machine=True)
    sampler.start()
    deadline = time.monotonic() + 10
    while (tmp_path / "events" / "worker-0.jsonl").read_text().count(
        "\n"
    ) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    summary = sampler.summary()
    recorder.close()
    (events,) = read_worker_events(tmp_path)
    assert len(events) >= 3
    assert {"elapsed_s", "cpu_user_s", "rss_bytes", "net_sent_bytes", "machine"} <= events[0].keys()
    assert summary["measuring_s"] > 0
    assert summary["pss_peak_bytes"] <= summary["rss_peak_bytes"]
    assert summary["machine"]["memory_peak_bytes"] > 0


def test_a_run_has_its_resources_its_share_and_its_target(tmp_path: Path) -> None:
    run = paceline.train(
        **SMALL, strategy="allreduce", workers=2, transport="inproc", out=str(tmp_path / "a"),
        evaluate_every=3, evaluate_samples=100, target_accuracy=0.01,
    )  # fmt: skip
    record = run.record
    assert record["result"]["samples"] == 600
    assert record["result"]["steps_to_accuracy"] == 3
    assert record["result"]["steps"] == 15  # it went on
    for worker in record["workers"]:
        assert worker["memory_sent_bytes"] == worker["payload_sent_bytes"] > 0
        assert 0 < worker["measuring_s"] < worker["measured_s"]
        assert worker["cpu_percent"] is not None
    assert record["machine"]["source"]


def test_no_samples_where_none_are_wanted(tmp_path: Path) -> None:
    paceline.train(**SMALL, steps=2, transport="inproc", out=str(tmp_path / "a"), sample_every_s=0)
    assert not [
        e for own in read_worker_events(tmp_path / "a") for e in own if e["kind"] == "sample"
    ]


# --- the timeline


def check_trace(folder: Path) -> None:
    """Check the rules of the format, and that spans add up to the steps."""
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M", "C")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(v, (int, float)) for v in event["args"].values())
    record = json.loads((folder / "run.json").read_text())
    for worker in (w for w in record["workers"] if w["role"] == "worker"):
        own = [e for e in events if e["ph"] == "X" and e["pid"] == worker["rank"]]
        steps = sum(e["dur"] for e in own if e["cat"] == "step") / 1e6
        by_kind = {
            k: sum(e["dur"] for e in own if e["cat"] == k) / 1e6
            for k in ("compute", "sync", "idle")
        }
        assert sum(by_kind.values()) == pytest.approx(steps, rel=0.02)
        assert steps == pytest.approx(sum(worker[f"{k}_s"] for k in by_kind), rel=0.02)
        for kind, seconds in by_kind.items():
            assert seconds == pytest.approx(worker[f"{kind}_s"], rel=0.02, abs=0.02 * steps)
        inner = sorted((e["ts"], e["ts"] + e["dur"]) for e in own if e["cat"] in by_kind)
        for (_, end), (start, _) in itertools.pairwise(inner):
            assert start >= end - 1.0  # microseconds: spans of one row do not overlap


@pytest.mark.parametrize(
    "strategy", ["serial", "allreduce:collective=ring", "ps:consistency=async", "local-sgd:every=4"]
)
def test_the_trace_is_valid_and_adds_up(strategy: str, tmp_path: Path) -> None:
    workers = 1 if strategy == "serial" else 3
    paceline.train(
        **SMALL,
        strategy=strategy,
        workers=workers,
        transport="inproc",
        out=str(tmp_path / "a"),
        evaluate_every=5,
        sample_every_s=0.02,
    )
    check_trace(tmp_path / "a")
    events = json.loads((tmp_path / "a" / "trace.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X" and e["cat"] == "aside"} == {"evaluation"}
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        *(f"worker {r}" for r in range(workers)),
        *(["server 3"] if strategy.startswith("ps") else []),
    }


def test_the_trace_shows_who_waited_for_whom() -> None:
    def step(rank: int, arrived: float) -> dict[str, Any]:
        times = {
            "began": 10.0,
            "arrived": arrived,
            "compute_s": arrived - 10.0 + 0.5,
            "sync_s": 13.25 - arrived,
            "waits": True,
        }
        return {
            "kind": "step",
            "rank": rank,
            "session": 0,
            "step": 1,
            "loss": 1.0,
            "t": 100.0,
            **times,
        }

    workers = [
        [
            {"kind": "start", "rank": r, "session": 0, "t": 50.0, "clock": 9.0, "role": "worker"},
            step(r, arrived),
        ]
        for r, arrived in enumerate((11.0, 13.0))
    ]
    found = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans(workers) if e["ph"] == "X"]
    assert found == [
        (0, "step", 1e6, 3.75e6),
        (0, "forward, backward", 1e6, 1e6),
        (0, "wait", 2e6, 2e6),
        (0, "exchange", 4e6, 0.25e6),
        (0, "update", 4.25e6, 0.5e6),
        (1, "step", 1e6, 3.75e6),
        (1, "forward, backward", 1e6, 3e6),
        (1, "exchange", 4e6, 0.25e6),
        (1, "update", 4.25e6, 0.5e6),
    ]


# --- the profile


def test_profile_needs_processes(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="profile needs processes"):
        paceline.train(**SMALL, steps=1, transport="inproc", profile=True, out=str(tmp_path / "a"))


def test_bad_shares_and_targets_are_refused(tmp_path: Path) -> None:
    for bad in (
        {"data_share": 0.0},
        {"data_share": 1.5},
        {"target_accuracy": 2},
        {"sample_every_s": -1},
    ):
        with pytest.raises(BadRequest, match=next(iter(bad))):
            paceline.train(**{**SMALL, **bad}, steps=1, transport="inproc", out=str(tmp_path / "a"))
