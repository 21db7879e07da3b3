"""Writes `src/paceline/__init__.pyi`: the signatures that editors and type checkers read."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import paceline
from paceline.request.config import Config
from paceline.request.signature import ALIASES, expanded, type_of

PATH = Path(paceline.__file__).with_suffix(".pyi")

HEAD = '''"""What `import paceline` gives, with every option of `train` and `study`.

Written from `Config` by tests/test_signatures.py: do not edit it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from paceline.api import Run as Run
from paceline.api import compare as compare
from paceline.api import load as load
from paceline.api import load_data as load_data
from paceline.api import render as render
from paceline.data.prepare.anything import prepare as prepare
from paceline.errors import BadRequest as BadRequest
from paceline.errors import PacelineError as PacelineError
from paceline.errors import RunFailed as RunFailed
from paceline.launch.join import join as join
from paceline.objectives.metrics import Metric
from paceline.optim.schedules import LRSchedule
from paceline.report.lines import Study
from paceline.run.own_loop import Pace as Pace
from paceline.strategies.base import Strategy
'''


def written() -> str:
    """Return the content of the stub."""
    parts = [HEAD, "__version__: str\n"]
    parts += [f"{name}: TypeAlias = {value}\n" for name, value in ALIASES.items()]
    parts += [_function("train", "Run"), _function("study", "Study")]
    return "\n".join([parts[0], "".join(parts[1:-2]), *parts[-2:]])


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
        lines.append(f"    {parameter.name}: {kind} = {default},")
    text = textwrap.indent(inspect.cleandoc(made.__doc__), "    ").strip()
    body = f'    """{text}\n    """\n'
    return "\n".join([f"def {name}(", *lines, f") -> {gives}:", body])
