"""The optimizers' state (momentum, squared gradients): averaged over workers, shared, resumed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline import Run
from paceline.errors import BadRequest
from paceline.record import checkpoint
from paceline.replica.replica import Replica
from paceline.run.rank import make_context
from paceline.strategies.hogwild import Hogwild, share_optimizer
from paceline.strategies.local_sgd import LocalSGD
from paceline.strategies.parts.averaging import OptimizerAverage, make_state
from paceline.transport.inproc import Hub, InprocTransport
from paceline.types import Batch

RunInproc = Callable[..., Run]


# --- the optimizers' memory, averaged


class Two(nn.Module):
    """Two layers of which a worker uses one: the other has no state in that worker's optimizer."""

    def __init__(self, sizes: tuple[int, int] = (2, 2)) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(2, size, bias=False) for size in sizes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a if x[0, 0] > 0 else self.b)(x) * self.scale


class Silent:
    def write(self, kind: str, **fields: object) -> None:
        pass


def averaged(
    sizes: tuple[int, int],
    optimizer: Callable[..., torch.optim.Optimizer],
    both_touch: bool = False,
    rounds: int = 1,
    counts: bool = False,
) -> tuple[list[dict[str, dict[str, Tensor]]], list[dict[str, dict[str, Tensor]]], list[int]]:
    """The state of two workers' optimizers before and after an average, and the extra all-reduces.

    One all-reduce per tensor of the state is not counted as extra.
    """

    def body(transport: InprocTransport) -> tuple[dict, dict, int]:
        torch.manual_seed(0)
        model = Two(sizes)
        made = optimizer(model.parameters())
        strategy = LocalSGD(every="1", optimizer_state="average")
        strategy.name = "local-sgd"
        ctx = make_context(transport, strategy, 2, codec="none", seed=0, recorder=Silent())
        replica = Replica(model, made, lambda y, _: (y**2).mean())
        strategy.setup(ctx, replica)
        calls: list[int] = []
        reduce = ctx.peers.all_reduce

        def counted(tensor: Tensor, op: str = "sum") -> None:
            calls.append(tensor.numel())
            reduce(tensor, op)

        def state() -> dict[str, dict[str, Tensor]]:
            return {
                n: {k: v.clone() for k, v in made.state.get(p, {}).items()}
                for n, p in model.named_parameters()
            }

        for number in range(rounds):
            for sign in (1, -1) if both_touch else (1 if transport.rank == 0 else -1,):
                batch = Batch(torch.ones(3, 2) * sign, None, 3, 6, 0, number)
                replica.forward_backward(batch, 1.0)
                replica.update()
            before = state()
            ctx.peers.all_reduce = counted  # type: ignore[method-assign]
            if counts:
                strategy._memory.average(replica, 0.25 + 0.5 * transport.rank)
            else:
                strategy.synchronise(replica, 0.25 + 0.5 * transport.rank)
            ctx.peers.all_reduce = reduce  # type: ignore[method-assign]
        return (
            before,
            state(),
            len(calls) - rounds * sum(len([k for k in s if k != "step"]) for s in state().values()),
        )

    results = Hub(2).run(body)
    return [r[0] for r in results], [r[1] for r in results], [r[2] for r in results]


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("sizes", [(2, 2), (2, 5), (1, 3)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_that_one_worker_lacks_counts_as_zero(sizes: tuple[int, int], optimizer: str) -> None:
    before, after, _ = averaged(sizes, OPTIMIZERS[optimizer])
    assert not before[0]["b.weight"]
    assert not before[1]["a.weight"]
    for name in ("a.weight", "b.weight", "scale"):
        keys = set(before[0][name]) | set(before[1][name])
        assert keys == set(after[0][name]) == set(after[1][name])
        for key in keys:
            parts = [state[name].get(key, torch.zeros(())) for state in before]
            wanted = torch.maximum(*parts) if key == "step" else 0.25 * parts[0] + 0.75 * parts[1]
            for state in after:
                torch.testing.assert_close(state[name][key], wanted.expand_as(state[name][key]))


def test_the_agreement_costs_one_small_all_reduce_until_all_have_all() -> None:
    def extra(optimizer: str, both_touch: bool, rounds: int) -> list[int]:
        return averaged((2, 3), OPTIMIZERS[optimizer], both_touch, rounds, counts=True)[2]

    assert extra("momentum", both_touch=True, rounds=4) == [1, 1]
    # The second agreement finds that all workers have state for all parameters.
    assert extra("momentum", both_touch=False, rounds=3) == [2, 2]
    # Adam counts steps, so its workers agree at every average.
    assert extra("adam", both_touch=True, rounds=4) == [4, 4]


def test_making_state_changes_nothing_else() -> None:
    model = Two()
    optimizer = torch.optim.Adam(
        [
            {"params": [model.a.weight], "weight_decay": 0.5},
            {"params": [model.b.weight, model.scale]},
        ]
    )
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = {n: (p.data_ptr(), p.detach().clone(), p.grad) for n, p in model.named_parameters()}
    of_a = {k: v.clone() for k, v in optimizer.state[model.a.weight].items()}
    make_state(optimizer, [model.b.weight])
    for name, parameter in model.named_parameters():
        place, value, grad = before[name]
        assert parameter.data_ptr() == place
        assert parameter.grad is grad
        assert torch.equal(parameter, value)
    assert all(torch.equal(v, of_a[k]) for k, v in optimizer.state[model.a.weight].items())
    assert float(optimizer.state[model.b.weight]["exp_avg"].abs().sum()) == 0.0
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0]


def test_states_of_different_kinds_are_refused() -> None:
    def body(transport: InprocTransport) -> str:
        model = Two()
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ctx = make_context(transport, LocalSGD(), 2, codec="none", seed=0, recorder=Silent())
        replica = Replica(model, made, lambda y, _: y.mean())
        made.state[model.a.weight] = {"x" if transport.rank else "y": torch.zeros(4)}
        with pytest.raises(
            BadRequest, match=r"different kinds of state for a\.weight: use optimizer_state=keep"
        ):
            OptimizerAverage(ctx).average(replica, 0.5)
        return "refused"

    assert Hub(2).run(body) == ["refused", "refused"]


# --- the optimizer's memory, shared


def state_at(out: Path, step: int) -> dict[str, Tensor]:
    saved = checkpoint.load_own(out / "checkpoints" / f"step-{step:08d}", 0)
    return dict(saved["optimizer"]["state"][0])


@pytest.mark.parametrize("transport", ["inproc", pytest.param("shm", marks=pytest.mark.processes)])
def test_hogwilds_shared_optimizer_survives_a_resume(
    run_inproc: RunInproc, tmp_path: Path, transport: str
) -> None:
    out = tmp_path / "run"
    options = {
        "strategy": "hogwild:optimizer_state=shared", "workers": 2, "optimizer": "adam",
        "lr": 1e-9, "transport": transport, "threads": 1, "out": str(out),
    }  # fmt: skip
    run_inproc(**options, steps=10, checkpoint_every=10)
    before = state_at(out, 10)
    run_inproc(**options, steps=12, checkpoint_every=12, resume=str(out))
    after = state_at(out, 12)
    counted = [float(before["step"]), float(after["step"])]
    if transport == "inproc":
        assert counted == [20.0, 24.0]
    else:  # two workers that count at the same moment count once
        assert 10 <= counted[0] <= 20
        assert 2 <= counted[1] - counted[0] <= 4
    # Four more gradients of nearly the same weights: squared gradients grow, slowly, by a
    # thousandth of each square.
    assert bool((after["exp_avg_sq"] >= before["exp_avg_sq"] * 0.999**4 * 0.99).all())
    assert float(before["exp_avg_sq"].abs().sum()) > 0


def test_shared_memory_begins_as_a_plain_optimizers_does() -> None:
    def body(transport: InprocTransport) -> list[dict[str, list[float]]]:
        found = []
        for optimizer in (*OPTIMIZERS.values(), lambda p: torch.optim.Rprop(p, lr=0.1)):
            model = Two()
            replica = Replica(model, optimizer(model.parameters()), lambda y, _: y.mean())
            before = [p.detach().clone() for p in model.parameters()]
            share_optimizer(
                make_context(transport, Hogwild(), 2, codec="none", seed=0, recorder=Silent()),
                replica,
            )
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            state = replica.optimizer.state[model.a.weight]
            found.append(
                {
                    k: [float(v.sum()), v.data_ptr()]
                    for k, v in state.items()
                    if isinstance(v, Tensor)
                }
            )
        return found

    first, second = Hub(2).run(body)
    assert first == second  # the same memory
    sums = [{key: value[0] for key, value in state.items()} for state in first]
    assert all(value == 0 for state in sums[:-1] for value in state.values())
    # the learning rate, four times
    assert sums[-1] == {"step": 0.0, "prev": 0.0, "step_size": pytest.approx(0.4)}
