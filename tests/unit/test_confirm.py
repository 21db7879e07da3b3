"""Confirming blocks: which settings, how many blocks, and what disturbs one."""

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from tests.records import run, write_study

from paceline.errors import BadRequest
from paceline.record.blocks import Block, blocks_of
from paceline.record.foreign import Foreign, ForeignCpu
from paceline.report.reading import read_study
from paceline.studies import confirm
from paceline.studies.candidates import candidates, nearest
from paceline.studies.confirm import MOST_REPEATS, PILOT, Confirmation
from paceline.studies.grid import StudySpec
from paceline.studies.plan import PlannedRun
from paceline.studies.points import worker_counts

SPEC = StudySpec.make(
    {
        "seeds": 2,
        "confirm": 2,
        "base": {"model": "mlp:hidden=4", "data": "synthetic:shape=1x4x4,samples=64"},
        "axes": {"strategy": ["allreduce", "psgd", "hogwild"], "workers": [1, 2]},
    }
)
SECONDS = {"serial": 4.0, "allreduce": 2.4, "psgd": 2.0, "hogwild": 2.1}


def records(**seconds: float) -> dict[str, dict[str, Any]]:
    found = {}
    for setting in SPEC.settings():
        time = {**SECONDS, **seconds}[setting.strategy]
        time = time if setting.workers > 1 else 4.0
        for seed in SPEC.seeds:
            found[PlannedRun(setting, seed).name] = run(
                setting.strategy, setting.workers, time * (1 + 0.01 * seed)
            )
    return found


def test_serial_and_the_fastest_are_chosen() -> None:
    assert [c.name for c in candidates(SPEC, records())] == [
        "serial x 1",
        "psgd x 2",
        "hogwild x 2",
    ]
    assert [c.name for c in candidates(replace(SPEC, confirm=1), records())] == [
        "serial x 1",
        "psgd x 2",
    ]


def test_of_settings_that_may_be_as_fast_the_most_accurate_is_chosen() -> None:
    found = records(psgd=2.0, hogwild=2.01, allreduce=2.02)
    for (name, record), factor in zip(sorted(found.items()), cycle((1.0, 1.1, 1.05)), strict=False):
        result = record["result"]
        result["steady_samples_per_s"] = factor * result["samples_per_s"]
        value = 0.99 if name.startswith("allreduce-p2") else 0.9
        result["metric"] = {"name": "accuracy", "value": value, "higher_is_better": True}
    assert "allreduce x 2" in [c.name for c in candidates(SPEC, found)]


def test_how_many_may_be_as_fast_as_the_first() -> None:
    apart = [[0.60, 0.61, 0.59], [0.30, 0.31, 0.29]]
    assert nearest(apart) == 1
    close = [[0.60, 0.65, 0.55], [0.58, 0.61, 0.55], [0.2, 0.22, 0.18]]
    assert nearest(close) == 2
    assert nearest([[0.6], [0.5]]) == 1  # one run each: nothing tells them apart but the order


def test_one_worker_is_serial_again() -> None:
    found = records()
    for name in found:
        if "-p1-" in name and not name.startswith("serial"):
            found[name] = run("psgd", 1, 0.5)
    assert [c.name for c in candidates(SPEC, found)][1:] == ["psgd x 2", "hogwild x 2"]


def test_a_setting_that_failed_once_is_not_chosen() -> None:
    found = records()
    name = next(n for n in found if n.startswith("psgd-p2"))
    found[name] = run("psgd", 2, error="no")
    assert "psgd x 2" not in [c.name for c in candidates(SPEC, found)]


def test_without_serial_nothing_is_chosen() -> None:
    found = {n: r for n, r in records().items() if not n.startswith("serial")}
    assert candidates(SPEC, found) == []


def test_a_study_that_goes_on_keeps_its_settings() -> None:
    begun = ["serial x 1", "allreduce x 2"]
    assert [c.name for c in candidates(SPEC, records(), begun)] == begun


def block(number: int, *ratios: float, disturbed: bool = False) -> Block:
    speeds = dict(zip(("serial x 1", "psgd x 2", "hogwild x 2"), (1.0, *ratios), strict=True))
    return Block(number, list(speeds), speeds, 30.0, 0.0, 0.0, 0, disturbed)


def test_the_noisier_setting_fixes_the_number_of_blocks(tmp_path: Path) -> None:
    chosen = candidates(SPEC, records())
    calm = [block(n, 1.5 + 0.001 * n, 1.4 + 0.001 * n) for n in range(PILOT)]
    assert Confirmation(SPEC, chosen, tmp_path, calm[:2]).wanted == PILOT
    assert Confirmation(SPEC, chosen, tmp_path, calm).wanted == PILOT
    noisy = [block(n, 1.5, 1.0 + 0.2 * n) for n in range(PILOT)]
    wanted = Confirmation(SPEC, chosen, tmp_path, noisy).wanted
    assert wanted > PILOT
    # what comes after the pilot changes nothing
    more = [*noisy, *(block(n, 1.5, 9.0) for n in range(PILOT, PILOT + 3))]
    assert Confirmation(SPEC, chosen, tmp_path, more).wanted == wanted


def test_a_damaged_record_of_blocks_is_refused_in_a_sentence(tmp_path: Path) -> None:
    speeds = {"serial x 1": 1.0, "psgd x 2": 2.0}
    whole = {
        "number": 0, "order": list(speeds), "samples_per_s": speeds, "seconds": 1.0,
        "foreign": None, "stolen": None, "repeats": 0, "disturbed": False,
    }  # fmt: skip
    about = {
        "serial": "serial x 1", "settings": ["psgd x 2"], "width": 0.1, "wanted": 5,
        "block_s": 1.0, "ended": "budget",
    }  # fmt: skip
    runs = [run("serial", 1, 4.0), run("psgd", 2, 2.0)]
    study = read_study(write_study(tmp_path / "a", runs, confirm={**about, "blocks": [whole] * 2}))
    assert study.confirmed == ["serial x 1", "psgd x 2"]
    for number, wrong in enumerate(
        ({"samples_per_s": {"serial x 1": 0, "psgd x 2": 1}}, {"repeats": "two"}, {"order": 3})
    ):
        folder = tmp_path / str(number)
        write_study(folder, runs, confirm={**about, "blocks": [{**whole, **wrong}]})
        with pytest.raises(BadRequest, match=r"study\.json"):
            read_study(folder)
    lacking = {**whole, "samples_per_s": {"serial x 1": 1.0}}
    kept = read_study(write_study(tmp_path / "b", runs, confirm={**about, "blocks": [lacking] * 3}))
    assert kept.confirmed == []


class Always:
    def shares(self) -> Foreign:
        return Foreign(0.2, 0.1)


def test_a_disturbed_block_is_run_again_and_then_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "ForeignCpu", Always)
    ran: list[str] = []

    def counted(self: Confirmation, candidate: Any, number: int, listen: Any) -> dict[str, Any]:
        ran.append(candidate.name)
        return run("x", 2, 2.0)

    monkeypatch.setattr(Confirmation, "_run", counted)
    said: list[str] = []
    found = Confirmation(SPEC, candidates(SPEC, records()), tmp_path)
    made = found.next(1e9, said.append, None)
    assert (made.disturbed, made.repeats, len(ran)) == (True, MOST_REPEATS, 9)
    assert said == ["block 1 is run again: others took 30% of the machine"] * MOST_REPEATS
    assert len({tuple(ran[i : i + 3]) for i in (0, 3, 6)}) > 1  # each attempt has its own order
    hurried = Confirmation(SPEC, candidates(SPEC, records()), tmp_path)
    assert hurried.next(1.0, said.append, None).repeats == 0  # no time left for a repeat
    kept = json.loads(json.dumps(found.described("budget")))
    assert blocks_of(kept) == found.blocks


def test_own_work_is_not_foreign() -> None:
    watch = ForeignCpu()
    total = 0
    for n in range(3_000_000):
        total += n
    found = watch.shares()
    assert found is None or (0 <= found.used <= 1 and 0 <= found.stolen <= 1)


@pytest.mark.processes
def test_what_another_process_uses_is_foreign() -> None:
    """A process that is not our child: its parent has ended, so init owns it."""
    import subprocess
    import sys
    import time

    import psutil

    starts = (
        "import subprocess as s, sys;"
        " p = s.Popen([sys.executable, '-c', 'while True: pass'], stdout=s.DEVNULL); print(p.pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    busy = psutil.Process(int(done.stdout))
    try:
        watch = ForeignCpu()
        begun = sum(busy.cpu_times()[:2])
        while (used := sum(busy.cpu_times()[:2]) - begun) < 0.5:
            time.sleep(0.02)
        found = watch.shares()
        assert found is not None
        capacity = psutil.cpu_count() * 60  # of a minute, which is more than it took
        assert found.used > used / capacity
    finally:
        busy.kill()


def test_workers_by_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.studies.points.cores", lambda: 2)
    assert worker_counts([1, 2, "cores", "2*cores", "2 * cores"]) == [1, 2, 4]
    assert worker_counts(3) == 3
    with pytest.raises(BadRequest, match="write a number, cores"):
        worker_counts("x*cores")


@pytest.mark.processes
def test_a_study_confirms_in_blocks_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the in-process transport: screened, confirmed, and continued without running anything."""
    from paceline.studies.runner import run_study

    monkeypatch.setattr(confirm, "DISTURBED", 2.0)
    monkeypatch.setattr(confirm, "PILOT", 3)
    base = {
        "model": "mlp:hidden=4", "data": "synthetic:shape=1x4x4,samples=64",
        "global_batch_size": 16, "transport": "inproc", "sample_every_s": 0, "epochs": 1,
    }  # fmt: skip
    spec = StudySpec.make(
        {
            "confirm": 1,
            "all_cores": False,
            "base": base,
            "axes": {"strategy": ["allreduce"], "workers": [2]},
        }
    )
    spec = replace(spec, block="0.2s", width=20.0)  # the pilot is enough, also on a busy machine
    monkeypatch.setattr(confirm, "LEAST_S", 0.01)
    run_study(spec, tmp_path / "s")
    about = json.loads((tmp_path / "s" / "study.json").read_text())["confirm"]
    assert (about["serial"], about["settings"]) == ("serial x 1", ["allreduce x 2"])
    assert len(about["blocks"]) >= 3
    assert about["ended"] == "enough"
    study = read_study(tmp_path / "s")
    assert study.confirmed
    again = run_study(spec, tmp_path / "s")
    assert len(again) == 2
    assert len(json.loads((tmp_path / "s" / "study.json").read_text())["confirm"]["blocks"]) == len(
        about["blocks"]
    )
