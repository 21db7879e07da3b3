"""Confirming blocks, as `study.json` keeps them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Block:
    """Serial and the settings to confirm, run one after the other."""

    number: int
    order: list[str]  # names of settings
    samples_per_s: dict[str, float]
    seconds: float
    foreign: float | None  # the share of the machine that others took
    stolen: float | None
    repeats: int  # earlier attempts, which were disturbed
    disturbed: bool

    def log_ratio(self, one: str, other: str) -> float:
        """Return log(speed of one / speed of the other)."""
        return math.log(self.samples_per_s[one] / self.samples_per_s[other])


def blocks_of(kept: Mapping[str, Any]) -> list[Block]:
    """Return the blocks that `study.json` keeps, without those that lack a setting."""
    names = {kept.get("serial"), *kept.get("settings", ())}
    known = {field.name for field in fields(Block)}
    return [
        Block(**{name: value for name, value in block.items() if name in known})
        for block in kept.get("blocks", ())
        if names <= block["samples_per_s"].keys()
    ]
