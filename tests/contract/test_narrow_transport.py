"""What strategies may rely on: a bare transport, its own memory, and what it declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import make_pairs, small_net
from tests.contract.test_optimizer_memory import Silent
from tests.contract.test_strategies import INPROC, SEVERAL, RunInproc, identical
from torch import Tensor

from paceline.collectives.auto import Auto
from paceline.collectives.base import SCHEDULES, TRIED
from paceline.errors import TransportError
from paceline.registry import collectives, load_plugin, strategies, transports
from paceline.replica.replica import Replica
from paceline.run.rank import make_context
from paceline.transport.base import Op, Work
from paceline.transport.inproc import Hub, InprocTransport
from paceline.types import Batch

PLUGINS = Path(__file__).parents[1] / "plugins"


class Picky(InprocTransport):
    """As a transport of GPUs: its data channel moves only memory of its own `allocate`.

    Its control channel moves small tensors, and no more than that.
    """

    name = "picky"
    SMALL = 8192  # bytes

    def __init__(self, hub: Hub, rank: int, members: tuple[int, ...], place: Any = ()) -> None:
        super().__init__(hub, rank, members, place)
        self._control = InprocTransport(hub, rank, members, (*place, "control"))
        self._owned = hub.__dict__.setdefault("owned", set())

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = super().allocate(numel, dtype, device)
        self._owned.add(made.untyped_storage().data_ptr())
        self._hub.__dict__.setdefault("kept", []).append(made)  # so that no address is used again
        return made

    @property
    def control(self) -> Small:
        return Small(self._control)

    def _check(self, tensor: Tensor) -> None:
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in self._owned:
            raise TransportError(f"{tuple(tensor.shape)} {tensor.dtype} is not my memory")

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self._check(tensor)
        return super().isend(tensor, to, tag)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        self._check(tensor)
        return super().irecv(tensor, source, tag)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        self._check(tensor)
        super().all_reduce(tensor, op)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self._check(tensor)
        super().broadcast(tensor, root)


class Small(InprocTransport):
    """The control channel of `Picky`."""

    def __init__(self, line: InprocTransport) -> None:
        self.__dict__ = line.__dict__

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        assert tensor.nbytes <= Picky.SMALL
        return super().isend(tensor, to, tag)


@pytest.fixture
def picky() -> Iterator[None]:
    transports.register("picky")(Picky)
    yield
    del transports._entries["picky"]


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *((n, "none") for n in INPROC),
        ("allreduce:collective=ring", "none"),
        ("local-sgd:every=2,optimizer_state=average", "none"),
        ("stepwise:full_every=3", "int8"),
        ("stepwise", "fp16"),
        ("gossip", "int8"),
        ("diloco:every=2", "int8"),
        *(("allreduce", c) for c in ("fp16", "int8", "qsgd", "sign", "topk", "randomk",
                                     "powersgd:rank=1", "threshold")),
        *(("ps", c) for c in ("int8", "topk")),
        ("ps:consistency=async", "none"),
        ("allreduce:when=epoch", "none"),
    ],
)  # fmt: skip
@pytest.mark.sampled(3)
def test_only_own_memory_is_exchanged(
    run_inproc: RunInproc, picky: None, name: str, codec: str
) -> None:
    """With memory of its own, as a GPU's, a run computes what it computes elsewhere."""
    workers = 1 if name not in SEVERAL and ":" not in name else 2
    model = lambda: torch.nn.Sequential(small_net(), torch.nn.BatchNorm1d(3))  # noqa: E731
    options = {
        "model": model, "strategy": name, "codec": codec, "workers": workers, "steps": 10,
        "momentum": 0.9, "evaluate_every": 4, "checkpoint_every": 5,
    }  # fmt: skip
    if name.startswith("hogwild"):
        options["momentum"] = 0.0
    run = run_inproc(**options, transport="picky")
    assert run.record["config"]["transport"] == "picky"
    assert identical(run.weights, run_inproc(**options).weights)


@pytest.mark.parametrize("name", [n for n in SEVERAL if not strategies.build(n).traits.serves])
def test_a_strategy_runs_on_a_bare_transport(name: str) -> None:
    """Without a meter: nothing in a strategy reaches for one."""
    inputs, targets = make_pairs(32)

    def body(transport: InprocTransport) -> list[Tensor]:
        strategy = strategies.build(name)
        ctx = make_context(transport, strategy, 2, codec="none", seed=0, recorder=Silent())
        torch.manual_seed(0)
        model = small_net()
        replica = Replica(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            torch.nn.CrossEntropyLoss(),
            allocate=transport.allocate,
        )
        strategy.setup(ctx, replica)
        for step in range(4):
            mine = slice(transport.rank * 16, transport.rank * 16 + 16)
            batch = Batch(inputs[mine], targets[mine], 16.0, 32.0, 0, step, step == 3)
            strategy.begin(replica, batch)
            replica.forward_backward(batch, strategy.scale(batch))
            strategy.step(replica, batch)
        strategy.finish(replica)
        weights = strategy.consensus(replica)
        return [w.clone() for w in (weights or replica.weights())]

    first, second = Hub(2).run(body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_auto_tries_a_collective_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugin(PLUGINS / "line.py")
    tried: list[str] = []

    def measure(self: Auto, names: Sequence[str], buffer: Tensor) -> list[float]:
        tried.extend(names)
        return [0.1 if name == "line" else 1.0 for name in names]

    class Timed(InprocTransport):
        traits = replace(InprocTransport.traits, take_turns=False)

    monkeypatch.setattr(Auto, "_measure", measure)

    def body(transport: InprocTransport) -> tuple[dict[str, str], Tensor]:
        auto, buffer = Auto(transport), torch.full((100,), float(transport.rank + 1))
        auto.prepare(buffer)
        auto.all_reduce(buffer)
        return auto.choices, buffer

    try:
        for choices, buffer in Hub(3, kind=Timed).run(body):
            assert choices == {"400": "line"}
            assert torch.equal(buffer, torch.full((100,), 6.0))
        assert "line" in tried
    finally:
        del TRIED["line"], SCHEDULES["line"], collectives._entries["line"]
