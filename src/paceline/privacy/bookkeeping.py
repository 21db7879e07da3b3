"""Book-keeping: clip the gradients of all samples in one backward pass.

Parameters take no part in autograd, so the backward pass computes only the gradients of what flows
between the layers. Each layer records those and measures the gradient length of each sample when
they arrive (layers.py). After the backward pass all lengths are known, and one product per layer
makes the weighted sum. No gradient is ready before the whole backward pass has ended, so nothing
can be exchanged while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.errors import BadRequest
from paceline.objectives.losses import Loss
from paceline.privacy.anything import Anything, take_rows
from paceline.privacy.checks import refuse_left_out
from paceline.privacy.clip import Loop, Places, clip_factors, find_layers, refuse_not_finite
from paceline.privacy.layers import Booked, Call

TRIED = 8  # samples with which a model is tried out
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-3}  # allowed differences, relative to the largest


class _Root(torch.autograd.Function):
    """Gives an output a gradient although nothing before it is trained.

    Its backward pass costs nothing.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class Bookkeeping:
    """Clips all samples in one backward pass."""

    def __init__(
        self, model: nn.Module, loss: Loss, places: Places, bound: float, per_layer: bool
    ) -> None:
        self.model, self.loss, self.bound, self.per_layer = model, loss, bound, per_layer
        self.notices: list[str] = []
        self._trained = [p for p, _ in places]
        self._place = {id(p): g for p, g in places}
        self._anchor = torch.zeros((), requires_grad=True)
        self.layers = self._booked(model)
        self._calls: dict[int, list[Call]] = {}
        self._waiting: dict[int, int] = {}  # by layer: gradients that have not arrived yet
        self._squares: dict[int, Tensor] = {}
        self._samples, self._on = 0, False
        for number, layer in enumerate(self.layers):
            layer.module.register_forward_hook(self._hook(number), with_kwargs=True)

    def _booked(self, model: nn.Module) -> list[Booked]:
        layers = find_layers(model, self._trained)
        slow = [layer for layer in layers if layer.rule is None]
        for layer in slow:
            if recurrent := next(
                (m for m in layer.module.modules() if isinstance(m, nn.RNNBase)), None
            ):
                raise BadRequest(
                    f"privacy: layer {layer.name or 'the model itself'}"
                    f" ({type(recurrent).__name__}) returns several tensors, and torch.func"
                    " cannot run it sample by sample: use clipping=loop"
                )
        if slow:
            names = ", ".join(
                f"{layer.name or 'the model itself'} ({type(layer.module).__name__})"
                for layer in slow[:3]
            )
            self.notices.append(
                f"privacy: no rule for {names}{' and others' if len(slow) > 3 else ''}: torch.func"
                " clips them, which is slower"
            )
        return [
            (layer.rule or Anything)(layer.name, layer.module, self._places_in(layer.module))
            for layer in layers
        ]

    def _places_in(self, module: nn.Module) -> dict[str, Tensor]:
        return {n: self._place[id(p)] for n, p in module.named_parameters() if id(p) in self._place}

    # --- a pass

    def __call__(self, inputs: Any, targets: Any, samples: int) -> tuple[float, Tensor]:
        refuse_left_out(self.loss, targets)
        self._samples = samples
        with self._booking():
            loss = self.loss(self.model(inputs), targets)
            if loss.dim():
                raise BadRequest(
                    "the loss must be one number, the mean over the rows; it has shape"
                    f" {tuple(loss.shape)}"
                )
            value = loss.item()
            if not loss.requires_grad:
                raise BadRequest("privacy: the loss does not depend on any trained parameter")
            self._on = False  # torch.func may run layers again
            loss.backward(torch.full_like(loss, samples))
            with torch.no_grad():
                # Layers whose output the loss does not depend on.
                for number in [n for n, count in self._waiting.items() if count]:
                    self._measure(number)
        lengths = self._add_up()
        return value, lengths

    def _hook(self, number: int) -> Callable[..., Any]:
        layer = self.layers[number]

        def hook(
            module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], given: Any
        ) -> Any:
            if not self._on:
                return None
            which, output = (None, given) if isinstance(given, Tensor) else _only_tensor(given)
            if output is None or output.dim() == 0 or output.shape[0] != self._samples:
                wrong = "returns no single tensor, which bookkeeping needs"
                if output is not None:
                    shape = tuple(output.shape)
                    wrong = (
                        f"returns {shape} for {self._samples} samples; samples must be the first"
                        " dimension"
                    )
                raise BadRequest(f"privacy: layer {layer.name} {wrong}: use clipping=loop")
            if output.grad_fn is None:
                output = _Root.apply(output.detach(), self._anchor)
            if output.grad_fn is None:  # under no_grad: the layer is used but not trained
                return None
            call = Call(inputs, named, which)
            self._calls.setdefault(number, []).append(call)
            self._waiting[number] = self._waiting.get(number, 0) + 1
            node: Any = output.grad_fn
            node.register_prehook(partial(self._arrived, number, call, output.output_nr))
            return output if which is None else (*given[:which], output, *given[which + 1 :])

        return hook

    def _arrived(
        self, number: int, call: Call, index: int, grads: tuple[Tensor | None, ...]
    ) -> None:
        """Record the gradient of a layer's output, before the backward pass enters the layer."""
        call.grads = grads[index]
        if call.was_changed:
            raise BadRequest(
                f"privacy: the input of layer {self.layers[number].name} is changed in place after"
                " the layer has used it: use a copy"
            )
        self._waiting[number] -= 1
        if not self._waiting[number]:
            self._measure(number)

    def _measure(self, number: int) -> None:
        self._waiting[number] = 0
        calls = [c for c in self._calls.pop(number) if c.grads is not None]
        if calls:
            self._squares[number] = self.layers[number].book(calls)

    @torch.no_grad()
    def _add_up(self) -> Tensor:
        count = len(self.layers)
        found = list(self._squares.values())
        if len({s.dtype for s in found}) > 1:
            found = [s.double() for s in found]
        whole = torch.stack(found).sum(0).sqrt_()
        refuse_not_finite(whole)
        factors = clip_factors(whole, self.bound)
        for number, layer in enumerate(self.layers):
            squares = self._squares.get(number)
            if squares is None:
                layer.skip()
                continue
            own = (
                clip_factors(squares.sqrt(), self.bound / math.sqrt(count))
                if self.per_layer
                else factors
            )
            layer.add_up(own if own.dtype is squares.dtype else own.to(squares.dtype))
            layer.forget()
        return whole

    @contextmanager
    def _booking(self) -> Iterator[None]:
        """Keep parameters out of autograd while the body runs."""
        for kept in (self._calls, self._waiting, self._squares):
            kept.clear()
        for parameter in self._trained:
            parameter.requires_grad_(False)
        self._on = True
        try:
            yield
        finally:
            self._on = False
            for parameter in self._trained:
                parameter.requires_grad_(True)

    # --- before the first pass

    def try_out(self, inputs: Any, targets: Any, samples: int) -> None:
        """Check that a few samples give the same gradients together as one at a time.

        Dropout is off meanwhile. Two batch sizes show which inputs of a layer all samples share.
        """
        refuse_left_out(self.loss, targets)
        random = torch.get_rng_state()
        reference = Loop(
            self.model,
            self.loss,
            [(p, torch.zeros_like(p)) for p in self._trained],
            self.bound,
            self.per_layer,
        )
        try:
            with NoDropout():
                for count in dict.fromkeys((max(1, samples - 1), samples)):
                    few, wanted = take_rows(inputs, count), take_rows(targets, count)
                    alone, lengths = reference(few, wanted, count)
                    together, own = self(few, wanted, count)
                    places = [self._place[id(p)] for p in self._trained]
                    self._compare(
                        alone, together, lengths, own, [*zip(reference.sums, places, strict=True)]
                    )
        finally:
            torch.set_rng_state(random)

    def _compare(
        self,
        alone: float,
        together: float,
        lengths: Tensor,
        own: Tensor,
        sums: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        close = CLOSE.get(lengths.dtype, 2e-3)
        if not abs(alone - together) <= close * max(1.0, abs(alone)):
            raise BadRequest(
                "privacy: the loss of a batch is not the mean of its samples' losses: the loss must"
                " be the mean over the rows (no class weights, no ignored targets), and no layer"
                " may mix samples"
            )
        bound = float(lengths.max())
        wrong = not float((own.cpu().double() - lengths.cpu().double()).abs().max()) <= close * max(
            bound, 1e-12
        )
        for one, other in sums:
            apart = float((one.double() - other.double()).norm())
            wrong = wrong or not apart <= close * max(
                float(one.double().norm()), 1e-3 * min(bound, self.bound), 1e-12
            )
        if wrong:
            raise BadRequest(
                "privacy: samples' gradients in a batch differ from their gradients alone: the"
                " model mixes samples, draws random numbers, or uses a layer's parameters outside"
                " that layer: use clipping=loop"
            )


class NoDropout(TorchFunctionMode):
    """Turns dropout off, as a module and as a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "dropout" in getattr(func, "__name__", ""):
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


def _only_tensor(output: Any) -> tuple[int | None, Tensor | None]:
    """Return the one tensor in a layer's output, and its place in a tuple."""
    if isinstance(output, Tensor):
        return None, output
    found = (
        [i for i, v in enumerate(output) if isinstance(v, Tensor)]
        if isinstance(output, tuple)
        else []
    )
    return (found[0], output[found[0]]) if len(found) == 1 else (None, None)
