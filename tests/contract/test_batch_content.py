"""Batches that are not pairs: dicts, named tuples, nested batches, classes of one's own."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from tests.contract.test_own_code import made, on_paces
from tests.small import make_pairs, small_net, weights_distance
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.data.content import Arguments, call, rows, split, to_device, whole
from paceline.errors import BadRequest
from paceline.run.own_loop import Pace

RunInproc = Callable[..., paceline.Run]
X, Y = make_pairs(24)
META = torch.device("meta")
Point = namedtuple("Point", "x y")


class Encoded(UserDict):
    """As Hugging Face's BatchEncoding: a mapping that is no dict, with a method `to`."""

    def to(self, device: torch.device) -> "Encoded":
        return Encoded({key: value.to(device) for key, value in self.items()})


@dataclass
class Graphs:
    """A batch of a library for graphs, say."""

    nodes: Tensor

    def to(self, device: torch.device) -> "Graphs":
        return Graphs(self.nodes.to(device))


@dataclass
class Output:
    """What a Hugging Face model returns."""

    logits: Tensor
    loss: None = None


def test_what_inputs_and_targets_are() -> None:
    assert split((X, Y)) == (X, Y)
    assert split([X, Y]) == (X, Y)
    assert split(Point(X, Y)) == (X, Y)
    for key in ("labels", "label", "targets", "target", "y"):
        assert split({"image": X, key: Y}) == (X, Y)
        assert split(Encoded({key: Y, "image": X})) == (X, Y)
    inputs, targets = split(OrderedDict(ids=X, mask=Y, labels=Y))
    assert isinstance(inputs, Arguments)
    assert (list(inputs), targets) == (["ids", "mask"], Y)
    assert whole((X, Y)) == ((X, Y), None)


@pytest.mark.parametrize(
    ("batch", "described"),
    [
        ((X, Y, Y), "a tuple of 3"),
        ({"image": X, "kind": Y}, "a dict with the keys image, kind"),
        ({"labels": Y}, "a dict with the keys labels"),
        (X, "a Tensor"),
        (Graphs(X), "a Graphs"),
    ],
)
def test_what_only_a_step_of_ones_own_can_take(batch: Any, described: str) -> None:
    with pytest.raises(BadRequest, match=f"this data gives {described}.*give step="):
        split(batch)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (X, 24),
        ((X, Y), 24),
        ({"text": ["a", "b", "c"], "labels": Y[:3]}, 3),
        ({"text": ["a", "b", "c"]}, 3),
        ({"a": {"b": [X[:5], X[:5]]}}, 5),
        ([[X[:1], X[:3]], [{"box": Y}, {"box": Y}]], 2),
        (Point(X[:4], None), 4),
        (Encoded({"ids": X[:7]}), 7),
        (torch.tensor(3.0), 1),
        (Graphs(X), 1),
        ([], 0),
    ],
)
def test_the_rows_of_a_batch(batch: Any, count: int) -> None:
    assert rows(batch) == count


def test_a_batch_keeps_its_types_on_its_way_to_a_device() -> None:
    batch = (Point(X, [Y, "name"]), {"a": (X,)}, Graphs(X), Encoded({"ids": Y}), 3)
    assert to_device(batch[:2], torch.device("cpu"))[0] is batch[0], "nothing to move"
    point, mapping, graphs, encoded, number = to_device(batch, META)
    assert type(point) is Point
    assert point.x.device == point.y[0].device == mapping["a"][0].device == META
    assert point.y[1] == "name"
    assert (type(graphs), type(encoded), number) == (Graphs, Encoded, 3)
    assert graphs.nodes.device == encoded["ids"].device == META
    arguments = to_device(Arguments(ids=X), META)
    assert isinstance(arguments, Arguments)


def test_outputs_with_logits() -> None:
    assert torch.equal(call(Output, X), X)
    assert torch.equal(call(lambda x: {"logits": x, "loss": None}, X), X)
    assert torch.equal(call(lambda a, b: a + b, Arguments(a=X, b=X)), 2 * X)
    assert call(lambda x: (x, 1), X) == (X, 1)


class Entries(Dataset):
    """A data set in the style of Hugging Face: dicts of tensors."""

    def __init__(self, names: tuple[str, ...] = ("input_ids", "attention_mask")) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {**dict.fromkeys(self.names, X[i]), "labels": Y[i]}


class Classifier(nn.Module):
    """A model in the style of Hugging Face: inputs by name, an output with logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = small_net()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
        return Output(self.net(input_ids * 0.5 + attention_mask * 0.5))


class OneInput(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("workers", [1, 2])
def test_train_finds_labels_and_inputs_in_dicts(run_inproc: RunInproc, workers: int) -> None:
    """The same weights as a model of one input with pairs; a test set of dicts is evaluated."""
    options = {
        "epochs": 2,
        "batch_size": None,
        "workers": workers,
        "strategy": "allreduce",
        "loss": "cross-entropy",
    }
    size = 8 // workers
    named = run_inproc(model=Classifier, data=(DataLoader(Entries(), size), Entries()), **options)
    single = run_inproc(
        model=OneInput, data=(DataLoader(Entries(("x",)), size), Entries(("x",))), **options
    )
    pairs: Any = [*zip(X, Y, strict=True)]
    expected = run_inproc(model=OneInput, data=(DataLoader(pairs, size), (X, Y)), **options)
    for run in (named, single):
        assert weights_distance(run.weights, expected.weights) < 1e-6
        assert run.test_accuracy == expected.test_accuracy


def test_train_refuses_other_batches_in_one_sentence(run_inproc: RunInproc) -> None:
    triples = [(x, x, y) for x, y in zip(X, Y, strict=True)]
    with pytest.raises(BadRequest, match=r"a list of 3\. For any other batch give step="):
        run_inproc(data=triples, steps=1)
    with pytest.raises(BadRequest, match=r"one input and targets.*input_ids, attention_mask"):
        run_inproc(
            data=Entries(), model=Classifier, steps=1, strategy="allreduce", privacy="noise=1.0"
        )


class Sample(NamedTuple):
    image: Tensor
    boxes: dict[str, Tensor]
    name: str


class Samples(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> Sample:
        return Sample(X[i], {"at": X[i, :2], "kind": Y[i]}, f"sample {i}")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("loader", [False, True])
def test_join_gives_batches_as_the_collate_function_makes_them(workers: int, loader: bool) -> None:
    def body(pace: Pace) -> list[str]:
        data: Any = DataLoader(Samples(), batch_size=2) if loader else Samples()
        model, _, batches = pace.prepare(*made(lambda: nn.Linear(6, 3)), data, batch_size=2)
        names = []
        for batch in batches:
            assert type(batch) is Sample
            assert type(batch.boxes) is dict
            assert len(batch.image) == len(batch.boxes["kind"]) == len(batch.name)
            names += batch.name if batches.current.weight else []
            pace.step(nn.functional.cross_entropy(model(batch.image), batch.boxes["kind"]))
        return names

    found = on_paces(workers, body, "allreduce")
    assert sorted(name for names in found for name in names) == [f"sample {i}" for i in range(5)]


def test_join_takes_lists_of_samples_of_any_size() -> None:
    """As detection does: a collate function that stacks nothing."""
    images = [(torch.randn(3, 4 + i, 4), {"boxes": torch.randn(i, 4)}) for i in range(1, 7)]
    loader: Any = DataLoader(images, 2, collate_fn=lambda found: tuple(zip(*found, strict=True)))  # type: ignore[arg-type]

    def body(pace: Pace) -> int:
        model, _, batches = pace.prepare(*made(lambda: nn.Linear(4, 1)), loader)
        seen = 0
        for inputs, targets in batches:
            assert len(inputs) == len(targets) == 2
            seen += len(inputs) if batches.current.weight else 0
            pace.step(sum(model(image).mean() for image in inputs))
        return seen

    assert sum(on_paces(2, body)) == 6
    assert on_paces(1, body) == [6]
