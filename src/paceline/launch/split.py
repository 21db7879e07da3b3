"""`paceline.split`: one model over the ranks of a loop of the user's own.

part = paceline.split(model, "pipeline:micro=8", example=x)
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
for x, y in batches:                    # the same batches on all ranks
    optimizer.zero_grad()
    loss = part.backward(loss_fn, x, y)     # forward and backward passes of all ranks
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.content import call, rows
from paceline.errors import BadRequest
from paceline.launch.join import join
from paceline.parallel.base import Form, Given, Part
from paceline.parallel.dropout import other_randomness
from paceline.registry import Spec, forms
from paceline.types import Batch

Loss = Callable[[Any, Any], Tensor]


def split(
    model: nn.Module,
    parallel: str = "pipeline",
    *,
    example: Any,
    transport: str = "auto",
    seed: int = 0,
    cut: str | None = None,
) -> SplitModel:
    """Split a model over all ranks that a launcher has started; return this rank's part.

    All ranks must bring the same model, made from the same seed. `parallel`: layers, pipeline,
    tensor or domain, with options; `example`: a batch of inputs, by which layers are measured;
    `cut`: the first layers of the stages (`3,6`); `seed`: of dropout.
    """
    spec = forms.resolve(parallel)
    if cut is not None:
        spec = forms.resolve(spec.with_option("cut", cut.replace(",", ";")))
    form: Form = forms.build(spec)
    pace = join("allreduce", transport=transport, seed=seed)
    group = pace.ctx.peers
    parts = form.parts()
    if parts not in (None, group.size):
        raise BadRequest(f"{spec} has {parts} parts, and there are {group.size} ranks")
    if random := other_randomness(model):
        raise BadRequest(f"{spec.name}: {random[0]} draws random numbers in the order of computing")
    form.check(model, group.size)
    _expect_equal(model, group)
    return SplitModel(form.split(model, Given(group, example, seed, group)), spec)


def _expect_equal(model: nn.Module, group: Any) -> None:
    """Refuse models that differ between the ranks."""
    own = sum(float(t.double().sum()) for t in model.state_dict().values() if t.numel())
    low, high = torch.tensor([own], dtype=torch.float64), torch.tensor([own], dtype=torch.float64)
    group.control.all_reduce(low, "min")
    group.control.all_reduce(high, "max")
    if float(low) != float(high):
        raise BadRequest(
            "the ranks brought models with different weights: call torch.manual_seed before you"
            " make the model"
        )


class SplitModel:
    """This rank's part of a model that is split over all ranks."""

    def __init__(self, part: Part, spec: Spec) -> None:
        self.part, self.spec = part, spec
        self.model = part.model  # this rank's layers or pieces of layers, under their names
        self._step = 0

    @property
    def rank(self) -> int:
        return self.part.rank

    @property
    def size(self) -> int:
        return self.part.size

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank holds, for its optimizer."""
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with the names that they have in the whole model."""
        return self.model.named_parameters()

    def backward(self, loss: Loss, inputs: Any, targets: Any) -> float:
        """Make the forward and backward passes of a batch, all ranks together.

        Adds to this rank's gradients; returns the mean loss, on all ranks. `loss` is the mean over
        the samples.
        """
        count = rows(inputs if targets is None else targets)
        batch = Batch(inputs, targets, count, count, 0, self._step)
        self.part.begin(self._step, 0)
        self._step += 1
        value = self.part.backward(_OwnPasses(self.model, loss), batch, 1.0)
        self.part.complete()
        return value

    def __call__(self, inputs: Any) -> Any:
        """The outputs of the whole model, on all ranks, without gradients."""
        with torch.no_grad():
            return call(self.model, inputs)

    def train(self, mode: bool = True) -> SplitModel:
        self.model.train(mode)
        return self

    def eval(self) -> SplitModel:
        return self.train(False)

    def clip_grad_norm(self, most: float) -> float:
        """Clip the gradient of the whole model; return its norm before. All ranks call it."""
        whole = self.part.norm()
        if whole is None:
            return float(nn.utils.clip_grad_norm_(self.model.parameters(), most))
        norm = torch.tensor(whole, dtype=torch.float64)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), most, norm)
        return whole

    def state_dict(self) -> dict[str, Tensor] | None:
        """The whole model's state_dict, on rank 0; None on the other ranks. All ranks call it."""
        state = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()}
        return self.part.gather(state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a whole model's state_dict: each rank takes what it holds."""
        self.model.load_state_dict(self.part.own(state))


class _OwnPasses:
    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self._loss = model, loss

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return self._loss(outputs, targets)

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def plain_backward(self, part: Batch, scale: float) -> float:
        loss = self._loss(call(self.model, part.inputs), part.targets)
        (loss if scale == 1.0 else loss * scale).backward()
        return float(loss.detach())
