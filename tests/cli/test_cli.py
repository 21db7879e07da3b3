"""The command line as a new user sees it: one clear sentence for every mistake, the right exit
code, no lost records.
"""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from tests.commands import PACELINE, run
from tests.records import recompute

from paceline import doctor
from paceline.cli.choices import names_of
from paceline.cli.main import COMMANDS
from paceline.cli.main import cli as paceline_cli
from paceline.collectives.base import SCHEDULES
from paceline.data.mnist import FILES, MINI
from paceline.doctor import gpu
from paceline.registry import ALL

QUICK = ["train", "--data", "fashion-mini", "--model", "linear", "--steps", "3", "--threads", "1"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--strategy", "nosuch"], 2, "unknown strategy 'nosuch'"),
        (["--strategy", "alreduce"], 2, "Did you mean 'allreduce'?"),
        (["--strategy", "allreduce:colective=native"], 2, "has no option 'colective'"),
        (
            ["--strategy", "allreduce:collective=nosuch", "--workers", "2"],
            2,
            "unknown collective 'nosuch'",
        ),
        (["--workers", "0"], 2, "workers=0"),
        (["--workers", "2", "--strategy", "serial"], 2, "runs 1 worker"),
        (["--workers", "7000", "--strategy", "allreduce"], 2, "7000 workers for 6000"),
        (["--batch-size", "-1"], 2, "batch_size=-1"),
        (
            ["--batch-size", "4,4", "--strategy", "allreduce", "--workers", "3"],
            2,
            "2 sizes for 3 workers",
        ),
        (["--data", "mnist"], 2, "paceline data fetch mnist"),
        (["--data", "nosuch"], 2, "unknown data source"),
        (["--data", "imagefolder:nowhere"], 2, "no folder nowhere/train"),
        (["--model", "nosuch"], 2, "unknown model"),
        (["--model", "no.such:thing"], 2, "No module named"),
        (["--model", "cnn", "--data", "synthetic:shape=5"], 2, "needs images"),
        (["--set", "nosuch=1"], 2, "unknown option 'nosuch'"),
        (["--set", "strategy.nosuch=1"], 2, "has no option 'nosuch'"),
        (["--optimizer", "adam", "--momentum", "0.9"], 2, "takes no momentum"),
        (["--transport", "pigeon"], 2, "unknown transport"),
        (["--strategy", "ddp", "--transport", "inproc"], 2, "needs real processes"),
        (["--device", "cuda"], 2, "device='cuda' is not available here, use --device cpu"),
        (["--device", "nosuch"], 2, "device='nosuch' is not available here"),
        (["--plugin", "missing.py"], 2, "not a file"),
        (["--resume", "nowhere"], 2, "not a run that can be resumed"),
        (["--until-accuracy", "97"], 2, "between 0 and 1"),
        (["missing.toml"], 2, "does not exist"),
        (["--out", "/proc/nowhere"], 2, "cannot be written"),
        (["--nosuch-flag"], 2, "No such option"),
        pytest.param(
            ["--lr", "1e30", "--weight-decay", "1e30"], 1, "the loss", marks=pytest.mark.processes
        ),
        (["--lr", "1e300"], 2, "between 0 and 1e+30"),
        (["--device", "hpu"], 2, "device='hpu' is not available here, use --device cpu"),
        (["--device", "cpu:7"], 2, "write --device cpu"),
        (["--plugin", "a" * 3000], 2, "(3,002 letters) is not a path"),
        (
            ["--transport", "nccl", "--strategy", "allreduce", "--workers", "2"],
            2,
            "transport nccl is not available here",
        ),
        (["--data-share", "1e-9"], 2, "of 6000 training samples is none"),
        (["--momentum", "1"], 2, "less than 1"),
    ],
)
def test_mistakes(cli, arguments: list[str], code: int, message: str) -> None:
    ended, out, err = cli(*QUICK, *arguments)
    assert ended == code
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err
    assert out == ""


def test_a_truncated_file(cli, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for file in FILES:
        (folder / file).write_bytes(gzip.decompress((MINI / f"{file}.gz").read_bytes()))
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1000])
    code, _, err = cli("train", "--model", "linear")
    assert code == 1
    assert "train-images-idx3-ubyte is truncated" in err
    assert "Traceback" not in err


@pytest.mark.processes
def test_a_model_that_returns_nan(cli, tmp_path: Path) -> None:
    (tmp_path / "bad_model.py").write_text(
        "import torch\nclass Bad(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(784, 10)\n"
        "    def forward(self, x): return super().forward(x.flatten(1)) * float('nan')\n"
    )
    code, _, err = cli(
        "train", "--data", "fashion-mini", "--model", "bad_model:Bad", "--out", "nan-run"
    )
    assert code == 1
    assert "the loss is nan at step 1" in err
    assert json.loads((tmp_path / "nan-run" / "run.json").read_text())["status"] == "failed"


@pytest.mark.processes
def test_a_crash_in_a_persons_code_shows_its_traceback(cli, tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(
        "import torch\nclass Bad(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(784, 10)\n"
        "    def forward(self, x): return undefined_name\n"
    )
    code, _, err = cli("train", "--data", "fashion-mini", "--model", "crashing:Bad")
    assert code == 1
    assert "crashing.py" in err
    assert "worker 0 failed: NameError" in err.splitlines()[-1]


@pytest.mark.processes
def test_json_is_alone_on_standard_output(cli, tmp_path: Path) -> None:
    code, out, err = cli(*QUICK, "--json", "--out", "a")
    assert code == 0
    record = json.loads(out)
    assert record == json.loads((tmp_path / "a" / "run.json").read_text())
    assert record["schema"] == 1
    assert set(record["result"]) >= {
        "test_accuracy", "test_loss", "train_loss", "metric", "steps", "samples", "train_s",
        "wall_s", "samples_per_s", "time_to_accuracy_s", "steps_to_accuracy",
    }  # fmt: skip
    assert set(record["workers"][0]) >= {
        "rank", "role", "host", "samples", "steps", "compute_s", "sync_s", "idle_s", "cpu_percent",
        "cpu_user_s", "cpu_system_s", "rss_peak_bytes", "payload_sent_bytes",
        "payload_received_bytes", "messages_sent", "setup_sent_bytes", "finish_sent_bytes",
        "net_sent_bytes", "net_received_bytes", "disk_read_bytes", "disk_write_bytes",
    }  # fmt: skip
    assert record["config"]["threads"] == 1
    assert "samples per second" in err
    assert {p.name for p in (tmp_path / "a").iterdir()} == {
        "run.json", "config.json", "events", "model.safetensors", "trace.json", ".lock",
    }  # fmt: skip
    assert cli(*QUICK, "--quiet", "--out", "b")[1:] == ("", "")


@pytest.mark.processes
def test_a_folder_is_not_used_twice(cli) -> None:
    assert cli(*QUICK, "--out", "a")[0] == 0
    code, _, err = cli(*QUICK, "--out", "a")
    assert code == 2
    assert "holds a run already" in err


def test_a_full_disk(cli) -> None:
    code, _, err = cli(*QUICK, "--out", "/dev/full/x")
    assert code == 2
    assert "cannot be written" in err


@pytest.mark.processes
def test_toml_flags_and_set(cli, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'data = "fashion-mini"\nsteps = 2\nlr = 0.5\n[model]\nname = "mlp"\nhidden ='
        ' "8x4"\n[strategy]\nname = "allreduce"\n'
    )
    code, out, _ = cli(
        "train", "run.toml", "--lr", "0.25", "--set", "model.activation=tanh", "--json", "--quiet"
    )
    assert code == 0
    config = json.loads(out)["config"]
    assert (config["lr"], config["model"], config["strategy"]) == (
        0.25,
        "mlp:hidden=8x4,activation=tanh",
        "allreduce",
    )


@pytest.mark.processes
def test_resume_is_bit_identical_with_one_worker(cli, tmp_path: Path) -> None:
    """With dropout, momentum and an LR schedule, a run that is resumed at step 30 ends with the
    same bytes as one that was not stopped.
    """
    common = [
        "train",
        "--data",
        "fashion-mini",
        "--threads",
        "1",
        "--lr-schedule",
        "cosine",
        "--batch-size",
        "32",
        "--steps",
        "60",
    ]
    assert cli(*common, "--memory-format", "channels_last", "--out", "whole")[0] == 0
    assert (
        cli(
            *common, "--memory-format", "channels_last", "--checkpoint-every", "30", "--out", "part"
        )[0]
        == 0
    )
    final = (tmp_path / "part" / "model.safetensors").read_bytes()
    for late in (tmp_path / "part" / "checkpoints").glob("step-00000060"):
        for file in late.iterdir():
            file.unlink()
        late.rmdir()
    assert cli("train", "--resume", "part")[0] == 0
    assert (
        (tmp_path / "part" / "model.safetensors").read_bytes()
        == final
        == (tmp_path / "whole" / "model.safetensors").read_bytes()
    )
    record = json.loads((tmp_path / "part" / "run.json").read_text())
    assert (record["result"]["steps"], record["result"]["samples"]) == (60, 1920)


@pytest.mark.processes
def test_stopping_rules(cli) -> None:
    code, out, _ = cli(
        "train", "--data", "fashion-mini", "--model", "mlp", "--lr", "0.05",
        "--until-accuracy", "0.7", "--evaluate-every", "20", "--json", "--quiet",
    )  # fmt: skip
    result = json.loads(out)["result"]
    assert code == 0
    assert result["test_accuracy"] >= 0.7
    assert result["steps_to_accuracy"] == result["steps"]
    assert 0 < result["time_to_accuracy_s"] <= result["train_s"]
    assert result["steps"] % 20 == 0
    code, out, _ = cli(
        "train", "--data", "synthetic:shape=4,classes=2,samples=64", "--model", "linear",
        "--batch-size", "all", "--optimizer", "sgd", "--lr", "0.5", "--until-converged", "0.02",
        "--json", "--quiet",
    )  # fmt: skip
    result = json.loads(out)["result"]
    assert code == 0
    assert 1 < result["steps"] < 100, (
        "full-batch descent: one step per epoch, until an epoch changes little"
    )
    assert result["samples"] == 64 * result["steps"]


@pytest.mark.processes
def test_a_strategy_from_a_file(cli, tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text('''
from dataclasses import dataclass
from typing import Annotated
from paceline.registry import strategies
from paceline.strategies.base import Strategy

@strategies.register("lazy-allreduce")
@dataclass
class Lazy(Strategy):
    """Sums gradients every so many steps only."""
    every: Annotated[int, "steps between two sums"] = 2

    def step(self, replica, batch):
        if batch.step % self.every == 0:
            for region in replica.regions:
                self.ctx.peers.all_reduce(region.grads)
        replica.update()
''')
    code, out, _ = cli("list", "strategies", "--plugin", "lazy.py")
    assert code == 0
    assert "lazy-allreduce" in out
    assert "every=2" in out
    code, out, err = cli(
        *QUICK,
        "--plugin",
        "lazy.py",
        "--strategy",
        "lazy-allreduce:every=3",
        "--workers",
        "2",
        "--json",
        "--quiet",
    )
    assert code == 0, err
    assert json.loads(out)["config"]["strategy"] == "lazy-allreduce:every=3"


def every_command() -> list[tuple[str, ...]]:
    """The words of every command and of every command of a group."""
    top = click.Context(paceline_cli)
    found: list[tuple[str, ...]] = []
    for name in COMMANDS:
        command = paceline_cli.get_command(top, name)
        found.append((name,))
        if isinstance(command, click.Group):
            found += [(name, inner) for inner in command.list_commands(top)]
    return found


def test_every_command_has_help_with_an_example(cli) -> None:
    for words in [(), *every_command()]:
        code, out, _ = cli(*words, "--help")
        assert code == 0
        assert "Usage: " in out
        _, heading, examples = out.partition("Example")
        assert heading, f"paceline {' '.join(words)} --help has no example"
        shown = examples.partition("Options:")[0]
        assert f"paceline {' '.join(words)}" in shown, f"no example of {words}"


def test_every_option_says_what_it_is_for() -> None:
    top = click.Context(paceline_cli)
    for words in every_command():
        command: Any = paceline_cli
        for word in words:
            command = command.get_command(top, word)
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert [o.opts for o in options if not o.help] == [], words
        assert [o.opts for o in options if o.metavar == "TEXT"] == [], words


def test_help_shows_choices(cli) -> None:
    out = " ".join(cli("train", "--help")[1].split())
    for shown in (
        "--transport [auto|emulated|gloo|inproc|mpi|nccl|shm|simulated]",
        "--partition [iid|by-label]",
        "--init [broadcast|seed]",
        "--overlap [auto|on|off]",
        "--strategy NAME[:key=value,...] how the workers keep together: allreduce, ddp,",
        "--lr-schedule NAME[:key=value,...] the LR schedule: constant, cosine, one- cycle,",
    ):
        assert shown in out
    assert "--model NAME[:key=value,...]" in cli("bench", "codecs", "--help")[1]


def test_names_in_help_are_those_that_are_registered() -> None:
    for plural, registry in ALL.items():
        own = [e.name for e in registry if e.make.__module__.startswith("paceline.")]
        assert names_of(plural) == own, plural


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "unknown command 'trian'. Did you mean 'train'?"),
        ("list strateges", "unknown list 'strateges'. Did you mean 'strategies'?"),
        ("bench codex", "unknown benchmark 'codex'. Did you mean 'codecs'?"),
        ("explain rign", "unknown schedule 'rign'. Did you mean 'ring'?"),
        ("data fech", "unknown command of data 'fech'. Did you mean 'fetch'?"),
        ("completion bsh", "unknown shell 'bsh'. Did you mean 'bash'?"),
        ("train --stratgy x", "Did you mean one of: '--strategy'"),
        ("bench codecs --round 1", "'--rounds'?"),
    ],
)
def test_a_name_that_is_nearly_right(cli, words: str, message: str) -> None:
    code, out, err = cli(*words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_lists(cli) -> None:
    code, out, _ = cli("list")
    assert code == 0
    assert "allreduce" in out
    code, out, _ = cli("list", "models", "--json")
    assert json.loads(out)["mlp"]["options"]["hidden"]["default"] == [256, 128]
    for kind in ("collectives", "codecs", "transports", "data", "optimizers"):
        assert cli("list", kind)[0] == 0


def test_doctor_without_a_gpu(cli) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch has CUDA")
    code, out, err = cli("doctor", "--gpu")
    assert (code, out) == (2, "")
    assert err.startswith("paceline: there is no GPU to check here (this PyTorch is built without")
    assert err.count("\n") == 1
    assert cli("doctor", "--out", "a.json")[::2] == (
        2,
        "paceline: --out belongs to --gpu and to --cluster: paceline doctor --gpu\n",
    )
    code, _, err = cli("doctor", "--gpu", "--device", "cpu", "--out", "nosuch/a.json")
    assert (code, err) == (2, "paceline: --out nosuch/a.json: there is no folder nosuch\n")


def test_doctor_of_a_cluster_without_a_launcher(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = cli("doctor", "--cluster")
    assert code == 1
    assert err == "missing: launcher, torchrun, mpirun, srun\n"
    for words in ("no launcher has started", "SLURM_PROCID", "mpirun -n 2 paceline doctor"):
        assert words in " ".join(out.replace("│", " ").split())
    code, out, _ = cli("doctor", "--cluster", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)
    for words, sentence in (
        (["--cluster", "--gpu"], "--cluster and --gpu are two checks: make one after the other"),
        (["--wait", "5"], "--wait and --insecure belong to --cluster: paceline doctor --cluster"),
    ):
        assert cli("doctor", *words)[::2] == (2, f"paceline: {sentence}\n")


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (None, 0), (False, 1)])
def test_doctor_writes_what_a_person_sends_back(
    cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ok: bool | None, code: int
) -> None:
    made = [gpu.Check("parity: [mlp]", ok, "as it was", {"difference": 0.5}, 1.5)]
    monkeypatch.setattr(gpu, "checks", lambda place: iter(made))
    ended, out, err = cli("doctor", "--gpu", "--device", "cpu", "--out", tmp_path / "gpu.json")
    assert ended == code
    assert "parity: [mlp]" in out
    assert "a rehearsal on the CPU" in err
    assert ("attach" in err) is (ok is False)
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert (content["rehearsal"], content["transport"]) == (True, "gloo")
    assert content["checks"] == [
        {
            "name": "parity: [mlp]",
            "ok": ok,
            "detail": "as it was",
            "figures": {"difference": 0.5},
            "seconds": 1.5,
        }
    ]


@pytest.mark.processes
@pytest.mark.native_threads
def test_doctor(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.examine()
    monkeypatch.setattr(doctor, "examine", lambda data_dir=None: found)
    code, out, _ = cli("doctor")
    assert code == 0
    assert "transport gloo" in out
    assert "through shared memory" in out
    assert "paceline data fetch mnist" in out
    code, text, err = cli("doctor", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(text)
    assert all(set(fact) == {"ok", "detail", "fix"} for fact in facts.values())
    assert all(name in out for name in facts)
    assert facts["transport gloo"]["ok"] is True
    missing = {"ok": False, "detail": "not here", "fix": "paceline data fetch mnist"}
    assert facts["data mnist"] == missing


@pytest.mark.processes
def test_completion(cli) -> None:
    code, out, _ = cli("completion", "bash")
    assert code == 0
    assert "_PACELINE_COMPLETE" in out


@pytest.mark.processes
@pytest.mark.native_threads
def test_a_study_measures_fairly_reports_and_goes_on(cli, tmp_path: Path) -> None:
    code, out, err = cli("study", "--short", "--out", "s")
    assert code == 0, err
    assert all(
        word in out
        for word in ("serial", "allreduce", "local-sgd", "against", "cores", "report: file://")
    )
    files = {p.name for p in (tmp_path / "s").iterdir()}
    assert files == {
        "study.json", "results.csv", "workers.csv", "report.html", "figures", "runs", ".lock",
        "predicted.json",
    }  # fmt: skip
    assert {p.suffix for p in (tmp_path / "s" / "figures").iterdir()} == {".png", ".svg"}
    runs = {f: json.loads(f.read_text()) for f in (tmp_path / "s" / "runs").glob("*/run.json")}
    rows = (tmp_path / "s" / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + len(runs)
    for same in ("memory_format", "global_batch_size", "epochs", "data", "model", "seed"):
        assert len({r["config"][same] for r in runs.values()}) == 1, same
    assert {r["result"]["samples"] for r in runs.values()} == {6000}
    assert recompute(tmp_path / "s") >= 5  # the page's figures, from run.json alone
    when = {f: f.stat().st_mtime_ns for f in runs}
    # more seeds: only those are run, and nothing is run again
    code, _, err = cli("study", "--short", "--out", "s", "--seeds", "2", "--no-figures")
    assert (code, f"{len(runs)} of {2 * len(runs)} runs are in the folder already" in err) == (
        0,
        True,
    )
    assert {f: f.stat().st_mtime_ns for f in runs} == when
    code, _, err = cli("study", "--short", "--out", "s", "--set", "lr=0.5")
    assert (code, "holds another study (it differs in lr)" in err) == (2, True)
    assert cli("report", "s", "--no-figures")[0] == 0
    (tmp_path / "t").mkdir()
    for bad in (
        ["report", "t"],
        ["report", "nosuch"],
        ["report", "s", "s", "s"],
        ["study", "nosuch.toml"],
        ["report", "s", "--out", "x"],
    ):
        code, _, err = cli(*bad)
        assert (code, err.count("\n")) == (2, 1), (bad, err)


def test_a_study_without_its_data_leaves_nothing_and_says_what_to_do(cli, tmp_path: Path) -> None:
    code, _, err = cli("study", "--short", "--set", "data=mnist", "--data-dir", str(tmp_path))
    assert code != 0
    assert "--set data=fashion-mini" in err
    assert not (tmp_path / "runs" / "study-short").exists()


@pytest.mark.processes
def test_a_dry_run_lists_and_runs_nothing(cli, tmp_path: Path) -> None:
    code, out, err = cli("study", "--short", "--dry-run")
    assert code == 0, err
    assert "6 runs, about" in out or "5 runs, about" in out
    assert " s on this machine" in out
    assert "an estimate" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.native_threads
def test_two_studies_are_compared(cli, tmp_path: Path) -> None:
    from tests.records import run, write_study

    write_study(
        tmp_path / "a",
        [*(run(train_s=t) for t in (2.0, 2.1, 2.05)), *(run("psgd", 2, t) for t in (1, 1.1, 1.05))],
    )
    write_study(
        tmp_path / "b",
        [*(run(train_s=t) for t in (2, 2.1, 2.05)), *(run("psgd", 2, t) for t in (0.5, 0.6, 0.55))],
    )
    code, _out, err = cli("report", "a", "b", "--out", "c.html")
    assert code == 0, err
    text = (tmp_path / "c.html").read_text()
    assert (
        "2 settings are in both: 1 became faster, 0 became slower, and 1 cannot be told from before"
        in text
    )
    assert "1.91x as fast" in text
    assert "unpaired" in text
    write_study(tmp_path / "d", [run("hogwild", 2)])
    code, _, err = cli("report", "a", "d")
    assert (code, "nothing can be compared" in err) == (2, True)


@pytest.mark.processes
@pytest.mark.native_threads
def test_a_study_without_a_network_goes_on_with_what_is_built_in(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.data import fetch as fetching

    def unreachable(work: Path, say: object) -> None:
        raise fetching.Unreachable("no network")

    recipe = fetching.RECIPES["mnist"]
    monkeypatch.setitem(
        fetching.RECIPES,
        "mnist",
        fetching.Recipe(recipe.folder, recipe.sha256, (("a mirror", unreachable),)),
    )
    file = tmp_path / "tiny.toml"
    file.write_text(
        "all_cores = false\n[base]\nmodel = 'linear'\nglobal_batch_size = 1000\n[axes]\nstrategy ="
        " ['serial']\n"
    )
    code, _out, err = cli("study", str(file), "--fetch", "--no-figures")
    assert code == 0, err
    assert "using fashion-mini instead" in err
    (record,) = [
        json.loads(f.read_text()) for f in (tmp_path / "runs" / "tiny" / "runs").glob("*/run.json")
    ]
    assert record["config"]["data"] == "fashion-mini"


@pytest.mark.processes
def test_help_is_quick_and_needs_no_torch() -> None:
    check = """
import sys
import paceline.cli.train
import paceline.terminal.past  # the list of `paceline runs`
from paceline.cli.main import cli
for words in (["--help"], ["train", "--help"], ["bench", "--help"], ["bench", "codecs", "--help"]):
    cli.main(words, standalone_mode=False)
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0
    done = subprocess.run(
        [PACELINE, "--version"], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.startswith("paceline, version")


@pytest.mark.processes
def test_plain_lines_when_piped_and_a_bar_when_asked_for() -> None:
    def said(*flags: str) -> str:
        command = [PACELINE, *QUICK, *flags]
        return str(run(command, capture_output=True, text=True, check=True).stderr)

    piped = run([PACELINE, *QUICK], capture_output=True, text=True, check=True)
    assert "\x1b" not in piped.stderr + piped.stdout
    assert "linear on fashion-mini: serial" in piped.stderr
    assert "test accuracy" in piped.stdout
    assert "━" not in piped.stderr
    barred = said("--progress")
    assert "━" in barred
    assert "3/3" in barred
    assert "━━" not in said("--no-progress")


def test_explain(cli, tmp_path: Path) -> None:
    code, out, _ = cli("explain", "ring", "--workers", "4")
    assert code == 0
    assert "step 6: share-only" in out
    assert "0 -> 1: chunk 0, added" in out
    assert "halving-doubling" in out
    assert re.search(r"ring +6 +6\.00 +1\.50 +0\.0483", out)
    assert "4 MB over links of 1 Gbit/s with a latency of 50 µs" in out
    slow = ("--latency", "1ms", "--bandwidth", "100mbit", "--size", "8MB")
    code, out, _ = cli("explain", "ring", "tree", *slow)
    assert code == 0
    assert "step 4: broadcast" in out
    assert re.search(r"tree +4 +6\.00 +2\.00 +2\.56", out)
    code, _, _ = cli("explain", "tree", "--svg", "a.svg", "--png", "a.png", "--html", "a.html")
    assert code == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_explain_draws_every_step_into_a_folder(cli, tmp_path: Path) -> None:
    code, _, err = cli("explain", "ring", "tree", "--svg", "slides/", "--png", "slides/")
    assert code == 0
    assert "slides/step-00.svg to 06" in err
    both = [f"step-{step:02}.{ending}" for step in range(7) for ending in ("png", "svg")]
    assert sorted(p.name for p in (tmp_path / "slides").iterdir()) == both
    code, _, _ = cli("explain", "star", "--svg", "slides")  # a folder that is there
    left = sorted(p.name for p in (tmp_path / "slides").glob("*.svg"))
    assert (code, left) == (0, ["step-00.svg", "step-01.svg", "step-02.svg"])


def test_explain_a_timetable(cli, tmp_path: Path) -> None:
    code, out, _ = cli("explain", "1f1b", "--stages", "4", "--micro", "8")
    assert code == 0
    assert "1 " + 2 * " " + "F0F1F2" + 8 * " " + "B0--F3B1--F4B2--" in out
    assert "idle 27.3%, formula (p-1)/(m+p-1) = 27.3%; time 33; 48 messages" in out
    assert "activations kept, by worker: 4 3 2 1" in out
    assert re.search(r"zero-bubble +27 +11\.1% +\(p-1\)/\(3m\+p-1\) = 11\.1% +4 each +48", out)
    code, out, _ = cli("explain", "interleaved:each=2", "gpipe", "--stages", "4", "--micro", "8")
    assert code == 0
    assert "time 19.5 to 28.5" in out
    assert max(map(len, out.splitlines())) <= 80
    files = ("--svg", "a.svg", "--png", "a.png", "--html", "a.html")
    code, _, _ = cli("explain", "1f1b", "gpipe", "--stages", "2", "--micro", "2", *files)
    assert code == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text()
    assert "paceline explain 1f1b gpipe --stages 2 --micro 2" in page
    code, _, err = cli("explain", "1f1b", "--stages", "2", "--micro", "2", "--svg", "slides/")
    assert (code, "slides/step-00.svg to 07" in err) == (0, True)


def test_explain_split_models(cli, tmp_path: Path) -> None:
    code, out, _ = cli("explain", "halo", "--model", "cnn", "--workers", "3")
    assert code == 0
    assert "step 1: 0 Conv2d 5x5: 28 -> 24 rows" in out
    assert "1 -> 0: rows 9-11, 336 B" in out
    assert re.search(r"1 +9-17 +8-19 +8-15 *\n", out)
    assert re.search(r"all +25 +12\.2 kB +7\.17 kB", out)
    code, out, _ = cli("explain", "halo", "--rows", "40", "--workers", "2")
    assert (code, "40 -> 36 rows" in out) == (0, True)
    code, out, _ = cli("explain", "halo", "--model", "alexnet", "--input", "3x64x48")
    assert (code, "64 -> 64 rows" in out) == (0, True)
    code, out, _ = cli("explain", "tensor", "--model", "mlp", "--workers", "2")
    assert code == 0
    assert re.search(r"1 +Linear 784->256 +by outputs", out)
    assert re.search(r"3 +Linear 256->128 +by inputs +sum 512 B", out)
    assert "Worker 0 has 118,282 of 235,146 weights" in " ".join(out.split())
    for name in ("halo", "tensor"):
        files = ("--svg", f"{name}.svg", "--png", f"{name}.png", "--html", f"{name}.html")
        assert cli("explain", name, "--workers", "2", *files)[0] == 0
        assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / f"{name}.html").read_text().startswith("<!doctype html>")


def test_explain_opens_a_browser(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import webbrowser

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert cli("explain", "ring", "--open", "--html", "a.html")[0] == 0
    assert cli("explain", "ring", "--open")[0] == 0
    assert opened[0].endswith("/a.html")
    assert all(Path(url.removeprefix("file://")).exists() for url in opened)
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    code, _, err = cli("explain", "ring", "--open", "--html", "a.html")
    assert (code, "no browser could be started; open a.html yourself" in err) == (2, True)


OWN = """
from paceline.collectives.base import algorithm
from paceline.collectives.schedule import Transfer, followed_by

@algorithm("fine")
def fine(ranks: int):
    \"\"\"Many chunks.\"\"\"
    return followed_by("fine", 99, ranks, ("all", [(Transfer(0, 1, 0, 99, True),)]))
"""


@pytest.fixture
def nothing_stays_registered():
    """Remove the collectives that a test registers."""
    ALL["collectives"].discover()
    before = set(SCHEDULES)
    yield
    for name in set(SCHEDULES) - before:
        del SCHEDULES[name], ALL["collectives"]._entries[name]


@pytest.mark.usefixtures("nothing_stays_registered")
def test_explain_answers_bad_input_in_one_sentence(cli, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["nosuch"], "unknown schedule"),
        (["native"], "native has none"),
        (["ring", "--workers", "17"], "up to 16"),
        (["ring", "tree", "star"], "one or two algorithms, not 3"),
        (["ring", "ring"], "ring is named twice"),
        (["ring", "--svg", "/no/x"], "cannot be written"),
        (["ring", "--png", "file/steps/"], "cannot be written"),
        (["ring", "--html", "."], "cannot be written"),
        (["ring", "--latency", "soon"], "--latency='soon' is not a number"),
        (["ring", "--bandwidth", "0"], "must be more than 0"),
        (["ring", "--size", "0"], "1 byte or more"),
        (["hierarchical:group=0"], "it must be 1 or more"),
        (["fine", "--plugin", "own.py", "--html", "x.html"], "99 chunks: up to 16"),
        (["nosuch"], "1f1b, all-gather"),
        (["ring", "--stages", "4"], "--stages is an option of timetables; ring takes --workers"),
        (["1f1b", "--workers", "4"], "1f1b takes --stages, --micro"),
        (["1f1b", "--size", "4MB"], "--size is an option of collectives"),
        (["1f1b", "--micro", "0"], "--micro 0: it must be 1 or more"),
        (["interleaved", "--micro", "6"], "micro=6 is not a multiple of 4"),
        (["1f1b", "--stages", "17"], "up to 16 stages"),
        (["1f1b", "--micro", "65"], "up to 64 micro-batches"),
        (["1f1b:each=2"], "has no option 'each'"),
        (["1f1b", "ring"], "1f1b and ring cannot be shown together"),
        (["halo", "tensor"], "name two collectives, or two timetables"),
        (["halo:model=cnn"], "use --model, --workers, --input, --rows"),
        (["halo", "--model", "mlp"], "domain splits images"),
        (["halo", "--input", "3x5x"], "such as 3x512x512"),
        (["halo", "--rows", "0"], "--rows 0: it must be 1 or more"),
        (["tensor", "--rows", "9"], "--rows is an option of halo"),
        (["tensor", "--model", "linear"], "none of this model's layers"),
        (["tensor", "--model", "resnet50", "--input", "3x4x4"], "resnet50 needs images"),
    ):
        code, _, err = cli("explain", *arguments)
        assert code == 2, arguments
        assert message in err
        assert err.count("\n") <= 2, err


@pytest.mark.parametrize(
    ("options", "notice"),
    [
        (
            ["--partition", "by-label"],
            "note: partition=by-label changes nothing: one worker has all labels",
        ),
        (
            ["--global-batch-size", "1" + 30 * "0"],
            "there are 40 training samples, and all of them are one batch",
        ),
        (
            ["--strategy", "allreduce:collective=hierarchical:group=100", "--workers", "4"],
            "is one group, a tree",
        ),
    ],
)
def test_what_has_no_effect_is_told(cli, options: list[str], notice: str) -> None:
    small = [
        "--data",
        "synthetic:samples=40",
        "--model",
        "mlp:hidden=4",
        "--steps",
        "1",
        "--transport",
        "inproc",
    ]
    code, _, err = cli("train", *small, *options)
    assert (code, notice in " ".join(err.split())) == (0, True), err


def test_an_empty_study_is_refused(cli) -> None:
    code, _, err = cli("study", "/dev/null", "--dry-run")
    assert (code, "study null is empty: it needs [axes]" in err) == (2, True)
