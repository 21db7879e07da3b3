"""Build a model of which a rank needs only some modules, without all of it in memory.

A model is built twice. First on the meta device, where tensors have no memory, to see in which
order its modules are completed and what they are called. Then for good: as soon as a module's
constructor has ended, the tensors that this rank does not need move to a file that is mapped into
memory, whose pages the kernel may evict. There they can still be initialised, by whatever the model
does at the end of its own constructor. When the model is whole, they are dropped.

So every random number is drawn as in a plain build: the weights that are kept are those of the
whole model, bit for bit, and so is the state of the random generators afterwards.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[], nn.Module]


def bare(make: Make) -> tuple[nn.Module, list[str | None]]:
    """Build a model without memory.

    Returns it with the names of its modules in the order in which their constructors ended; None
    for a module that is not part of it.
    """
    ended: list[nn.Module] = []
    with torch.device("meta"), _watching(ended.append):
        model = make()
    names = {id(module): name for name, module in model.named_modules()}
    return model, [names.get(id(module)) for module in ended]


def with_only(
    make: Make, order: list[str | None], needs: Callable[[str], bool], folder: Path
) -> nn.Module:
    """Build a model with memory for the modules that are needed; the others are on meta.

    `folder`: on a disk with room for the others while the model is built.
    """
    places = iter(order)

    def ended(module: nn.Module) -> None:
        name = next(places, None)
        if name is not None and not needs(name):
            for tensor in _own(module):
                _to_file(tensor, folder)

    with _watching(ended):
        model = make()
    for name, module in model.named_modules():
        if not needs(name):
            _drop(module)
    return model


def in_file(make: Make, folder: Path) -> nn.Module:
    """Build a model whose tensors are all in files, for a form that takes slices of them."""

    def ended(module: nn.Module) -> None:
        for tensor in _own(module):
            _to_file(tensor, folder)

    with _watching(ended):
        return make()


def into_memory(model: nn.Module) -> None:
    """Move what is still in files into memory, one tensor at a time."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)


def _own(module: nn.Module) -> Iterator[Tensor]:
    """A module's tensors, without those of its children."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def _to_file(tensor: Tensor, folder: Path) -> None:
    """Move the content of a tensor to a file that has no name any more; the tensor stays itself."""
    if not tensor.numel() or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    mapped = mapped.view(tensor.shape)
    mapped.copy_(tensor.detach())
    tensor.data = mapped


def _drop(module: nn.Module) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            empty = parameter.detach().to("meta")
            module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.detach().to("meta")


@contextmanager
def _watching(ended: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `ended` with every module whose constructor has ended, in that order.

    A class that is made while the model is built has a constructor that is not watched.
    """
    watched: dict[type[nn.Module], Any] = {
        kind: kind.__dict__["__init__"] for kind in _kinds(nn.Module) if "__init__" in kind.__dict__
    }
    inside: dict[int, int] = {}

    def watching(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def watched_init(self: nn.Module, *given: Any, **named: Any) -> None:
            key = id(self)
            inside[key] = inside.get(key, 0) + 1
            try:
                init(self, *given, **named)
            finally:
                inside[key] -= 1
            if not inside[key]:
                del inside[key]
                first = next(kind for kind in type(self).__mro__ if "__init__" in kind.__dict__)
                if first in watched:
                    ended(self)

        return watched_init

    for kind, init in watched.items():
        kind.__init__ = watching(init)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, init in watched.items():
            kind.__init__ = init  # type: ignore[method-assign]


def _kinds(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    seen: set[type[nn.Module]] = set()
    todo = [kind]
    while todo:
        found = todo.pop()
        if found not in seen:
            seen.add(found)
            yield found
            todo += found.__subclasses__()
