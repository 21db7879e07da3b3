"""What a batch contains: its rows, its inputs and targets, and its place on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import BadRequest

TARGETS = ("labels", "label", "targets", "target", "y")  # the keys under which targets are found


class Arguments(dict[str, Any]):
    """Inputs that a model takes by name: `model(**inputs)`."""


def split(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch.

    A pair is (inputs, targets). Of a mapping, the entry with one of the keys in `TARGETS` is the
    targets. The rest is the inputs: one entry as it is, several as `Arguments`.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        named = next((key for key in TARGETS if key in batch), None)
        if named is not None and len(batch) > 1:
            rest = {key: value for key, value in batch.items() if key != named}
            inputs = next(iter(rest.values())) if len(rest) == 1 else Arguments(rest)
            return inputs, batch[named]
    raise BadRequest(
        f"a batch must be a pair (inputs, targets), or a dict with one of the keys"
        f" {', '.join(TARGETS)}; this data gives {describe(batch)}. For any other batch give"
        " step=, a function of (model, batch) that returns the loss"
    )


def whole(batch: Any) -> tuple[Any, Any]:
    """Return (batch, None): for a training step of your own, which takes the batch as it is."""
    return batch, None


Split = Callable[[Any], tuple[Any, Any]]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Return a model's outputs; of an output with `logits` (Hugging Face's models), the logits."""
    try:
        outputs = model(**inputs) if isinstance(inputs, Arguments) else model(inputs)
    except TypeError as error:
        if "forward() " not in str(error) or "argument" not in str(error):
            raise
        raise BadRequest(
            f"the model does not take this batch as it is ({error}): give step=, a function of"
            " (model, batch) that calls the model and returns the loss"
        ) from error
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def rows(value: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor.

    Tensors in a list that have different lengths are samples; so are the elements of a list without
    tensors.
    """
    found = _rows(value)
    return 1 if found is None else found


def _rows(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return int(value.shape[0]) if value.dim() else 1
    if isinstance(value, Mapping):
        value = list(value.values())
        return next((n for n in map(_rows, value) if n is not None), None)
    if isinstance(value, (tuple, list)):
        if value and all(isinstance(v, Tensor) and v.dim() for v in value):
            return len(value[0]) if len({len(v) for v in value}) == 1 else len(value)
        found = next((n for n in map(_rows, value) if n is not None), None)
        return len(value) if found is None else found
    return None


def cut_rows(value: Any, low: int, high: int) -> Any:
    """Return the samples [low, high) of a batch. What is no tensor of all samples stays whole."""
    total = rows(value)

    def cut(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part[low:high] if part.dim() and len(part) == total else part
        if isinstance(part, Mapping):
            return {key: cut(inner) for key, inner in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(cut, part))
        if isinstance(part, (tuple, list)):
            return type(part)(map(cut, part))
        return part

    return cut(value)


def to_device(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`; what is there already is not copied.

    Lists, tuples, named tuples and mappings keep their type. An object of another class moves by
    its own method `to`.
    """
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, Mapping):
        moved = {key: to_device(v, device) for key, v in value.items()}
        if all(moved[key] is v for key, v in value.items()):
            return value
        return Arguments(moved) if isinstance(value, Arguments) else moved
    if isinstance(value, (tuple, list)):
        parts = [to_device(v, device) for v in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def describe(value: Any) -> str:
    """Say what kind of thing a batch is, for a message."""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
