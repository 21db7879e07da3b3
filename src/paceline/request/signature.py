"""The options of `train` as a signature: what `inspect`, `help` and editors show.

`train` and `study` take their options as keywords, so that those that were given can be told from
those that were not (a resumed run keeps the others). Their signatures and documentation are made
from `Config`. Editors read `paceline/__init__.pyi`, which `tests/test_signatures.py` writes from
here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import Field
from typing import Any, TypeVar

from paceline.errors import in_python
from paceline.request.config import Config

Function = TypeVar("Function", bound=Callable[..., Any])

# Names in the stub for what an option takes in Python besides text.
ALIASES = {
    "_Names": "str | Sequence[str]",
    "_Folder": "str | Path",
    "_Model": "str | nn.Module | Callable[..., nn.Module]",
    "_Loss": "str | Callable[[Any, Any], Tensor]",
    "_Metrics": "str | Metric | type[Metric] | Sequence[str | Metric]",
    "_Optimizer": "str | Callable[..., torch.optim.Optimizer]",
    "_Schedule": "str | LRSchedule",
}
TYPES = {
    "model": "_Model",
    "loss": "_Loss",
    "metric": "_Metrics",
    "optimizer": "_Optimizer",
    "lr_schedule": "_Schedule",
    "strategy": "str | Strategy | None",
    "transport": "str",
    "codec": "str",
    "data_dir": "_Folder | None",
    "out": "_Folder | None",
    "resume": "_Folder | None",
    "privacy": "str | Mapping[str, Any] | None",
    "faults": "_Names",
    "groups": "_Names | Mapping[str, Mapping[str, float]]",
    "plugin": "_Names",
    "callbacks": "Sequence[str | Callback]",
    "step": "str | Callable[..., Any] | None",
    "batch_size": "int | str | Sequence[int] | None",
    "global_batch_size": "int | str | None",
    "threads": "int | str",
    "evaluate_every": "int | str",
    "checkpoint_every": "int | str | None",
    "keep": "int | str | None",
    "compile": "bool | str | None",
}


def type_of(name: str, field: Field[Any]) -> str:
    """Return the type of an option's value in Python, as the stub writes it."""
    if name in TYPES:
        return TYPES[name]
    kind = field.metadata["kind"]
    if typing.get_origin(kind) is typing.Literal:
        choices = ", ".join(f'"{choice}"' for choice in typing.get_args(kind))
        return f"Literal[{choices}]" + (" | None" if field.default is None else "")
    return str(field.type)


def expanded(type_name: str) -> str:
    """Return a type with its aliases written out, for readers who do not see the stub."""
    for alias, meaning in ALIASES.items():
        type_name = re.sub(rf"\b{alias}\b", meaning, type_name)
    return type_name


def with_options(function: Function) -> Function:
    """Give a function that takes the options of `train` as `**keywords` their signature and help.

    An option that the function takes itself (`out` of a study) is its own.
    """
    plain = inspect.signature(function)
    own = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in own}
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=expanded(type_of(name, field)),
        )
        for name, field in Config.options().items()
        if name not in names
    ]
    first = [p for p in own if p.kind is not p.KEYWORD_ONLY]
    last = [p for p in own if p.kind is p.KEYWORD_ONLY]
    function.__signature__ = plain.replace(parameters=[*first, *options, *last])  # type: ignore[attr-defined]
    text = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = "\n".join([text, "", *_documented(names)])
    return function


def _documented(without: set[str]) -> Iterator[str]:
    """Yield the lines that document every option, under the headings of `--help`."""
    heading = ""
    for name, field in Config.options().items():
        if name in without:
            continue
        if field.metadata["group"] != heading:
            heading = field.metadata["group"]
            yield f"{heading}:"
        text = " ".join(in_python(str(field.metadata["help"])).split())
        yield from textwrap.wrap(
            f"{name}: {text}", 92, initial_indent="    ", subsequent_indent="        "
        )
