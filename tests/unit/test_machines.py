"""Machines that are not this one: another processor, another system."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

import pytest

from paceline.doctor import machine
from paceline.errors import BadRequest, TransportError
from paceline.request.choices import transport_of
from paceline.request.config import Config
from paceline.strategies.allreduce import AllReduce
from paceline.transport.base import Rendezvous
from paceline.transport.shm import ShmTransport


@pytest.fixture
def aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")


@pytest.mark.usefixtures("aarch64")
def test_shared_memory_is_refused_on_other_processors() -> None:
    said = "it relies on the memory order of x86-64, and this machine is aarch64"
    assert ShmTransport.missing() == said
    with pytest.raises(BadRequest, match=f"shm is not available here: {said}; use transport"):
        transport_of(Config(workers=2, transport="shm"), AllReduce())
    with pytest.raises(TransportError, match=f'{said}; use transport="gloo"'):
        ShmTransport.connect(Rendezvous(0, 1, "unix:none", b""))


@pytest.mark.usefixtures("aarch64")
def test_auto_is_gloo_on_other_processors() -> None:
    assert transport_of(Config(workers=2), AllReduce()) == "gloo"


@pytest.mark.usefixtures("aarch64")
def test_the_doctor_says_which_transport_is_used_instead() -> None:
    found = machine._shared_memory()
    assert not found.ok
    assert found.detail.endswith("this machine is aarch64; gloo is used instead")


@pytest.mark.parametrize("name", ["x86_64", "AMD64"])
def test_auto_is_shared_memory_on_x86(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)
    assert transport_of(Config(workers=2), AllReduce()) == "shm"


def test_shared_memory_is_refused_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delattr(os, "memfd_create")
    assert ShmTransport.missing() == "it requires Linux with memfd, pidfd and /proc"
    assert transport_of(Config(workers=2), AllReduce()) == "gloo"


@pytest.mark.parametrize(
    ("answer", "ok", "said"),
    [
        ((0, "slurm 22.05.8\n", ""), True, "slurm 22.05.8: paceline launch --slurm"),
        (
            (1, "", "srun: error: fetch_config: DNS SRV lookup failed\nsrun: fatal: No source\n"),
            False,
            "srun finds no cluster: fatal: No source",
        ),
        ((1, "", ""), False, "srun finds no cluster: it says nothing"),
    ],
)
def test_the_doctor_says_why_srun_finds_no_cluster(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, str], ok: bool, said: str
) -> None:
    """Slurm's programs are installed, and no cluster is configured."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    done = subprocess.CompletedProcess(["srun", "--version"], *answer)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = machine._slurm()
    assert (found.ok, found.detail) == (ok, said)
    assert ok or "SLURM_CONF" in found.fix
