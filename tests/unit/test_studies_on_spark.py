"""A study whose runs are on a Spark cluster: how they are started, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from tests.records import run as record_of_a_run

from paceline.errors import BadRequest
from paceline.studies import runner
from paceline.studies.grid import StudySpec
from paceline.studies.runner import run_study

SPEC = {
    "all_cores": False,
    "base": {"launcher": "spark", "master": "spark://a:1", "data": "fashion-mini", "steps": 2},
    "axes": {"strategy": ["stepwise"], "workers": [3]},
}


def test_every_run_goes_to_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(runner, "prepare_data", lambda given, *_: prepared.append(given["out"]))
    started: list[dict[str, Any]] = []

    def elsewhere(options: dict[str, Any], listen: Any) -> dict[str, Any]:
        listen("notice", {"text": "hello"})
        listen("line", {"text": "a line"})
        started.append(options)
        return record_of_a_run(str(options["strategy"]), int(options["workers"]))

    spec = StudySpec.make({**SPEC, "prepare": {"what": "flights", "out": "x"}})
    records = run_study(spec, tmp_path / "study", elsewhere=elsewhere)
    assert len(records) == 2
    assert prepared == ["x"]
    assert {(o["strategy"], o["workers"]) for o in started} == {("serial", 1), ("stepwise", 3)}
    assert {o["launcher"] for o in started} == {"spark"}
    assert all(str(tmp_path) in o["out"] for o in started)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"budget": "10min"}, "confirms none"),
        ({"base": {**SPEC["base"], "launcher": "ray", "master": "auto"}}, "launcher=ray"),  # type: ignore[dict-item]
        (
            {"base": {**SPEC["base"], "privacy": "epsilon=3,delta=1e-5", "batch_size": 8}},  # type: ignore[dict-item]
            "with privacy runs on this machine only",
        ),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(
    more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadRequest, match=said):
        run_study(StudySpec.make({**SPEC, **more}), tmp_path / "study")
    assert not (tmp_path / "study").exists()
