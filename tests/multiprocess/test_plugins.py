"""A transport from a plugin file: launched, measured, recorded and reported like our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import PACELINE, run

PLUGIN = str(Path(__file__).parents[1] / "plugins" / "sockets.py")
pytestmark = pytest.mark.processes


def train(out: Path, transport: str, strategy: str, *more: str) -> dict[str, object]:
    words = ["train", "--model", "mlp:hidden=8", "--data", "fashion-mini", "--steps", "8"]
    words += ["--strategy", strategy, "--workers", "3", "--transport", transport, "--threads", "1"]
    done = run([PACELINE, *words, "--out", out, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record: dict[str, object] = json.loads((out / "run.json").read_text())
    return record


@pytest.mark.parametrize("strategy", ["allreduce:collective=ring", "ps", "gossip"])
def test_a_transport_from_a_plugin_trains(tmp_path: Path, strategy: str) -> None:
    record = train(tmp_path / "own", "sockets", strategy, "--plugin", PLUGIN)
    known = train(tmp_path / "known", "gloo", strategy)
    own, other = (load_file(tmp_path / n / "model.safetensors") for n in ("own", "known"))
    torch.testing.assert_close(own, other)  # sums of three have another order without a native one
    assert record["config"]["transport"] == "sockets"  # type: ignore[index]
    for mine, theirs in zip(record["workers"], known["workers"], strict=True):  # type: ignore[call-overload]
        for key in ("payload_sent_bytes", "payload_received_bytes", "messages_sent"):
            assert mine[key] == theirs[key] > 0, key
        assert mine["memory_sent_bytes"] == 0
    if strategy == "ps":
        done = run([PACELINE, "report", tmp_path, "--no-figures"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "sockets" in (tmp_path / "report.html").read_text()


def test_a_transport_from_a_plugin_is_listed_with_what_it_declares() -> None:
    words = ["list", "transports", "--plugin", PLUGIN, "--json"]
    done = run([PACELINE, *words], capture_output=True, text=True)
    found = json.loads(done.stdout)["sockets"]["traits"]
    assert found["crosses_hosts"]
    assert found["started_by"] == "fork"
    assert json.loads(done.stdout)["shm"]["traits"]["preference"] > 0
    # what Paceline passes to a transport is no option of the user
    assert not any(entry["options"] for entry in json.loads(done.stdout).values())


def test_a_strategy_that_needs_more_than_the_transport_has_is_refused(tmp_path: Path) -> None:
    words = ["train", "--plugin", PLUGIN, "--transport", "sockets", "--data", "fashion-mini"]
    for strategy, lacks in (
        ("gossip:mode=async", "second channel"),
        ("hogwild", "memory that all"),
    ):
        more = ["--strategy", strategy, "--workers", "2", "--out", tmp_path / "run"]
        done = run([PACELINE, *words, *more], capture_output=True, text=True)
        assert done.returncode == 2
        assert lacks in done.stderr
        assert done.stderr.count("\n") == 1
