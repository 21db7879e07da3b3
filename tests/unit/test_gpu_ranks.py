"""Each rank takes its own GPU: a fake of two devices and three ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.small import make_pairs
from torch import nn

import paceline
from paceline.common.asked import Asked
from paceline.common.devices import take_device
from paceline.common.seeding import saved_random_states, set_random_states
from paceline.errors import BadRequest
from paceline.launch import joined, local, threads
from paceline.launch.seat import Seat
from paceline.registry import transports
from paceline.request.config import Config
from paceline.request.session import Session
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.parts import serving
from paceline.strategies.parts.saved import on_device
from paceline.transport.base import Rendezvous
from paceline.transport.inproc import Hub
from paceline.transport.patience import Patience


@dataclass
class FakeCuda:
    """Two devices. Notes what is done with them, and what ranks do in between."""

    events: list[str] = field(default_factory=list)
    initialised: bool = False
    state: int = 1

    def set_device(self, device: torch.device) -> None:
        self.initialised = True
        self.events.append(f"set {device}")

    def connect(self, rendezvous: Rendezvous) -> Any:
        self.events.append(f"rank {rendezvous.rank} connects")
        return SimpleNamespace(close=lambda: None, patience=Patience(rendezvous.rank, 3, 30.0))

    def run_worker(self, session: Session, *_: Any, **__: Any) -> None:
        self.events.append(f"trains on {session.device}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: fake.initialised)
    monkeypatch.setattr(torch.cuda, "set_device", fake.set_device)
    monkeypatch.setattr(transports.entry("nccl").make, "connect", fake.connect)
    for module in (local, threads):
        monkeypatch.setattr(module, "run_worker", fake.run_worker)
    return fake


def session(device: str) -> Session:
    config = Config(device=device)
    job: Any = SimpleNamespace(config=config, transport="nccl", ranks=3, workers=3)
    job.faults, job.strategy = list, AllReduce
    return Session(job, Path("out"))


def rendezvous(rank: int) -> Rendezvous:
    return Rendezvous(rank, 3, "unix:none", b"")


def quiet(*_: Any) -> None:
    return


def test_ranks_share_the_devices_in_turn(cuda: FakeCuda) -> None:
    """NCCL uses the current device, so a rank sets its device before it connects."""
    for rank in range(3):
        local.train_rank(session("cuda"), rendezvous(rank), quiet)
    assert cuda.events == [
        *("set cuda:0", "rank 0 connects", "trains on cuda:0"),
        *("set cuda:1", "rank 1 connects", "trains on cuda:1"),
        *("set cuda:0", "rank 2 connects", "trains on cuda:0"),
    ]


def test_a_device_that_is_asked_for_by_number_stays(cuda: FakeCuda) -> None:
    for rank in range(2):
        local.train_rank(session("cuda:1"), rendezvous(rank), quiet)
    assert [e for e in cuda.events if "cuda" in e] == ["set cuda:1", "trains on cuda:1"] * 2


def test_the_cpu_needs_no_device_to_be_set(cuda: FakeCuda) -> None:
    local.train_rank(session("cpu"), rendezvous(1), quiet)
    assert cuda.events == ["rank 1 connects", "trains on cpu"]


def meeting(local_rank: int) -> joined.Meeting:
    """Rank 2 of three, on a host where it has this number."""
    found = joined.Meeting.__new__(joined.Meeting)
    found.seat = Seat("torchrun", 2, 3, local_rank, 1)
    found.rendezvous = rendezvous(2)
    return found


def test_under_a_launcher_the_number_on_the_host_counts(cuda: FakeCuda) -> None:
    meeting(local_rank=1).train(session("cuda"), quiet)
    assert cuda.events == ["set cuda:1", "rank 2 connects", "trains on cuda:1"]


def test_an_own_loop_takes_its_device_before_it_connects(cuda: FakeCuda) -> None:
    meeting(local_rank=1).connect(transports.entry("nccl").make, 1.0)
    assert cuda.events == ["set cuda:1", "rank 2 connects"]


def test_an_own_loop_that_has_chosen_its_device_keeps_it(cuda: FakeCuda) -> None:
    cuda.initialised = True
    meeting(local_rank=1).connect(transports.entry("nccl").make, 1.0)
    assert cuda.events == ["rank 2 connects"]


def test_threads_of_one_process_share_one_device(cuda: FakeCuda) -> None:
    for rank in range(3):
        hub = Hub(3)
        threads._train_rank(session("cuda"), quiet, hub, Asked(), hub.transport(rank))
    assert {e for e in cuda.events if "cuda" in e} == {"set cuda:0", "trains on cuda:0"}


def test_a_host_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device_count` may be 0 where a launcher has hidden all devices."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadRequest, match="number 1 on its host sees no CUDA device"):
        take_device("cuda", 1)


def test_the_generator_of_the_device_is_saved_and_restored(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get() -> torch.Tensor:
        return torch.tensor([cuda.state], dtype=torch.uint8)

    def put(state: torch.Tensor) -> None:
        cuda.state = int(state)

    monkeypatch.setattr(torch.cuda, "get_rng_state", get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put)
    assert "cuda" not in saved_random_states(), "asking would initialise CUDA"
    cuda.initialised, cuda.state = True, 7
    saved = saved_random_states()
    cuda.state = 1
    set_random_states(saved)
    assert cuda.state == 7
    cuda.initialised, cuda.state = False, 1
    set_random_states(saved)  # goes on on the CPU
    assert cuda.state == 1


def test_a_servers_memory_is_read_onto_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that saved it may have had a device that this one does not have."""
    asked: list[Any] = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *a, **k: (asked.append(k["map_location"]), load(*a, **k))[1]
    )
    assert serving.from_bytes(serving.to_bytes({"a": 1})) == {"a": 1}
    assert asked == ["cpu"]


def test_saved_tensors_move_to_the_device_of_the_rank() -> None:
    """Numbers that are computed with move; counts, seeds and a server's bytes stay as they are."""
    saved = {
        "codec": [{"error": torch.ones(2), "q": torch.ones(2, dtype=torch.bfloat16), "step": 3}],
        "wave": (torch.ones(2, dtype=torch.complex64),),
        "servers": [serving.to_bytes({"a": 1})],
        "none": None,
    }
    moved = on_device(saved, torch.device("meta"))
    state = moved["codec"][0]
    assert {state["error"].device.type, state["q"].device.type} == {"meta"}
    assert moved["wave"][0].device.type == "meta"
    assert moved["servers"][0].device.type == "cpu"
    assert (state["step"], moved["none"]) == (3, None)
    assert serving.from_bytes(moved["servers"][0]) == {"a": 1}


class OnGpu(nn.Linear):
    """A model whose parameters say that they are on a GPU."""

    def parameters(self, recurse: bool = True) -> Any:
        return iter([SimpleNamespace(device=torch.device("cuda:0"))])


def test_a_model_on_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"the model is on cuda:0: give it on the CPU"):
        paceline.train(
            model=OnGpu(6, 3), data=make_pairs(20), workers=2, transport="gloo", out=tmp_path / "r"
        )
