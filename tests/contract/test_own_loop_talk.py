"""What a loop of the user's own asks of all workers."""

from typing import Any

import pytest
import torch
from tests.contract.test_own_code import made, on_paces
from tests.small import make_pairs, small_net
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.errors import BadRequest
from paceline.run.own_loop import Pace

cross_entropy = nn.functional.cross_entropy


@pytest.mark.parametrize("strategy", ["allreduce", "psgd"])
def test_means_of_numbers_and_tensors(strategy: str) -> None:
    def body(pace: Pace) -> Any:
        rank = pace.rank
        return (
            pace.mean(rank),
            pace.mean(float("nan") if rank == 0 else 2.0 * rank, weight=rank),
            pace.mean(torch.tensor([[rank, 1.0]], dtype=torch.float16), weight=3),
            pace.mean(torch.tensor([rank, rank + 1])),
            pace.any(rank == 2),
            pace.sum(rank),
            (pace.sum(0.5), pace.sum(torch.tensor([rank > 0, True])), pace.sum(torch.ones(()))),
        )

    for number, weighted, tensor, integers, found, total, sums in on_paces(3, body, strategy):
        assert number == 1.0
        assert weighted == pytest.approx((1 * 2.0 + 2 * 4.0) / 3)
        assert torch.equal(tensor, torch.tensor([[1.0, 1.0]], dtype=torch.float16))
        assert torch.equal(integers, torch.tensor([1.0, 2.0]))
        assert found is True
        assert (total, type(total)) == (3, int)
        assert (sums[0], sums[1].tolist(), sums[2]) == (1.5, [2, 3], torch.tensor(3.0))
    with pytest.raises(BadRequest, match=r"pace\.mean\(weight=-1\)"):
        paceline.join("serial").mean(1.0, weight=-1)


def test_the_mean_of_one_worker_is_its_number() -> None:
    """Bit for bit: 0.1 * 3 / 3 is not 0.1."""
    pace = paceline.join("serial")
    assert 0.1 * 3 / 3 != 0.1
    assert pace.mean(0.1, weight=3) == 0.1
    assert pace.mean(torch.tensor(0.1, dtype=torch.float64), weight=3).item() == 0.1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]
)
def test_gathered_tensors_may_have_different_rows(dtype: torch.dtype) -> None:
    def body(pace: Pace) -> list[torch.Tensor]:
        assert [t.tolist() for t in pace.gather(torch.tensor(pace.rank))] == [0, 1, 2]
        return pace.gather(torch.full((pace.rank, 2), pace.rank, dtype=dtype))

    expected = [torch.full((rank, 2), rank, dtype=dtype) for rank in range(3)]
    for gathered in on_paces(3, body):
        assert [t.dtype for t in gathered] == [dtype] * 3
        assert all(torch.equal(a, b) for a, b in zip(gathered, expected, strict=True))
    with pytest.raises(BadRequest, match="takes a tensor of numbers, not list"):
        paceline.join("serial").gather([1])  # type: ignore[arg-type]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        inputs, targets = make_pairs(22)
        return iter(zip(inputs, targets, strict=True))


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader", "shuffled", "stream"])
@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_an_evaluation_sees_every_sample_once(kind: str, workers: int) -> None:
    inputs, targets = make_pairs(22)
    dataset = TensorDataset(inputs, targets)
    data: Any = {
        "tensors": (inputs, targets),
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=3),
        "shuffled": DataLoader(dataset, batch_size=3, shuffle=True),
        "stream": DataLoader(Stream(), batch_size=3),
    }[kind]

    def body(pace: Pace) -> Any:
        model, _, _ = pace.prepare(*made(small_net))
        torch.manual_seed(pace.rank)
        total, rows = 0.0, 0
        with torch.no_grad():
            for x, y in pace.evaluation(data, batch_size=3):
                total += cross_entropy(model(x), y, reduction="sum").item()
                rows += len(y)
        return pace.mean(total / max(rows, 1), weight=rows), rows

    model, _ = made(small_net)
    expected = cross_entropy(model(inputs), targets).item()
    found = on_paces(workers, body)
    assert sum(rows for _, rows in found) == 22
    assert [mean for mean, _ in found] == pytest.approx([expected] * workers)


def test_where_a_worker_is(capfd: pytest.CaptureFixture[str]) -> None:
    def body(pace: Pace) -> None:
        pace.print("rank", pace.rank, sep="=")

    on_paces(2, body)
    assert capfd.readouterr().out == "rank=0\n"
    pace = paceline.join("serial")
    assert (pace.device, pace.local_rank) == (torch.device("cpu"), 0)
    with pytest.raises(BadRequest, match=r"pace\.evaluation takes .* not a int"):
        next(pace.evaluation(3))


def test_a_weight_does_not_make_asynchronous_workers_wait() -> None:
    """core.md 24: two workers with different numbers of weighted steps come to their end."""

    def body(pace: Pace) -> float:
        model, _, _ = pace.prepare(*made(small_net))
        x, y = make_pairs(4)
        for _ in range(2 + 3 * pace.rank):
            pace.step(cross_entropy(model(x), y), weight=len(y))
        share = pace.strategy.share()
        pace.finish()
        return share

    assert on_paces(2, body, "psgd") == pytest.approx([2 / 7, 5 / 7])
