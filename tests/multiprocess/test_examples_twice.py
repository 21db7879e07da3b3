"""The GPT and the vision script: plain PyTorch, and Paceline in at most 8 changed lines.

One worker computes what the plain script computes, bit for bit. Two workers with half the batch
each follow it within rounding. A script that was ended goes on exactly.
"""

import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import PACELINE, Popen, free_port, run
from torch import Tensor

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TASKS = ("gpt", "vision")
# On a busy machine, threads that wait for each other take most of the time.
ON_ONE_THREAD = """
import runpy, sys, torch
torch.set_num_threads(1)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PYTHON = [sys.executable, "-c", ON_ONE_THREAD]
# Of each script: options for a short run, with random numbers in the model or on the images.
RANDOM = {
    "gpt": f"--text {EXAMPLES / 'hogwild.py'} "
    "--steps 4 --decay-steps 4 --eval-every 2 --layers 1 --width 16 --block 16 --bf16",
    "vision": "--epochs 2 --decay-epochs 2 --images 64 --width 4",
}
# Without them, and in float32: what two workers follow.
EXACT = {"gpt": "--dropout 0 --no-bf16", "vision": "--no-augment"}
HALF = {"gpt": "--batch 4", "vision": "--batch 16"}
# The first half of a run, under the schedule of the whole.
FIRST = {"gpt": "--steps 2", "vision": "--epochs 1"}
LONG = {
    "gpt": f"--text {EXAMPLES / 'gpt_plain.py'} "
    "--steps 50 --decay-steps 50 --eval-every 50 --layers 2 --width 32 --block 32",
    # at lr 0.05 the last bits of float32 grow to 1e-3 in 50 steps (float64 agrees in all digits)
    "vision": "--epochs 10 --decay-epochs 10 --images 160 --width 4 --lr 0.02",
}


def plain(task: str, out: Path, *options: str) -> list[str]:
    return script([*PYTHON, EXAMPLES / f"{task}_plain.py"], out, options)


def alone(task: str, out: Path, *options: str) -> list[str]:
    return script([*PYTHON, EXAMPLES / f"{task}_paceline.py"], out, options)


def launched(task: str, out: Path, *options: str) -> list[str]:
    """Two workers of `paceline launch`, each with half the batch."""
    file = EXAMPLES / f"{task}_paceline.py"
    return script([PACELINE, "launch", "-n", "2", file], out, [*options, HALF[task]])


def two(task: str, out: Path, *options: str) -> list[str]:
    """The same without a launcher: two processes that need not import PyTorch."""
    file = str(EXAMPLES / f"{task}_paceline.py")
    command = [*PYTHON, file, *words(out, [*options, HALF[task]])]
    seats = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Popen(
            command,
            env={**os.environ, **seats, "RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=PIPE,
            stderr=PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert told[1][0] == ""  # one worker prints
    return str(told[0][0]).splitlines()


def script(command: Sequence[str | Path], out: Path, options: Sequence[str]) -> list[str]:
    given = [str(part) for part in (*command, *words(out, options))]
    done = run(given, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    return str(done.stdout).splitlines()


def words(out: Path, options: Sequence[str]) -> list[str]:
    return ["--out", str(out), *" ".join(options).split()]


def weights(out: Path) -> dict[str, Tensor]:
    if (out / "checkpoint.pt").is_file():
        state: dict[str, Tensor] = torch.load(out / "checkpoint.pt", weights_only=True)["model"]
        return state
    return load_file(max(out.glob("checkpoints/step-*")) / "model.safetensors")


def expect_same(one: Path, other: Path) -> None:
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def numbers(lines: Sequence[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


def expect_close(one: Sequence[str], other: Sequence[str]) -> None:
    """Equal but for rounding: the losses and, where answers are counted, those."""
    assert len(one) == len(other) > 1
    assert numbers(one) == pytest.approx(numbers(other), abs=1e-4)
    assert [re.findall(r"\d+/\d+", line) for line in one] == [
        re.findall(r"\d+/\d+", line) for line in other
    ]


@pytest.mark.parametrize("task", TASKS)
def test_at_most_8_lines_are_changed(task: str) -> None:
    old, new = (
        [line for line in (EXAMPLES / f"{task}_{kind}.py").read_text().splitlines() if line]
        for kind in ("plain", "paceline")
    )
    changed = [line[2:] for line in difflib.ndiff(old, new) if line.startswith("+ ")]
    assert 1 <= len(changed) <= 8, changed
    assert all("pace" in line for line in changed), changed
    if task == "gpt":
        page = (EXAMPLES.parent / "docs" / "own_loop.md").read_text()
        shown = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
        assert "\n".join(shown) in page
    assert "paceline" not in "".join(line for line in old if not line.startswith("paceline launch"))


@pytest.mark.parametrize("task", TASKS)
def test_one_worker_is_the_plain_script_bit_for_bit_also_resumed(task: str, tmp_path: Path) -> None:
    whole = plain(task, tmp_path / "plain", RANDOM[task])
    assert alone(task, tmp_path / "whole", RANDOM[task]) == whole
    expect_same(tmp_path / "plain", tmp_path / "whole")
    first = alone(task, tmp_path / "halves", RANDOM[task], FIRST[task])
    assert first + alone(task, tmp_path / "halves", RANDOM[task], "--resume") == whole
    expect_same(tmp_path / "plain", tmp_path / "halves")


@pytest.mark.parametrize("task", TASKS)
def test_two_workers_follow_the_plain_script_also_resumed(task: str, tmp_path: Path) -> None:
    options = (RANDOM[task], EXACT[task])
    whole = two(task, tmp_path / "whole", *options)
    expect_close(whole, plain(task, tmp_path / "plain", *options))
    first = two(task, tmp_path / "halves", *options, FIRST[task])
    assert first + two(task, tmp_path / "halves", *options, "--resume") == whole
    expect_same(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_two_workers_with_random_numbers_go_on_exactly(task: str, tmp_path: Path) -> None:
    whole = launched(task, tmp_path / "whole", RANDOM[task])
    first = launched(task, tmp_path / "halves", RANDOM[task], FIRST[task])
    assert first + launched(task, tmp_path / "halves", RANDOM[task], "--resume") == whole
    expect_same(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("strategy", "ranks"), [("ps", 3), ("local-sgd:every=2", 2), ("ddp", 2)])
def test_another_strategy_is_another_word(
    task: str, strategy: str, ranks: int, tmp_path: Path
) -> None:
    """The scripts call no `finish`: servers learn of their end, too."""
    text = (EXAMPLES / f"{task}_paceline.py").read_text()
    file = tmp_path / "other.py"
    file.write_text(text.replace('"allreduce"', f'"{strategy}"'))
    options = [RANDOM[task], EXACT[task], HALF[task]]
    lines = script([PACELINE, "launch", "-n", str(ranks), file], tmp_path / "other", options)
    expected = plain(task, tmp_path / "plain", *options[:2])
    if strategy != "local-sgd:every=2":
        expect_close(lines, expected)
    assert len(lines) == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_two_workers_follow_the_plain_script_over_50_steps(task: str, tmp_path: Path) -> None:
    options = (LONG[task], EXACT[task])
    expected = plain(task, tmp_path / "plain", *options)
    expect_close(launched(task, tmp_path / "two", *options), expected)
    two_workers = weights(tmp_path / "two")
    for name, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(two_workers[name], value, atol=1e-4, rtol=1e-4)
    assert numbers(expected)[-1] < numbers(expected)[0]  # it learns
