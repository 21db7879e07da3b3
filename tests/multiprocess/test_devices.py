"""Devices are looked at in a child process, so that CUDA is not initialised before a fork."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.common import devices
from paceline.errors import BadRequest
from paceline.request.choices import check_device
from paceline.transport.c10d.nccl import NcclTransport

TWO = """
import json
print("a library's greeting")
print(json.dumps({"error": None, "names": ["Made-up A", "Made-up B"]}))
"""
INITIALISES = ("_lazy_init", "init", "is_available", "device_count", "current_device", "set_device")


@pytest.fixture(autouse=True)
def built_with_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A PyTorch that has CUDA, in a process in which nothing may initialise it."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("this would initialise CUDA in the process that forks")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    for name in INITIALISES:
        monkeypatch.setattr(torch.cuda, name, refuse)
    devices._look_in_child.cache_clear()
    yield
    devices._look_in_child.cache_clear()


def test_a_child_process_tries_the_device_out() -> None:
    """The real program: its own PyTorch has no CUDA, and that is what it says."""
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch has CUDA")
    with pytest.raises(BadRequest, match=r"is not available here.*not compiled"):
        check_device("cuda")


def test_what_the_child_finds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LOOK", TWO)
    check_device("cuda")
    check_device("cuda:1")
    assert devices.cuda_names() == ("Made-up A", "Made-up B")
    assert NcclTransport.missing() in (None, "this build of PyTorch has no NCCL")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os._exit(3)", "a process that tried it out failed: exit code 3"),
        ("raise RuntimeError('driver too old')", "failed: RuntimeError: driver too old"),
        ("import time; time.sleep(60)", "does not answer"),
    ],
)
def test_a_child_that_fails_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(devices, "LOOK", program)
    if "sleep" in program:
        monkeypatch.setattr(devices, "LOOK_S", 0.2)
    with pytest.raises(BadRequest, match=said):
        check_device("cuda")
    assert devices.cuda_names() == ()
    assert NcclTransport.missing() == "this host has no CUDA device"
