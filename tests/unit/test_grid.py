"""Study files: the grid that follows from them, and what is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.common.cores import cores
from paceline.errors import BadRequest, UnknownName
from paceline.studies.available import refuse_missing_transport
from paceline.studies.grid import BUILTIN, StudySpec
from paceline.studies.plan import rounds_of
from paceline.studies.runner import run_study
from paceline.transport.mpi.transport import MpiTransport

ROOT = Path(__file__).parent.parent.parent
FILES = [BUILTIN, *sorted((ROOT / "studies").glob("*.toml"))]
SMALL = {
    "base": {"data": "fashion-mini"},
    "axes": {"strategy": ["allreduce", "psgd"], "workers": [1, 2]},
}


def names(study: StudySpec) -> list[tuple[str, int]]:
    return [(s.label, s.workers) for s in study.settings()]


def test_the_grid_is_the_product_and_serial_is_always_there() -> None:
    found = names(StudySpec.make(SMALL))
    assert found[0] == ("serial", 1)
    expected = {("serial", 1), ("allreduce", 1), ("allreduce", 2), ("psgd", 1), ("psgd", 2)}
    assert set(found) == expected | ({(f"serial, threads={cores()}", 1)} if cores() > 1 else set())
    assert len(found) == len(set(found))
    assert len(names(StudySpec.make({**SMALL, "all_cores": False}))) == 5


def test_serial_is_not_multiplied_by_what_it_does_not_know() -> None:
    axes = {"strategy": ["serial", "allreduce"], "workers": [1, 2, 3], "transport": ["shm", "gloo"]}
    found = names(StudySpec.make({"axes": axes, "all_cores": False}))
    assert found.count(("serial", 1)) == 1
    assert len(found) == 1 + 3 * 2
    assert ("allreduce, transport=gloo", 3) in found


def test_serial_has_the_options_that_matter_to_it() -> None:
    axes = {"strategy": ["allreduce"], "workers": [2], "lr": [0.01, 0.1]}
    found = names(StudySpec.make({"axes": axes, "all_cores": False}))
    assert set(found) == {
        ("serial, lr=0.01", 1),
        ("serial, lr=0.1", 1),
        ("allreduce, lr=0.01", 2),
        ("allreduce, lr=0.1", 2),
    }


def test_options_of_choices_are_axes_too() -> None:
    study = StudySpec.make(
        {
            "axes": {"strategy.every": [4, 16]},
            "base": {"strategy": "local-sgd", "workers": 2},
            "all_cores": False,
        }
    )
    assert ("local-sgd:every=16", 2) in names(study)


def test_more_settings_beside_the_grid() -> None:
    study = StudySpec.make(
        {**SMALL, "also": [{"strategy": "ddp", "workers": [2, 3]}], "all_cores": False}
    )
    assert {("ddp", 2), ("ddp", 3)} <= set(names(study))
    alone = StudySpec.make({"also": [{"optimizer": "adam", "lr": [0.1, 0.2]}], "all_cores": False})
    assert len(alone.settings()) == 2


def test_every_run_has_one_thread_per_worker_the_same_batch_and_the_target() -> None:
    study = StudySpec.make({**SMALL, "target_accuracy": 0.5})
    for setting in study.settings():
        assert setting.options["threads"] == 1 or (
            setting.strategy == "serial" and setting.options["threads"] == cores()
        )
        assert setting.options["global_batch_size"] == 120
        assert setting.options["target_accuracy"] == 0.5
    own_batch = StudySpec.make({**SMALL, "base": {"batch_size": 10}})
    assert all("global_batch_size" not in s.options for s in own_batch.settings())


def test_variants_and_changes() -> None:
    table = {
        **SMALL,
        "seeds": 3,
        "cut": "something",
        "short": {"seeds": 1, "axes": {"workers": [2]}},
        "full": {"base": {"epochs": 9}},
    }
    short, full = StudySpec.make(table, variant="short"), StudySpec.make(table, variant="full")
    assert (short.seeds, short.axes["workers"], short.axes["strategy"]) == (
        (0,),
        [2],
        ["allreduce", "psgd"],
    )
    assert (full.seeds, full.base["epochs"], full.base["data"], full.cut) == (
        (0, 1, 2),
        9,
        "fashion-mini",
        "",
    )
    changed = StudySpec.make(table).changed(["lr=0.5", "workers=3"], seeds=2)
    assert {s.workers for s in changed.settings() if s.strategy != "serial"} == {3}
    assert all(float(s.options["lr"]) == 0.5 for s in changed.settings())
    assert changed.seeds == (0, 1)
    with pytest.raises(BadRequest, match=r"no \[full\]"):
        StudySpec.make(SMALL, variant="full")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"axes": {"nosuch": [1]}}, "axis 'nosuch'"),
        ({"axes": {"strategi": ["serial"]}}, "strategy"),
        ({"axes": {"seed": [1, 2]}}, "seeds"),
        ({"axes": {"workers": []}}, "the grid is empty"),
        ({"axes": {"workers": 3}}, "write a list"),
        ({"axes": {"workers.x": [1]}}, "no options of its own"),
        ({"axes": {"workers": [0]}}, "workers=0"),
        ({"base": {"lr": "fast"}}, "lr"),
        ({"base": {"nosuch": 1}}, "option 'nosuch'"),
        ({"nosuch": 1}, "part of a study"),
        ({}, "is empty"),
        ({"title": True}, "title=True is not text"),
        ({"question": 3}, "question=3 is not text"),
        ({"cut": []}, "is not text"),
        ({"all_cores": "no"}, "true or false"),
        ({"budget_s": 60}, 'write it with a unit, budget = "60s"'),
        ({"budget": "soon"}, "budget='soon' is not a number with one of the units s, min, h"),
        ({"budget": "0.1s"}, "budget='0.1s': it must be 1 second or more"),
        ({"confirm": 6}, "confirm=6: write how many settings to confirm, 0 to 5"),
        ({"width": 3}, "width=3: it must be a number between 0.01 and 1"),
        ({"axes": {"workers": ["some cores"]}}, "write a number, cores, or 2\\*cores"),
        ({"seeds": [True]}, "whole numbers"),
        ({"seeds": 10**18}, "at most 10,000"),
        ({"base": {"global_batch_size": []}}, "a number of samples"),
        (
            {"base": {"strategy": "local-sgd", "strategy.nosuch": 1, "workers": 2}},
            "no option 'nosuch'",
        ),
        ({"base": {"workers": "2.5"}}, "workers"),
        ({"seeds": 0}, "seeds=0"),
        ({"seeds": [1, 1]}, "different"),
        ({"scaling": "sideways"}, "strong"),
        ({"target_accuracy": 95}, "between 0 and 1"),
        (
            {
                "axes": {
                    "lr": [i / 1000 for i in range(1, 102)],
                    "momentum": [i / 100 for i in range(50)],
                }
            },
            "10,100 runs; at most 10,000",
        ),
        (
            {
                "axes": {
                    key: [i / 10_000 for i in range(1, 10_000)]
                    for key in ("lr", "momentum", "weight_decay")
                }
            },
            "the study has 999,700,029,999 runs; at most 10,000",
        ),
    ],
)
def test_bad_studies_are_refused_with_a_sentence(table: dict, message: str) -> None:
    with pytest.raises((BadRequest, UnknownName), match=message):
        StudySpec.make(table)


def test_an_option_inside_a_choice_for_all_runs() -> None:
    study = StudySpec.make(
        {
            "base": {"strategy": "local-sgd", "strategy.every": 4, "workers": "2"},
            "axes": {"lr": [0.1]},
        }
    )
    assert {(s.strategy, s.workers) for s in study.settings() if not s.baseline} == {
        ("local-sgd:every=4", 2)
    }


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("variant", ["", "short"])
def test_the_study_files_are_valid(path: Path, variant: str) -> None:
    study = StudySpec.read(path, variant)
    settings = study.settings()
    assert study.title
    assert study.question
    assert any(s.strategy == "serial" and s.options["threads"] == 1 for s in settings)
    assert len({s.slug for s in settings}) == len(settings)


def test_the_built_in_study_has_everything_that_was_promised() -> None:
    study = StudySpec.read(BUILTIN)
    kinds = {s.strategy.split(":")[0] for s in study.settings()}
    assert kinds == {
        "serial",
        "allreduce",
        "ring-reduce",
        "stepwise",
        "ps",
        "psgd",
        "local-sgd",
        "hogwild",
    }
    assert {s.workers for s in study.settings()} == {1, 2, cores(), 2 * cores()}
    assert study.confirms == 2
    for consistency in ("sync", "async", "ssp"):
        assert any(f"consistency={consistency}" in s.strategy for s in study.settings())
    assert study.cut
    assert not StudySpec.read(BUILTIN, "full").cut


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
def test_rounds_hold_every_run_once_in_an_order_of_their_own(seeds: list[int]) -> None:
    rounds = rounds_of(StudySpec.make({**SMALL, "seeds": seeds}))
    assert [r[0].seed for r in rounds] == seeds
    every = [p.name for planned in rounds for p in planned]
    assert len(every) == len(set(every)) == len(seeds) * len(rounds[0])
    assert rounds == rounds_of(StudySpec.make({**SMALL, "seeds": seeds}))


def test_a_study_whose_transport_is_missing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence before the first run, and nothing is left behind."""
    monkeypatch.setattr(MpiTransport, "missing", classmethod(lambda cls: "no mpi4py: get it"))
    spec = StudySpec.read(ROOT / "studies" / "psgd.toml", "short")
    with pytest.raises(BadRequest, match=r"study psgd runs over transport mpi.*no mpi4py: get it"):
        run_study(spec, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    refuse_missing_transport(spec.changed(["transport=auto"]))
    some = {**SMALL, "axes": {**SMALL["axes"], "transport": ["mpi", "shm"]}}
    refuse_missing_transport(StudySpec.make(some))  # the other half of it can be run
    monkeypatch.undo()
    monkeypatch.setattr(MpiTransport, "missing", classmethod(lambda cls: None))
    refuse_missing_transport(spec)
