"""A training step of one's own: language models, distillation, models with their own loss."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_resume import SPECS
from tests.contract.test_train_options import STEPS, options, plain
from tests.small import identical, small_net, weights_distance
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from paceline import Run
from paceline.common.seeding import seed_everything
from paceline.errors import BadRequest
from paceline.record.reader import read_worker_events

RunInproc = Callable[..., Run]


def usual(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


QUICK = ("serial", "allreduce", "ring-reduce", "local-sgd:every=3", "ps", "hogwild", "gossip")


@pytest.mark.parametrize(
    "spec", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in SPECS]
)
def test_the_usual_step_written_out_is_the_usual_run(run_inproc: RunInproc, spec: str) -> None:
    found = run_inproc(**options(spec, step=usual))
    assert found.steps == STEPS
    if spec == "serial":
        assert identical(found.weights, plain())
    if "consistency=" not in spec and "hogwild" not in spec:
        expected = run_inproc(**options(spec))
        assert identical(found.weights, expected.weights)
        assert found.test_loss == pytest.approx(expected.test_loss, rel=1e-6)
    assert found.test_accuracy is None


class Words(Dataset):  # type: ignore[type-arg]
    """Samples as Hugging Face's data sets give them."""

    def __init__(self, count: int = 40) -> None:
        random = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, 11, (count, 5), generator=random)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids % 3}


class Language(nn.Module):
    """Returns (logits, loss) when it is given labels, as nanoGPT and its kin do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.embed(input_ids) * attention_mask[..., None])
        loss = None if labels is None else F.cross_entropy(logits.transpose(1, 2), labels)
        return logits, loss


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch)[1]
    return loss


@pytest.mark.parametrize("spec", ["serial", "allreduce", "ps", "local-sgd:every=1"])
def test_a_model_with_its_own_loss(run_inproc: RunInproc, spec: str) -> None:
    data = (DataLoader(Words(), batch_size=8 if spec == "serial" else 4), Words(10))
    asked = {**options(spec, step=own_loss, model=Language, data=data), "batch_size": None}
    found = run_inproc(**asked, evaluate_every=5)
    model = loop_over_words()
    most = 1e-9 if spec == "serial" else 1e-6
    assert weights_distance(found.weights, model.state_dict()) < most
    held = next(iter(DataLoader(Words(10), batch_size=10)))
    with torch.no_grad():
        assert found.test_loss == pytest.approx(float(own_loss(model, held)), rel=1e-5)


def loop_over_words() -> nn.Module:
    seed_everything(0)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    made = 0
    while made < STEPS:
        for batch in DataLoader(Words(), batch_size=8):
            if made == STEPS:
                break
            optimizer.zero_grad()
            own_loss(model, batch).backward()
            optimizer.step()
            made += 1
    return model


def test_distillation(run_inproc: RunInproc) -> None:
    torch.manual_seed(7)
    teacher = small_net().eval()

    def distil(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            soft = teacher(batch[0]).softmax(1)
        return F.kl_div(model(batch[0]).log_softmax(1), soft, reduction="batchmean")

    run = run_inproc(**options("allreduce", step=distil, lr=0.5, steps=40, evaluate_every=4))
    first = next(e for e in read_worker_events(run.out)[0] if e["kind"] == "evaluation")
    assert run.test_loss < 0.5 * first["loss"]
    assert run.best["by"] == "loss"


def test_a_step_by_its_name(run_inproc: RunInproc, tmp_path: Path) -> None:
    (tmp_path / "ownsteps.py").write_text(
        "import torch\n\ndef usual(model, batch):\n"
        "    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])\n"
    )
    found = run_inproc(**options(step="ownsteps:usual"))
    assert identical(found.weights, plain())
    assert found.record["config"]["step"] == "ownsteps:usual"


Triple = namedtuple("Triple", "first second labels")


class Triples(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Triple:
        return Triple(torch.ones(6) * index, torch.ones(6), index % 3)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model": Language, "data": (Words(), Words(9)), "metric": "none"}, "give a loss of your"),
        ({"data": Triples()}, "give step=, a function of"),
        ({"data": (Words(), Words(9))}, "the model does not take this batch as it is"),
        ({"step": usual, "loss": "mse"}, "loss and step"),
        ({"step": usual, "metric": "auc"}, "metric and step"),
        ({"step": usual, "until_accuracy": 0.9}, "until_accuracy cannot be used with step"),
        ({"step": usual, "privacy": "noise=1,clip=1"}, "privacy cannot be used with step"),
        ({"step": "nowhere:f"}, "step=nowhere:f cannot be imported"),
        ({"step": 3}, "give a function of"),
        ({"step": lambda model: 1.0}, r"called with \(model, batch\), .* takes \(model\)"),
        ({"data": [1, 2]}, "in Python: or tensors, a Dataset, a DataLoader"),
        ({"step": lambda model, batch: 1.0}, "step returned a float"),
    ],
)
def test_bad_steps_are_told(run_inproc: RunInproc, more: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        run_inproc(**{**options(), **more})
