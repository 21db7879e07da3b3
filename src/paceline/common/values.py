"""Convert values from the text that users type to Python types, and back."""

from __future__ import annotations

import os
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.errors import BadRequest


def parse_pairs(text: str, where: str) -> dict[str, str]:
    """Read `key=value,key=value`; `where` names the option in errors."""
    pairs = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise BadRequest(f"{where}: {part!r} is not key=value")
        pairs[key.strip()] = value.strip()
    return pairs


def convert(value: Any, kind: Any, where: str) -> Any:
    """Convert a value that a user typed to the type `kind` of a signature."""
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value in arguments:
            return value
        for candidate in arguments:
            if str(candidate) == str(value):
                return candidate
        raise BadRequest(f"{where}={value!r}: allowed are {', '.join(map(str, arguments))}")
    if origin in (typing.Union, types.UnionType):
        for member in arguments:
            if member is type(None):
                if value is None or value == "none":
                    return None
                continue
            try:
                return convert(value, member, where)
            except BadRequest:
                continue
        raise BadRequest(f"{where}={value!r} is not {describe_kind(kind)}")
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(int(v) for v in value)
        try:
            return tuple(int(v) for v in str(value).split("x"))
        except ValueError:
            raise BadRequest(f"{where}={value!r} is not sizes like 3x32x32") from None
    if kind is bool:
        if isinstance(value, bool):
            return value
        words = {
            "true": True,
            "yes": True,
            "1": True,
            "on": True,
            "false": False,
            "no": False,
            "0": False,
            "off": False,
        }
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise BadRequest(f"{where}={value!r} is not true or false")
    if kind in (int, float):
        if isinstance(value, bool):
            raise BadRequest(f"{where}={value!r} is not {describe_kind(kind)}")
        try:
            number = float(value)
        except (OverflowError, TypeError, ValueError):
            raise BadRequest(f"{where}={shortened(value)} is not {describe_kind(kind)}") from None
        if kind is int:
            if number != number or abs(number) == float("inf") or number != int(number):
                raise BadRequest(f"{where}={value!r} is not {describe_kind(kind)}")
            return (
                int(value)
                if isinstance(value, (int, str)) and str(value).lstrip("+-").isdigit()
                else int(number)
            )
        return number
    return str(value) if kind is str and not isinstance(value, str) else value


def describe_kind(kind: Any) -> str:
    """Return a type in words, for errors and help."""
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(describe_kind(k) for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple:
        return "sizes (AxBxC)"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def format_value(value: Any) -> str:
    """Return a value as a user types it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "x".join(map(str, value))
    return str(value)


def is_path(text: str) -> bool:
    """Whether the operating system accepts the text as a path."""
    return (
        0 < len(os.fsencode(text)) < 4096
        and "\0" not in text
        and all(len(os.fsencode(p)) < 256 for p in Path(text).parts)
    )


def shortened(value: Any, longest: int = 60) -> str:
    """Return repr(value), cut off where it is long."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} letters)"
