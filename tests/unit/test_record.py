"""run.json is computed from events, also damaged ones and after a resume."""

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.records import run as run_record

import paceline
from paceline.errors import BadRequest, NotFinite, RunFailed
from paceline.record.evaluations import best
from paceline.record.formats import EVENTS
from paceline.record.reader import (
    idle_seconds,
    lived,
    read_events,
    read_run,
    read_worker_events,
    summarise,
)
from paceline.record.resources import Task, Usage
from paceline.record.steady import steady_samples_per_s
from paceline.record.writer import Recorder, write_json


def step(number: int, rank: int = 0, session: int = 0, **fields: object) -> dict:
    base = {
        "kind": "step",
        "rank": rank,
        "session": session,
        "step": number,
        "epoch": 0,
        "n": 4,
        "loss": 1.0,
    }
    return {
        **base,
        "compute_s": 0.5,
        "sync_s": 0.25,
        "arrived": float(number),
        "train_s": 0.75 * number,
        "sent": 10,
        "received": 9,
        "messages": 2,
        **fields,
    }


def test_a_half_written_line_costs_that_line_only(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "e.jsonl", 3)
    for event in (
        step(1, 3, loss=float("nan"), began=0.0, waits=False),
        step(2, 3, loss=0.5, began=1.0, waits=False),
    ):
        recorder.write(**event)
    recorder.close()
    with (tmp_path / "e.jsonl").open("a") as file:
        file.write('{"kind": "step", "rank": 3, "sess')
    damaged: list[str] = []
    events = read_events(tmp_path / "e.jsonl", damaged)
    assert [(e["step"], e["rank"], e["loss"]) for e in events] == [(1, 3, None), (2, 3, 0.5)]
    assert damaged == [f"{tmp_path / 'e.jsonl'}: 1 damaged line"]


DAMAGE = (
    {"n": ...}, {"epoch": ...}, {"t": ...}, {"train_s": "x"}, {"sync_s": None}, {"n": [1]},
    {"sent": {}}, {"step": "3"}, {"step": True}, {"step": -1}, {"epoch": 1.5}, {"loss": "nan"},
    {"compute_s": float("nan")}, {"train_s": float("inf")}, {"n": 10**400}, {"rank": None},
    {"session": "0"}, {"kind": 7}, {"arrived": ...}, {"waits": 1}, {"began": None},
    {"encode_s": None}, {"staleness": "old"},
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_an_event_with_wrong_fields_costs_that_line_only(tmp_path: Path, damage: dict) -> None:
    whole = step(1, t=0.0, began=0.0, waits=False)
    bad = {k: v for k, v in {**whole, "step": 2, **damage}.items() if v is not ...}
    events = tmp_path / "events"
    events.mkdir()
    (events / "worker-0.jsonl").write_text("\n".join(json.dumps(e) for e in (whole, bad)))
    damaged: list[str] = []
    found = read_worker_events(tmp_path, damaged)
    assert [[e["step"] for e in own] for own in found] == [[1]]
    assert len(damaged) == 1
    assert summarise(found, {"workers": 1}, {}, "completed", None, 1.0)["result"]["steps"] == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "workers": 2,
            "strategy": "allreduce",
            "codec": "topk",
            "checkpoint_every": 3,
            "evaluate_every": 2,
        },
        {"workers": 2, "strategy": "allreduce", "balance": "measured:every=2"},
        {"workers": 2, "strategy": "ps:consistency=async"},
        {"workers": 2, "strategy": "gossip"},
        {"privacy": "noise=1.0,delta=1e-5"},
        {"privacy": "noise=1.0,delta=1e-5,reveal=true"},
        {"workers": 2, "strategy": "hogwild", "transport": "shm", "threads": 1},
        {"transport": "shm", "threads": 1, "profile": True, "steps": 30},
        {"lr": 1e30, "evaluate_every": 1},
    ],
    ids=str,
)
def test_what_runs_write_is_read_again(
    run_inproc: Callable[..., paceline.Run], tmp_path: Path, options: dict
) -> None:
    """The formats accept everything that a run writes, with nan and inf too."""
    out, damaged = tmp_path / "run", []
    with contextlib.suppress(NotFinite):
        run_inproc(**{"steps": 6, "epochs": 99, **options}, out=str(out))
    written = [
        line for path in (out / "events").iterdir() for line in path.read_text().splitlines()
    ]
    read = [event for path in (out / "events").iterdir() for event in read_events(path, damaged)]
    assert (damaged, len(read)) == ([], len(written))
    assert {e["kind"] for e in read} <= {*EVENTS, "lost", "checkpoint"}
    assert read_run(out)["schema"] == 1


def test_what_is_no_workers_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "events" / "worker-3.jsonl").mkdir(parents=True)
    for name in ("worker-x.jsonl", "worker-.jsonl", "worker--1.jsonl"):
        (tmp_path / "events" / name).write_text("{}\n")
    (tmp_path / "events" / "worker-10.jsonl").write_text(
        json.dumps(step(1, t=0.0, began=0.0, waits=False))
    )
    deep = "[" * 100_000
    (tmp_path / "events" / "worker-2.jsonl").write_text(
        f"{deep}\n" + json.dumps({"kind": "own", "rank": 2, "session": 0, "t": 1})
    )
    assert [[e["kind"] for e in own] for own in read_worker_events(tmp_path)] == [["own"], ["step"]]


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        (("status",), ..., "status is missing"),
        (("result", "train_s"), "long", "result.train_s is 'long', not a number"),
        (("result",), [], r"result is \[\], not a table"),
        (("config", "workers"), 0, "config.workers is 0, not a whole number above 0"),
        (("workers",), [None], r"workers\[0\] is None, not a table"),
        (("workers",), [{"rank": "first"}], r"workers\[0\].rank is 'first'"),
    ],
)
def test_a_damaged_record_is_refused_in_a_sentence(
    tmp_path: Path, part: tuple[str, ...], value: object, said: str
) -> None:
    record: dict = run_record("allreduce", 2)
    table = record
    for name in part[:-1]:
        table = table[name]
    if value is ...:
        del table[part[-1]]
    else:
        table[part[-1]] = value
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(BadRequest, match=f"run.json is not a run's record: {said}"):
        read_run(tmp_path)


def test_a_torn_line_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text('{"kind": "step", "ra')
    recorder = Recorder(tmp_path / "e.jsonl", 0, session=1)
    recorder.write("start", from_step=3)
    recorder.close()
    assert [e["kind"] for e in read_events(tmp_path / "e.jsonl")] == ["start"]


def test_what_a_resume_undid_does_not_count() -> None:
    events = [step(1), step(2), step(3), step(2, session=1), step(3, session=1), step(3, session=2)]
    kept = lived(events, {0: 0, 1: 1, 2: 2})
    assert [(e["step"], e["session"]) for e in kept] == [(1, 0), (2, 1), (3, 2)]


def test_idle_is_waiting_for_the_last_to_arrive() -> None:
    first = [
        step(1, arrived=10.0, sync_s=2.0),
        step(2, arrived=20.0, sync_s=2.0),
        step(3, arrived=30.0, sync_s=2.0),
    ]
    second = [step(1, arrived=10.5, sync_s=2.0), step(2, arrived=19.0, sync_s=2.0)]
    assert idle_seconds([first, second]) == [0.5, 1.0]
    # no more than the exchange took
    assert idle_seconds([first, [step(1, arrived=15.0, sync_s=0.1)]]) == [2.0, 0.0]
    assert idle_seconds([first]) == [0.0]


def test_the_summary_adds_up() -> None:
    workers = [
        [step(1), step(2)],
        [step(1, rank=1, n=2, loss=4.0), step(2, rank=1, n=2, loss=4.0, train_s=2.0)],
    ]
    workers[0].append(
        {
            "kind": "evaluation",
            "rank": 0,
            "session": 0,
            "step": 2,
            "accuracy": 0.9,
            "loss": 0.3,
            "train_s": 1.5,
            "reached": True,
        }
    )
    workers[0].append(
        {"kind": "summary", "rank": 0, "session": 0, "rss_peak_bytes": 77, "times_known": True}
    )
    run = summarise(workers, {"workers": 2}, {}, "completed", None, 9.0)
    result = run["result"]
    assert (result["steps"], result["samples"], result["train_s"], result["samples_per_s"]) == (
        2,
        12,
        2.0,
        6.0,
    )
    assert result["train_loss"] == pytest.approx((8 * 1.0 + 4 * 4.0) / 12)
    assert (result["time_to_accuracy_s"], result["steps_to_accuracy"]) == (1.5, 2)
    assert run["workers"][0]["rss_peak_bytes"] == 77
    assert run["workers"][1]["rss_peak_bytes"] is None, (
        "a worker that was killed leaves no counters, not zeros"
    )
    assert [
        (w["payload_sent_bytes"], w["payload_received_bytes"], w["messages_sent"])
        for w in run["workers"]
    ] == [(20, 18, 4)] * 2
    assert [w["compute_s"] for w in run["workers"]] == [1.0, 1.0]
    assert run["workers"][0]["sync_s"] + run["workers"][0]["idle_s"] == 0.5


def test_nothing_happened() -> None:
    run = summarise([], {"workers": 2}, {}, "failed", "no", 1.0)
    assert (run["result"]["steps"], run["result"]["samples_per_s"], run["workers"]) == (0, None, [])


def test_reading_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no run\.json"):
        read_run(tmp_path)
    for content, message in (
        ("{", "cannot be read"),
        ("[]", "not a run"),
        ('{"schema": 99}', "newer"),
    ):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(BadRequest, match=message):
            read_run(tmp_path)


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": float("inf")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None}
    with pytest.raises(RunFailed, match="cannot be written"):
        write_json(tmp_path / "missing" / "a.json", {})
    recorder = Recorder(Path("/dev/full"), 0)
    with pytest.raises(RunFailed, match="No space left"):
        recorder.write("step", step=1)
    recorder.close()
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_usage_counts_what_was_used() -> None:
    before = Usage.now(Task())
    sum(i * i for i in range(300_000))
    used = Usage.now(Task()).since(before)
    assert used["cpu_user_s"] >= 0
    assert used["rss_peak_bytes"] > 10e6
    assert set(used) == {
        "measured_s",
        "cpu_percent",
        "cpu_user_s",
        "cpu_system_s",
        "rss_peak_bytes",
        "disk_read_bytes",
        "disk_write_bytes",
    }


@pytest.mark.parametrize("lacks", ["on", "decided_by", "metrics"])
def test_a_best_evaluation_that_lacks_a_field(lacks: str) -> None:
    whole = {"kind": "evaluation", "step": 3, "loss": 0.5, "best": True, "on": "test"}
    whole |= {"decided_by": "accuracy", "metrics": {"accuracy": 0.9}}
    found = best([{name: value for name, value in whole.items() if name != lacks}])
    if lacks == "decided_by":
        assert found is None
    else:
        value = None if lacks == "metrics" else 0.9
        assert found == {"step": 3, "value": value, "by": "accuracy", "on": "test"}


def test_the_first_steps_are_left_out_of_the_steady_speed() -> None:
    def steps(*seconds: float) -> list[dict[str, float]]:
        ends = itertools.accumulate(seconds)
        return [{"n": 10, "train_s": end} for end in ends]

    slow_start = steps(*[5.0] * 5, *[0.5] * 45)
    assert steady_samples_per_s([slow_start]) == pytest.approx(20)
    assert steady_samples_per_s([slow_start, slow_start]) == pytest.approx(40)  # both together
    late = steps(*[1.0] * 10, *[0.1] * 90)  # 10% of 100 steps
    assert steady_samples_per_s([late]) == pytest.approx(100)
    assert steady_samples_per_s([steps(1.0, 1.0, 1.0)]) == pytest.approx(10)  # too few
    assert steady_samples_per_s([slow_start, []]) == pytest.approx(20)  # a lost worker's
    assert steady_samples_per_s([[], []]) is None
    assert steady_samples_per_s([steps(0.0)]) is None


def test_the_steady_speed_begins_where_a_sum_of_times_ends() -> None:
    """A private run records the times of 20 steps as one."""
    steps = [{"n": 8, "train_s": float(i // 20 * 20)} for i in range(1, 101)]
    assert steady_samples_per_s([steps]) == pytest.approx(8.0)
    steps = [{"n": 8, "train_s": float(i // 20 * 20)} for i in range(1, 301)]
    assert steady_samples_per_s([steps]) == pytest.approx(8.0)
