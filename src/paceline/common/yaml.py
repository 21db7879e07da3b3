"""Write plain data (dicts, lists, strings, numbers) as YAML that a person can read and edit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
# YAML reads these words as truth values or as nothing.
WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
NOT_ASCII = re.compile(r"[^\x20-\x7e]")


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return several documents in one text."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(one)) for one in documents)


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a dict or a list that is not empty."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            if _nested(inside):
                yield f"{_scalar(str(key))}:"
                yield from (f"  {line}" for line in _lines(inside))
            else:
                yield f"{_scalar(str(key))}: {_scalar(inside)}"
        return
    for inside in value:
        first, *rest = _lines(inside) if _nested(inside) else [_scalar(inside)]
        yield f"- {first}"
        yield from (f"  {line}" for line in rest)


def _nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        if PLAIN.fullmatch(value) and value.lower() not in WORDS:
            return value
        # YAML's escapes are those of JSON, but for characters outside the first 65,536.
        return NOT_ASCII.sub(_escaped, json.dumps(value, ensure_ascii=False))
    return json.dumps(value)  # a number, a truth value, nothing, {} or []


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
