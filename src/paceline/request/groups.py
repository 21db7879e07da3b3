"""Parameter groups with options of their own: `*.bias:weight_decay=0`, `head.*:lr=0.1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from paceline.common.values import parse_pairs
from paceline.errors import BadRequest

if TYPE_CHECKING:  # importing torch takes seconds, which `paceline train --help` should not
    import torch
    from torch import nn


@dataclass(frozen=True)
class Group:
    """The parameters whose names fit a pattern, and what the optimizer does with them."""

    pattern: str
    options: Mapping[str, float]

    @classmethod
    def read(cls, text: str) -> Group:
        pattern, colon, rest = text.rpartition(":")
        if not colon or not pattern or "=" not in rest:
            raise BadRequest(
                f"groups={text}: write a pattern of names and what holds for them:"
                " '*.bias:weight_decay=0', 'head.*:lr=0.1,weight_decay=0'"
            )
        return cls(pattern, _numbers(text, parse_pairs(rest, f"groups={text}")))


def read_groups(value: Any) -> tuple[str, ...]:
    """Return groups as texts; in Python a dict of patterns and options is allowed too."""
    if isinstance(value, Mapping):
        texts = []
        for pattern, options in value.items():
            if not isinstance(options, Mapping) or not options:
                raise BadRequest(
                    f"groups: {pattern!r} needs a dict of options, such as {{'lr': 0.1}}"
                )
            texts.append(f"{pattern}:{','.join(f'{k}={v}' for k, v in options.items())}")
    elif not isinstance(value, (str, list, tuple)):
        raise BadRequest(f"groups={value}: it must be a text, a list of texts, or a dict")
    else:
        texts = [value] if isinstance(value, str) else [str(each) for each in value]
    for text in texts:
        Group.read(text)
    return tuple(texts)


def grouped(model: nn.Module, texts: tuple[str, ...], whole: bool = True) -> list[Any]:
    """Return the trainable parameters for an optimizer: a list, or groups with options.

    A parameter belongs to the first group whose pattern fits its name; the rest is the last group.
    `whole`: the model is no part of one that is split, so that each group must have a member.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not texts:
        return [p for _, p in named]
    groups = [Group.read(text) for text in texts]
    members: list[list[nn.Parameter]] = [[] for _ in groups]
    rest: list[nn.Parameter] = []
    for name, parameter in named:
        fits = (i for i, group in enumerate(groups) if fnmatchcase(name, group.pattern))
        which = next(fits, None)
        (rest if which is None else members[which]).append(parameter)
    for group, found in zip(groups, members, strict=True):
        if not found and whole:
            names = ", ".join(name for name, _ in named[:4])
            raise BadRequest(
                f"groups: {group.pattern!r} fits no trainable parameter that an earlier group has"
                f" not taken; the names are {names}, ..."
            )
    made = [{"params": p, **g.options} for g, p in zip(groups, members, strict=True) if p]
    return [*made, *([{"params": rest}] if rest else [])]


def check_groups(optimizer: torch.optim.Optimizer, texts: tuple[str, ...]) -> None:
    """Refuse options that this optimizer does not have."""
    for group in map(Group.read, texts):
        if unknown := [name for name in group.options if name not in optimizer.defaults]:
            known = [k for k, v in optimizer.defaults.items() if isinstance(v, (int, float))]
            raise BadRequest(
                f"groups: {type(optimizer).__name__} has no option {unknown[0]!r}; a group may set"
                f" {', '.join(k for k in known if not isinstance(optimizer.defaults[k], bool))}"
            )


def _numbers(text: str, options: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in options.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            raise BadRequest(f"groups={text}: {name}={value} is not a number") from None
        if not 0.0 <= found[name] < float("inf"):
            raise BadRequest(f"groups={text}: {name}={value} must be 0 or more")
    return found
