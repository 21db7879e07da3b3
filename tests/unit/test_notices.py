"""The notices of a run, kept in its folder."""

from pathlib import Path

from paceline.record.notices import NAME, Notices
from paceline.record.reader import read_events


def test_notices_and_epsilon_are_kept(tmp_path: Path) -> None:
    notices = Notices(tmp_path, 1)
    notices.take("evaluation", {"loss": 1.0})
    notices.take("progress", {"step": 1, "loss": 2.0})
    assert not (tmp_path / "events").exists(), "nothing to keep: no file"
    notices.take("notice", {"text": "oversubscribed"})
    notices.take("waiting", {"text": "worker 0 waits for worker 1"})
    notices.take("lost", {"rank": 1})
    notices.take("progress", {"step": 2, "loss": None, "epsilon": 0.5})
    notices.close()
    damaged: list[str] = []
    found = read_events(tmp_path / "events" / NAME, damaged)
    assert [(e["kind"], e["session"]) for e in found] == [*[("notice", 1)] * 3, ("privacy", 1)]
    assert found[2]["text"] == "rank 1 has ended; the others go on"
    assert (found[3]["epsilon"], damaged) == (0.5, [])


def test_a_folder_that_cannot_be_written_loses_notices_only(tmp_path: Path) -> None:
    (tmp_path / "events").touch()
    notices = Notices(tmp_path, 0)
    notices.take("notice", {"text": "oversubscribed"})
    notices.close()
    assert (tmp_path / "events").read_bytes() == b""  # the file in its way is left as it was


def test_a_run_keeps_its_notices_and_its_number_of_steps(run_inproc) -> None:
    run = run_inproc(
        epochs=2, strategy="allreduce", workers=2, privacy="noise=1.0,clip=0.5,secure=false"
    )
    kept = read_events(run.out / "events" / NAME)
    assert any(e["kind"] == "notice" and "NOT PRIVATE" in e["text"] for e in kept)
    assert [e["epsilon"] for e in kept if e["kind"] == "privacy"][-1] > 0
    started = next(
        e for e in read_events(run.out / "events" / "worker-0.jsonl") if e["kind"] == "start"
    )
    assert started["total_steps"] == run.steps
