"""The contract of resuming: what every strategy declares in `Traits.resumes`, it keeps.

    exact     the weights are those of a run that never stopped, bit for bit
    told      the run goes on to its end, and a notice says what is not as it was
    refused   one sentence, and the folder is left as it was

ddp, which needs processes, is in tests/multiprocess/test_resume_on_processes.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_strategies import RunInproc, identical, net_with_dropout

from paceline.errors import BadRequest, DataCorrupt, PacelineError
from paceline.record import checkpoint
from paceline.registry import strategies
from paceline.strategies.base import Resume
from paceline.strategies.diloco import DiLoCo

SPECS = [
    "serial",
    "allreduce",
    "allreduce:exchange=weights",
    "allreduce:when=epoch",
    "ring-reduce",
    "local-sgd:every=3",
    "local-sgd:every=2,post=3,optimizer_state=average",
    "diloco:every=3",
    "stepwise",
    "stepwise:full_every=4",
    "psgd",
    "gossip",
    "gossip:topology=ring,every=2",
    "hogwild",
    "hogwild:optimizer_state=shared",
    "ps",
    "ps:exchange=weights",
    "ps:consistency=ssp,staleness=1",
    "ps:consistency=async",
]
CODECS = [
    ("allreduce", "topk:ratio=0.1"),
    ("allreduce", "powersgd:rank=1"),
    ("allreduce:exchange=weights", "int8"),
    ("local-sgd:every=3", "int8:feedback=true"),
    ("diloco:every=3", "sign"),
    ("stepwise", "fp16"),
    ("gossip", "int8"),
    ("ps", "topk:ratio=0.1"),
    ("ps:consistency=async", "int8"),
]
STOP, END = 6, 14


def test_every_strategy_is_here() -> None:
    named = {spec.partition(":")[0] for spec in SPECS}
    assert named | {"ddp"} >= set(strategies.names())


def declared(spec: str, cell: str) -> Resume:
    answer: Resume = getattr(strategies.build(spec).traits.resumes, cell)
    return answer


def options(spec: str, codec: str = "none", workers: int = 2) -> dict[str, Any]:
    return {
        "model": lambda: net_with_dropout(0.3),
        "strategy": spec,
        "codec": codec,
        "workers": 1 if spec == "serial" else workers,
        "lr": 0.05,
        "momentum": 0.9,
    }


def notices(run: Any, about: str = "going on from step") -> list[str]:
    """What the last session of a run told its user about something."""
    path = Path(run.out) / "events" / "notices.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = run.record["sessions"] - 1 if isinstance(run.record.get("sessions"), int) else None
    return [
        n["text"]
        for n in found
        if n["kind"] == "notice" and about in n["text"] and last in (None, n["session"])
    ]


@pytest.mark.parametrize(("spec", "codec"), [*((s, "none") for s in SPECS), *CODECS])
@pytest.mark.sampled(2)
def test_with_the_same_workers(
    run_inproc: RunInproc, tmp_path: Path, spec: str, codec: str
) -> None:
    asked, out = options(spec, codec), str(tmp_path / "run")
    run_inproc(**asked, steps=STOP, checkpoint_every=STOP, out=out)
    resumed = run_inproc(**asked, steps=END, resume=out, out=out)
    assert resumed.steps == END
    if declared(spec, "same") == "exact":
        whole = run_inproc(**asked, steps=END)
        assert identical(resumed.weights, whole.weights)
        assert resumed.samples == whole.samples
        assert not notices(resumed)
    else:
        assert "depends on the workers' speeds" in notices(resumed)[0]


@pytest.mark.parametrize(
    ("spec", "codec"), [*((s, "none") for s in SPECS if s != "serial"), *CODECS]
)
@pytest.mark.sampled(3)
def test_with_other_workers(run_inproc: RunInproc, tmp_path: Path, spec: str, codec: str) -> None:
    run_inproc(
        **options(spec, codec, 3), steps=STOP, checkpoint_every=STOP, out=str(tmp_path / "2")
    )
    shutil.copytree(tmp_path / "2", tmp_path / "4")
    for now in (2, 4):
        assert declared(spec, "fewer" if now < 3 else "more") == "told"
        out = str(tmp_path / str(now))
        resumed = run_inproc(**options(spec, codec, now), steps=END, resume=out, out=out)
        (said,) = notices(resumed)
        assert f"{now} workers instead of 3" in said
        assert resumed.steps == END
        assert resumed.test_accuracy is not None


@pytest.mark.parametrize(("spec", "codec"), [*((s, "none") for s in SPECS), *CODECS[:3]])
@pytest.mark.sampled(2)
def test_with_a_damaged_newest_checkpoint(
    run_inproc: RunInproc, tmp_path: Path, spec: str, codec: str
) -> None:
    asked, out = options(spec, codec), tmp_path / "run"
    run_inproc(**asked, steps=2 * STOP, checkpoint_every=STOP, out=str(out))
    newest = out / "checkpoints" / f"step-{2 * STOP:08d}"
    file = newest / "worker-0.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    resumed = run_inproc(**asked, steps=END, resume=str(out), out=str(out))
    told = notices(resumed, "damaged")
    assert len(told) == 1
    assert newest.name in told[0]
    assert f"step-{STOP:08d}" in told[0]
    assert resumed.steps == END
    if declared(spec, "damaged") == "exact":
        assert identical(resumed.weights, run_inproc(**asked, steps=END).weights)


@pytest.mark.parametrize(
    ("spec", "codec"),
    [
        (s, c)
        for s, c in [*((s, "none") for s in SPECS), *CODECS]
        if strategies.build(s).traits.survives
    ],
)
@pytest.mark.parametrize("now", [2, 3])
def test_after_a_survived_loss(
    run_inproc: RunInproc, tmp_path: Path, spec: str, codec: str, now: int
) -> None:
    out = tmp_path / "run"
    asked = options(spec, codec, 3)
    faults = {"faults": "die:rank=1,step=3"}
    run_inproc(**asked, **faults, steps=STOP, checkpoint_every=STOP, out=str(out))
    folder = out / "checkpoints" / f"step-{STOP:08d}"
    assert json.loads((folder / "checkpoint.json").read_text())["members"] == [0, 2]
    assert declared(spec, "after_loss") == "told"
    resumed = run_inproc(**options(spec, codec, now), steps=END, resume=str(out), out=str(out))
    (said,) = notices(resumed)
    assert ("worker 1 had been lost" if now == 3 else "2 workers instead of 3") in said
    assert resumed.steps == END
    assert not resumed.record.get("lost")


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s != "serial" and not strategies.build(s).traits.survives]
)
def test_after_a_loss_that_ends_the_run(run_inproc: RunInproc, tmp_path: Path, spec: str) -> None:
    asked, out = options(spec), str(tmp_path / "run")
    with pytest.raises(PacelineError):
        run_inproc(
            **asked, steps=END, checkpoint_every=STOP, faults=f"die:rank=1,step={STOP + 3}", out=out
        )
    resumed = run_inproc(**asked, steps=END, resume=out, out=out, faults=())
    if declared(spec, "after_loss") == "exact":
        assert identical(resumed.weights, run_inproc(**asked, steps=END).weights)
    assert resumed.steps == END


def test_another_strategy_is_refused_by_name_and_nothing_is_lost(
    run_inproc: RunInproc, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run_inproc(**options("local-sgd"), steps=20, checkpoint_every=10, out=str(out))
    before = sorted((out / "checkpoints").rglob("*"))
    with pytest.raises(BadRequest, match=r"made with local-sgd.*diloco cannot go on"):
        run_inproc(**options("diloco"), steps=30, resume=str(out / "checkpoints" / "step-00000010"))
    with pytest.raises(BadRequest, match=r"made with local-sgd.*ps cannot go on"):
        run_inproc(**options("ps"), steps=30, resume=str(out))  # its servers are not local-sgd's 0
    assert sorted((out / "checkpoints").rglob("*")) == before


@pytest.mark.parametrize("now", ["serial", "gossip", "psgd"])
def test_a_strategy_that_needs_no_memory_goes_on_from_any(
    run_inproc: RunInproc, tmp_path: Path, now: str
) -> None:
    out = str(tmp_path / "run")
    before = options("local-sgd", workers=1 if now == "serial" else 2)
    run_inproc(**before, steps=6, checkpoint_every=6, out=out)
    run = run_inproc(**options(now), steps=9, resume=out, out=out)
    assert run.steps == 9
    assert f"{now} goes on from a checkpoint of local-sgd" in notices(run)[0]


def test_later_checkpoints_stay_until_a_new_one_is_whole(
    run_inproc: RunInproc, tmp_path: Path
) -> None:
    out, asked = tmp_path / "run", options("allreduce")
    run_inproc(**asked, steps=12, checkpoint_every=6, out=str(out))
    first = str(out / "checkpoints" / "step-00000006")
    with pytest.raises(PacelineError):
        run_inproc(**asked, steps=20, resume=first, out=str(out), faults="die:rank=1,step=9")
    assert (out / "checkpoints" / "step-00000012").is_dir()
    again = {"checkpoint_every": 10, "faults": ()}
    run_inproc(**asked, **again, steps=20, resume=first, out=str(out))
    names = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert names == ["step-00000010", "step-00000020"]


def test_a_checkpoint_of_the_same_step_is_replaced_when_its_successor_is_whole(
    tmp_path: Path,
) -> None:
    about = {"workers": 1, "members": [0], "train_s": 0.0, "optimizer": "SGD", "samples": 1}
    for value in (1.0, 2.0):
        weights = {"w": torch.full((1,), value)}
        checkpoint.save(tmp_path, 5, 0, weights, {}, {"step": 5, **about}, lambda: None)
    (only,) = tmp_path.iterdir()
    assert float(checkpoint.load_weights(only / "model.safetensors")["w"]) == 2.0
    # killed between the two renames: the old one gets its name back
    (tmp_path / "run").mkdir()
    only.rename(tmp_path / "run" / ".step-00000005.old")
    (tmp_path / "run").rename(tmp_path / "checkpoints")
    found, notice = checkpoint.latest(tmp_path)
    assert found.name == "step-00000005"
    assert notice is None


def test_a_damaged_checkpoint_that_is_named_is_refused(
    run_inproc: RunInproc, tmp_path: Path
) -> None:
    out, asked = tmp_path / "run", options("allreduce")
    run_inproc(**asked, steps=6, checkpoint_every=6, out=str(out))
    folder = out / "checkpoints" / "step-00000006"
    (folder / "worker-1.pt").unlink()
    with pytest.raises(DataCorrupt, match=r"worker-1\.pt cannot be read"):
        run_inproc(**asked, steps=9, resume=str(folder))
    with pytest.raises(DataCorrupt, match="has no checkpoint that can be used"):
        run_inproc(**asked, steps=9, resume=str(out))
    shutil.rmtree(folder)


@pytest.mark.parametrize("servers", [1, 3])
def test_servers_go_on_with_their_optimizer(
    run_inproc: RunInproc, tmp_path: Path, servers: int
) -> None:
    """An optimizer's memory is kept by tensor, so any number of servers can go on with it."""
    asked, out = options("ps"), str(tmp_path / "run")
    run_inproc(**asked, servers=2, steps=STOP, checkpoint_every=STOP, out=out)
    resumed = run_inproc(**asked, servers=servers, steps=END, resume=out, out=out)
    whole = run_inproc(**asked, servers=2, steps=END)
    assert identical(resumed.weights, whole.weights)


def test_outer_momentum_is_kept_by_other_workers(
    run_inproc: RunInproc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DiLoCo's outer momentum is the same on all workers: 2 workers or 3 go on with it."""
    out = tmp_path / "run"
    run_inproc(**options("diloco:every=3"), steps=STOP, checkpoint_every=STOP, out=str(out))
    seen: dict[int, Any] = {}
    set_up = DiLoCo.setup

    def setup(self: DiLoCo, ctx: Any, replica: Any, saved: Any = None) -> None:
        set_up(self, ctx, replica, saved)
        seen[ctx.worker_index] = [v.clone() for v in self._velocity]

    monkeypatch.setattr(DiLoCo, "setup", setup)
    asked = options("diloco:every=3", workers=3)
    run_inproc(**asked, steps=STOP + 1, resume=str(out), out=str(tmp_path / "other"))
    own = torch.load(out / "checkpoints" / f"step-{STOP:08d}" / "worker-0.pt", weights_only=True)[
        "strategy"
    ]["velocity"]
    assert len(seen) == 3
    assert any(bool(v.any()) for v in own)
    assert all(torch.equal(a, b) for mine in seen.values() for a, b in zip(mine, own, strict=True))
