"""Writes `src/paceline/__init__.pyi`: the signatures that editors and type checkers read."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import paceline
from paceline.request.config import Config
from paceline.request.signature import ALIASES, expanded, type_of

PATH = Path(paceline.__file__).with_suffix(".pyi")

USED = {  # by the types of options
    "Metric": "objectives.metrics",
    "LRSchedule": "optim.schedules",
    "Study": "report.lines",
    "Strategy": "strategies.base",
}
HEAD = '''"""What `import paceline` gives, with every option of `train` and `study`.

Written from `Config` by tests/test_signatures.py: do not edit it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
'''


def written() -> str:
    """Return the content of the stub."""
    homes = {n: h for n, h in paceline._HOMES.items() if n not in ("train", "study", "ray_train")}
    lines = [f"from paceline.{home} import {name} as {name}" for name, home in homes.items()]
    lines += [f"from paceline.{home} import {name}" for name, home in USED.items()]
    imports = sorted(lines, key=lambda line: (line.split()[1], line.split()[3]))
    parts = ["\n".join([HEAD, *imports, ""]), "__version__: str\n"]
    parts += [f"{name}: TypeAlias = {value}\n" for name, value in ALIASES.items()]
    made = [_function("train", "Run"), _function("ray_train", "Run"), _function("study", "Study")]
    return "\n".join([parts[0], "".join(parts[1:]), *made])


def _function(name: str, gives: str) -> str:
    made, options = getattr(paceline, name), Config.options()
    lines, starred = [], False
    for parameter in inspect.signature(made).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            lines.append("    *,")
        default = repr(parameter.default)
        if isinstance(parameter.default, str):
            default = f'"{parameter.default}"'
        kind = str(parameter.annotation).replace("'", '"')
        if (field := options.get(parameter.name)) and kind == expanded(type_of(field.name, field)):
            kind = type_of(field.name, field)
        line = f"    {parameter.name}: {kind} = {default},"
        if len(line) > 100 and kind.startswith("Literal["):  # as the formatter breaks it
            inside = kind.removeprefix("Literal[").removesuffix("]")
            line = f"    {parameter.name}: Literal[\n        {inside}\n    ] = {default},"
        lines.append(line)
    text = textwrap.indent(inspect.cleandoc(made.__doc__), "    ").strip()
    body = f'    """{text}\n    """\n'
    return "\n".join([f"def {name}(", *lines, f") -> {gives}:", body])
