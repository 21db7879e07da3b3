"""Text of a report, as parts that each format marks up by itself: plain, code, strong, a break."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

SHAPELESS = ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")  # categories of Unicode
PLAIN, CODE, STRONG, BREAK = "plain", "code", "strong", "break"


@dataclass(frozen=True)
class Part:
    """A piece of text in one style."""

    style: str
    text: str


Text = tuple[Part, ...]


def clean(text: str) -> str:
    """Return text on one line: a character without a shape is a space, and spaces become one."""
    visible = (" " if unicodedata.category(c) in SHAPELESS else c for c in text)
    return " ".join("".join(visible).split())


def plain(text: str) -> Text:
    """Return text whose every character stands for itself."""
    return (Part(PLAIN, clean(text)),)


def code(text: str) -> Text:
    """Return a name, such as a setting's, as code."""
    return (Part(CODE, clean(text)),)


def strong(text: str) -> Text:
    return (Part(STRONG, clean(text)),)


def prose(sentence: str) -> Text:
    """Return a sentence of the report, in which `names` are code."""
    found = []
    for part in re.split(r"(`[^`]+`)", " ".join(sentence.split())):
        name = len(part) > 2 and part[0] == part[-1] == "`"
        style, text = (CODE, part[1:-1]) if name else (PLAIN, part)
        found += [Part(style, _within(text))] if text else []
    return tuple(found)


def _within(text: str) -> str:
    """Clean a part of a sentence; the spaces at its ends belong to the sentence."""
    inner = clean(text)
    before, after = text[:1].isspace(), text[-1:].isspace()
    return f"{' ' * before}{inner}{' ' * (after and bool(inner))}"


def joined(*texts: Text) -> Text:
    return tuple(part for text in texts for part in text)


def spaced(*texts: Text) -> Text:
    """Return texts with a space between them."""
    space = (Part(PLAIN, " "),)
    return joined(*(part for i, text in enumerate(texts) for part in ((space, text)[not i :])))


def over(first: Text, second: Text) -> Text:
    """Return two texts on two lines of a cell, where the format has lines in cells."""
    return joined(first, (Part(BREAK, " "),), second)


def shown(text: Text) -> str:
    """Return the characters alone."""
    return "".join(part.text for part in text)
