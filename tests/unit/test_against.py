"""Two versions against each other: the verdict, the settings, bad input."""

import json
import math
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.records import run

from paceline.cli.against import check_against
from paceline.errors import BadRequest, RunFailed
from paceline.registry import Spec
from paceline.studies import against, confirm
from paceline.studies.against import chosen_settings, judged, limit_of, measure_against
from paceline.studies.grid import StudySpec
from paceline.studies.versions import OTHER, THIS, Version, toml_of

LIMIT = limit_of("slower=5%")


def spec(**known: Any) -> StudySpec:
    base = {"model": "mlp:hidden=4", "data": "synthetic:shape=1x4x4,samples=64"}
    axes = {"strategy": ["serial", "allreduce"], "workers": [1, 2]}
    return StudySpec.make({"base": base, "axes": axes, "all_cores": False, **known})


def test_a_limit() -> None:
    assert limit_of("slower=5%") == limit_of(" slower = 5.0 % ") == math.log1p(0.05)
    for bad in ("", "slower", "slower=5", "slower=-5%", "slower=0%", "faster=5%", "slower=x%"):
        with pytest.raises(BadRequest, match="write slower=5%"):
            limit_of(bad)


def test_only_an_interval_wholly_beyond_the_limit_fails() -> None:
    found = {
        each.setting: each
        for each in judged(
            {
                "much slower": [-0.2, -0.21, -0.19, -0.2, -0.2],
                "slower, within": [-0.02, -0.021, -0.019, -0.02, -0.02],
                "wide": [-0.5, 0.3, -0.2, 0.1, -0.1],
                "faster": [0.1, 0.11, 0.09, 0.1, 0.1],
                "few": [-0.3, -0.3001],
                "one block": [0.0],
            },
            LIMIT,
        )
    }
    assert {name: each.fails for name, each in found.items()} == {
        "much slower": True, "slower, within": False, "wide": False, "faster": False,
        "few": False,
    }  # fmt: skip
    assert found["much slower"].verdict == "slower by more than 5%"
    assert found["slower, within"].verdict == "slower; a slowdown of 5% is excluded"
    assert found["wide"].verdict == "no difference is shown; a slowdown of 5% is not excluded"
    assert found["faster"].verdict == "faster; a slowdown of 5% is excluded"
    assert found["few"].verdict == "no claim, because that needs 5 blocks"
    assert found["much slower"].counted == "slower in 5 of 5 blocks"
    assert "0.819x as fast as in the other checkout (95% interval 0.8" in (
        found["much slower"].sentence
    )


def test_many_settings_are_corrected_for_their_number() -> None:
    """What fails alone by a little does not fail as the only one of eight."""
    close = [-0.06, -0.16, -0.10, -0.14, -0.07]
    assert judged({"alone": close}, LIMIT)[0].fails
    luck = random.Random(0)
    others = {f"{n}": [luck.gauss(0, 0.05) for _ in range(5)] for n in range(7)}
    assert not judged({"alone": close, **others}, LIMIT)[0].fails


def test_equal_versions_rarely_fail() -> None:
    luck, failed, differed = random.Random(1), 0, 0
    for _ in range(400):
        each = judged({"x": [luck.gauss(0, 0.1) for _ in range(6)]}, LIMIT)[0]
        failed, differed = failed + each.fails, differed + each.differs
    assert failed <= 0.025 * 400
    assert 0 < differed <= 0.07 * 400


def test_the_settings(tmp_path: Path) -> None:
    few = [f"{s.label} x {s.workers}" for s in chosen_settings(spec(), tmp_path)]
    assert sorted(few) == ["allreduce x 1", "allreduce x 2", "serial x 1"]
    many = spec(axes={"strategy": ["serial", "allreduce", "psgd", "hogwild"], "workers": [1, 2]})
    with pytest.raises(BadRequest, match="at most 4; here are"):
        chosen_settings(many, tmp_path)
    kept = {"serial": "serial x 1", "settings": ["psgd x 2"], "blocks": [{}]}
    (tmp_path / "study.json").write_text(json.dumps({"confirm": kept}))
    names = [f"{s.label} x {s.workers}" for s in chosen_settings(many, tmp_path)]
    assert names == ["serial x 1", "psgd x 2"]
    private = spec(base={**spec().base, "privacy": "epsilon=3,delta=1e-5"})
    with pytest.raises(BadRequest, match="each private run spends privacy"):
        chosen_settings(private, tmp_path)


def test_options_as_toml() -> None:
    given = {
        "strategy": Spec("local-sgd", {"every": 8}), "model": 'my "net":é', "epochs": None,
        "plugin": ("a.py",), "lr": 0.1, "overlap": True, "data": {"name": "synthetic", "n": 3},
    }  # fmt: skip
    assert tomllib.loads(toml_of(given)) == {
        "strategy": "local-sgd:every=8", "model": 'my "net":é', "plugin": ["a.py"], "lr": 0.1,
        "overlap": True, "data": "synthetic:n=3",
    }  # fmt: skip


def test_what_is_no_checkout(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadRequest, match="it has no src/paceline"):
            Version.at(path)


class Pretends:
    """Stands in for the interpreters: speeds that are known."""

    def __init__(self, speeds: dict[str, float], steady: bool = True) -> None:
        self.speeds, self.steady, self.ran = speeds, steady, []

    def train(self, version: Version, options: Any, out: Path, deadline_s: float) -> dict:
        self.ran.append((version.name, dict(options)))
        noise = 1 + 0.001 * (len(self.ran) % 3)
        record = run("serial", 1, 2.0 / (noise * self.speeds[version.name]))
        record["result"]["samples_per_s"] = 1000 * noise * self.speeds[version.name]
        record["result"]["wall_s"] = 3.0
        if version.name == THIS or self.steady:
            record["result"]["steady_samples_per_s"] = 7.0 * noise * self.speeds[version.name]
        return record


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    def make(this: float, other: float, **known: Any) -> Pretends:
        found = Pretends({THIS: this, OTHER: other}, **known)
        monkeypatch.setattr(Version, "at", lambda path: Version(OTHER, Path("elsewhere/src")))
        monkeypatch.setattr(Version, "described", lambda self: {"source": str(self.source)})
        monkeypatch.setattr(Version, "train", lambda *given: Pretends.train(found, *given))
        monkeypatch.setattr(confirm, "DISTURBED", 2.0)
        return found

    return make


ONE = {"axes": {"strategy": ["serial"], "workers": [1]}}


def test_a_slower_version_fails_and_is_recorded(pretend, tmp_path: Path) -> None:
    ran = pretend(0.8, 1.0).ran
    found = measure_against(spec(**ONE), "x", tmp_path / "o", limit=LIMIT)
    assert "slower than the other checkout by more than 5%: serial x 1 (0.80x as fast" in (
        found.failure or ""
    )
    kept = json.loads((tmp_path / "o" / "against.json").read_text())
    assert kept["settings"][0]["fails"] is True
    assert kept["settings"][0]["ratio"] == pytest.approx(0.8, rel=0.01)
    assert len(kept["settings"][0]["blocks"]) == confirm.PILOT
    assert (kept["ended"], kept["sentences"]) == ("enough", found.sentences)
    blocks = ran[2:]  # after a trial of each
    for one, other in zip(blocks[::2], blocks[1::2], strict=True):
        assert {one[0], other[0]} == {THIS, OTHER}
        assert one[1] == other[1]  # the same seed, steps and memory format
    assert len({one[0] for one in blocks[::2]}) == 2  # either may come first


def test_equal_versions_do_not_fail(pretend, tmp_path: Path) -> None:
    pretend(1.0, 1.0)
    found = measure_against(spec(**ONE), "x", tmp_path / "o", limit=LIMIT)
    assert found.failure is None
    assert "a slowdown of 5% is excluded" in found.sentences[0]
    assert measure_against(spec(**ONE), "x", tmp_path / "o").failure is None  # measured anew


def test_an_older_version_is_compared_by_all_steps(pretend, tmp_path: Path) -> None:
    pretend(1.0, 1.0, steady=False)
    found = measure_against(spec(**ONE), "x", tmp_path / "o")
    assert all(s > 500 for p in found.pairs for b in p.blocks for s in b.samples_per_s.values())
    assert "the speed of all steps is compared" in found.sentences[-1]


def test_a_budget_that_ends_first_says_so(pretend, tmp_path: Path) -> None:
    pretend(1.0, 1.0)
    found = measure_against(spec(**ONE, budget="1s"), "x", tmp_path / "o", limit=math.log(1.001))
    assert [len(p.blocks) for p in found.pairs] == [against.LEAST_BLOCKS]
    text = " ".join(found.sentences)
    assert "is too wide to exclude that this checkout is 0.1% slower" in text
    assert "The budget ended first: `--budget 1min` would give the 5 blocks" in text


def test_a_version_that_cannot_run_it(
    pretend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(1.0, 1.0)

    def fails(version: Version, *rest: Any) -> dict:
        raise RunFailed(f"{version}: no such strategy")

    monkeypatch.setattr(Version, "train", fails)
    with pytest.raises(RunFailed, match=r"serial x 1: this checkout .*: no such strategy"):
        measure_against(spec(**ONE), "x", tmp_path / "o")


def test_a_limit_needs_a_version(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="`fail_if` needs against=CHECKOUT"):
        check_against(spec(**ONE), None, "slower=5%", tmp_path, quiet=True)


def test_the_command_prints_a_table_and_fails(pretend, tmp_path: Path, capsys) -> None:
    pretend(0.8, 1.0)
    with pytest.raises(RunFailed, match="slower than the other checkout by more than 5%"):
        check_against(spec(**ONE), "x", "slower=5%", tmp_path / "o", quiet=False)
    printed = capsys.readouterr()
    assert "slower in 5 of 5 blocks" in printed.out
    assert "against.json" in printed.out
    assert "block 5 of 5" in printed.err


def test_a_folder_of_something_else(pretend, tmp_path: Path) -> None:
    pretend(1.0, 1.0)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(BadRequest, match="holds no study"):
        measure_against(spec(**ONE), "x", tmp_path)
