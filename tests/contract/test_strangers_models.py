"""Networks and loaders that people bring, of kinds that no other test has.

One worker is compared with the plain loop bit for bit, two workers with the plain loop on the union
of their batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.contract.test_own_code import on_paces
from tests.small import identical, weights_distance
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import paceline
from paceline.common.seeding import seed_everything
from paceline.errors import BadRequest
from paceline.run.own_loop import Pace

RunInproc = Callable[..., paceline.Run]
ROWS, STEPS = 24, 9
State = dict[str, Tensor]


# --- a tagger with packed sequences, its batches nested dicts


class Sentences(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        lengths = torch.randint(2, 8, (ROWS,), generator=random).tolist()
        self.words = [torch.randint(1, 30, (length,), generator=random) for length in lengths]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index], self.words[index] % 4


def nested(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    words, tags = zip(*samples, strict=True)
    lengths = torch.tensor([len(each) for each in words])
    return {
        "text": {"ids": pad_sequence(words, True), "lengths": lengths},
        "tags": pad_sequence(tags, True, -1),
        "names": [str(len(each)) for each in words],
    }


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        out: Tensor = self.out(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])
        return out


def tagged(model: nn.Module, batch: Any) -> Tensor:
    """The mean over sentences, each of which is the mean over its words."""
    logits = model(**batch["text"])
    losses = F.cross_entropy(
        logits.transpose(1, 2), batch["tags"], ignore_index=-1, reduction="none"
    )
    return (losses.sum(1) / batch["text"]["lengths"]).mean()


# --- a U-Net: skip connections, transposed convolutions, a class for every pixel


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = self.block(1, 4), self.block(4, 8)
        self.up, self.join = nn.ConvTranspose2d(8, 4, 2, 2), self.block(8, 4)
        self.head = nn.Conv2d(4, 3, 1)

    @staticmethod
    def block(ins: int, outs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(ins, outs, 3, padding=1), nn.GroupNorm(2, outs), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.up(self.inner(F.max_pool2d(skip, 2)))
        out: Tensor = self.head(self.join(torch.cat([deep, skip], 1)))
        return out


def pictures() -> TensorDataset:
    x = torch.randn(ROWS, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 0] > 1).long())


def usual(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# --- two heads, two losses, weights of the losses that are learnt; checkpointed activations


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8))
        self.kind = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
        self.size = nn.Linear(8, 1)
        self.shares = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = checkpoint(self.body, x, use_reentrant=False)
        return self.kind(hidden), self.size(hidden).squeeze(1)


def two_losses(model: nn.Module, batch: Any) -> Tensor:
    x, kind, size = batch
    found_kind, found_size = model(x)
    first, second = model.shares
    losses = F.cross_entropy(found_kind, kind), F.mse_loss(found_size, size)
    total: Tensor = losses[0] * torch.exp(-first) + losses[1] * torch.exp(-second) + first + second
    return total


def triples() -> TensorDataset:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, torch.arange(ROWS) % 3, x.sum(1))


# --- a frozen backbone with a head that was lazy, its own `train`; a stream


class Frozen(nn.Module):
    """The usual way to keep batch norm frozen: every `model.train()` puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
        self.backbone.requires_grad_(False)
        self.head = nn.LazyLinear(3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x))
        return out


def frozen() -> nn.Module:
    net = Frozen()
    net(torch.zeros(2, 1, 8, 8))
    return net


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        x = torch.randn(ROWS, 1, 8, 8, generator=torch.Generator().manual_seed(5))
        yield from ((each, number % 3) for number, each in enumerate(x))


@dataclass(frozen=True)
class Case:
    net: Callable[[], nn.Module]
    step: Callable[[nn.Module, Any], Tensor]
    loader: Callable[[int], DataLoader[Any]]


CASES = {
    "packed sequences": Case(
        Tagger, tagged, lambda size: DataLoader(Sentences(), size, collate_fn=nested)
    ),
    "u-net": Case(UNet, usual, lambda size: DataLoader(pictures(), size)),
    "two heads": Case(
        TwoHeads,
        two_losses,
        lambda size: DataLoader(
            triples(), batch_sampler=BatchSampler(SequentialSampler(range(ROWS)), size, True)
        ),
    ),
    "frozen backbone": Case(frozen, usual, lambda size: DataLoader(Stream(), size)),
}
IN_STEP = ["allreduce", "local-sgd:every=1", "ps", "ring-reduce"]


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_everything(0)
    model = case.net()
    return model, optimizer_of(p for p in model.parameters() if p.requires_grad)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def follow(case: Case, model: nn.Module, optimizer: Any, batches: Any) -> State:
    """The loop as it is written in plain PyTorch."""
    steps = 0
    model.train()
    while steps < STEPS:
        for batch in batches:
            if steps == STEPS:
                break
            optimizer.zero_grad()
            case.step(model, batch).backward()
            optimizer.step()
            steps += 1
    return {name: value.clone() for name, value in model.state_dict().items()}


def plain(case: Case) -> State:
    return follow(case, *made(case), case.loader(4))


def joined(case: Case, pace: Pace, size: int) -> State:
    model, optimizer, batches = pace.prepare(*made(case), case.loader(size))
    follow(case, model, optimizer, batches)
    pace.finish()
    return pace.state_dict()


@pytest.mark.parametrize("name", CASES)
def test_one_worker_is_the_plain_loop(run_inproc: RunInproc, name: str) -> None:
    case = CASES[name]
    expected = plain(case)
    assert identical(joined(case, paceline.join("allreduce"), 4), expected)
    run = run_inproc(
        model=case.net,
        data=case.loader(4),
        step=case.step,
        optimizer=optimizer_of,
        steps=STEPS,
        batch_size=None,
        threads=torch.get_num_threads(),  # PyTorch rounds differently with another number
    )
    assert identical(run.weights, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", IN_STEP)
def test_two_workers_follow_the_plain_loop(run_inproc: RunInproc, name: str, spec: str) -> None:
    case = CASES[name]
    expected = plain(case)
    run = run_inproc(
        model=case.net,
        data=case.loader(2),
        step=case.step,
        optimizer=optimizer_of,
        steps=STEPS,
        strategy=spec,
        workers=2,
        batch_size=None,
    )
    assert weights_distance(run.weights, expected) < 1e-5
    if spec != "ps":  # servers have ranks of their own
        for found in on_paces(2, lambda pace: joined(case, pace, 2), spec):
            assert weights_distance(found, expected) < 1e-5


@pytest.mark.parametrize("spec", ["hogwild", "gossip", "diloco:every=2", "ps:consistency=async"])
def test_other_strategies_train_them(run_inproc: RunInproc, spec: str) -> None:
    for case in CASES.values():
        run = run_inproc(
            model=case.net,
            data=(case.loader(2), case.loader(4)),
            step=case.step,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02),
            epochs=4,
            evaluate_every=24,
            strategy=spec,
            workers=2,
            batch_size=None,
        )
        with torch.no_grad():
            before = case.step(made(case)[0].eval(), next(iter(case.loader(ROWS))))
        assert run.test_loss < float(before)


def test_a_loss_that_is_a_sum_makes_smaller_steps_as_with_ddp() -> None:
    """With two workers half as large as in the plain loop, so this rate is twice as large."""

    def summed(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0])[0], batch[1], reduction="sum")

    case = Case(TwoHeads, summed, CASES["two heads"].loader)

    def body(pace: Pace) -> State:
        model, _ = made(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        follow(case, *pace.prepare(model, optimizer, case.loader(2)))
        pace.finish()
        return pace.state_dict()

    model, _ = made(case)
    expected = follow(case, model, torch.optim.SGD(model.parameters(), lr=0.01), case.loader(4))
    for found in on_paces(2, body):
        assert weights_distance(found, expected) < 1e-5


# --- what cannot be taken as it is


def test_a_lazy_module_is_refused_before_any_worker_starts(run_inproc: RunInproc) -> None:
    case = CASES["frozen backbone"]
    says = "head.weight has no shape yet.*pass a batch through the model first"
    for workers in (1, 2):
        with pytest.raises(BadRequest, match=says):
            run_inproc(model=Frozen, data=case.loader(4), workers=workers, batch_size=None)
    model = Frozen()
    with pytest.raises(BadRequest, match=says):
        paceline.join("allreduce").prepare(model, optimizer_of(model.head.parameters()))


def test_a_class_at_every_place_says_which_loss(run_inproc: RunInproc) -> None:
    data = (pictures(), pictures())
    for given in (data, pictures()):  # without a test set the first step tells it
        with pytest.raises(BadRequest, match="give loss=cross-entropy and metric=accuracy"):
            run_inproc(model=UNet, data=given)
    run = run_inproc(model=UNet, data=data, loss="cross-entropy", metric="accuracy", steps=3)
    assert 0 < run.test_accuracy < 1


class Triples(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter(triples())


def test_a_test_stream_gives_pairs(run_inproc: RunInproc) -> None:
    """With `step=` the sentence does not ask for `step=`."""
    with pytest.raises(BadRequest, match="a test stream must give pairs of tensors; pass a Data"):
        run_inproc(model=TwoHeads, data=(triples(), Triples()), step=two_losses)
    run = run_inproc(model=TwoHeads, data=(Triples(), triples()), step=two_losses, steps=2)
    assert run.test_loss > 0


class Bag(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.embed(x))
        return out


def test_sparse_embeddings_are_exchanged_as_dense_tensors(run_inproc: RunInproc) -> None:
    words = torch.randint(0, 50, (ROWS, 5), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(words, torch.arange(ROWS) % 3)
    case = Case(Bag, usual, lambda size: DataLoader(data, size))
    options = {"model": Bag, "strategy": "allreduce", "workers": 2, "steps": STEPS}
    options |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05), "batch_size": None}
    seed_everything(0)
    model = Bag()
    expected = follow(case, model, torch.optim.SGD(model.parameters(), lr=0.05), case.loader(4))
    found = run_inproc(**options, data=case.loader(2)).weights
    assert weights_distance(found, expected) < 1e-6

    def sparse(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(parameters)[:1])

    with pytest.raises(BadRequest, match="SparseAdam takes sparse gradients only"):
        run_inproc(**{**options, "optimizer": sparse}, data=case.loader(2))
    with pytest.raises(BadRequest, match="SparseAdam takes sparse gradients only"):
        paceline.join("allreduce").prepare(model, sparse(model.parameters()))
