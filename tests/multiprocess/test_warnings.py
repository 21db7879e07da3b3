"""A warning of a person's model is printed once by a run, not once per worker, step or process."""

from pathlib import Path

import pytest
from tests.commands import PACELINE, run

MODEL = """
import warnings
import torch

class Warns(torch.nn.Linear):
    def __init__(self):
        super().__init__(784, 10)
        warnings.warn("made with an old argument", UserWarning)

    def forward(self, x):
        with warnings.catch_warnings():  # makes Python forget which warnings it has shown
            warnings.simplefilter("ignore")
        warnings.warn("called with an old argument", UserWarning)
        return super().forward(x.flatten(1))
"""


@pytest.mark.parametrize(("transport", "quiet"), [("shm", []), ("inproc", ["--quiet"])])
def test_a_warning_of_a_model_is_printed_once(
    tmp_path: Path, transport: str, quiet: list[str]
) -> None:
    (tmp_path / "warns.py").write_text(MODEL)
    command = [PACELINE, "train", "--data", "fashion-mini", "--model", "warns:Warns"]
    command += ["--strategy", "allreduce", "--workers", "3", "--threads", "1", "--steps", "4"]
    done = run(
        [*command, "--transport", transport, *quiet],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning: made with an old argument") == 1, done.stderr
    assert done.stderr.count("UserWarning: called with an old argument") == 1, done.stderr
    assert "warns.py:" in done.stderr
