"""The options of `privacy=`: `epsilon=3,delta=1e-5,clip=1.0` or `noise=1.1,delta=1e-5,clip=1.0`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from paceline.common.values import convert, format_value, parse_pairs
from paceline.errors import BadRequest, UnknownName
from paceline.registry import options_of

LEAST_NOISE = 1e-100  # the square of less is 0, and epsilon cannot be computed
ALWAYS = ("epsilon", "noise", "delta", "clip")


@dataclass(frozen=True)
class Settings:
    """The options of `privacy=`."""

    epsilon: Annotated[
        float | None, "the budget; without noise=, noise is chosen so that the run keeps within it"
    ] = None
    noise: Annotated[
        float | None, "standard deviation in units of the clip norm; epsilon is then reported"
    ] = None
    delta: Annotated[float, "well below one over the number of samples"] = 1e-5
    clip: Annotated[
        float, "the largest length of one sample's gradient; longer ones are scaled down"
    ] = 1.0
    trust: Annotated[
        Literal["peers", "curator"],
        "peers: every message is protected; curator: the released model only",
    ] = "peers"
    sampling: Annotated[
        Literal["poisson", "shuffle"], "shuffle: epsilon without the gain from secret sampling"
    ] = "poisson"
    per_layer: Annotated[bool, "give every layer a bound of its own"] = False
    adaptive: Annotated[
        float, "adapt clip so that this share of samples is not clipped (0: fixed clip)"
    ] = 0.0
    clipping: Annotated[
        Literal["bookkeeping", "loop"], "loop: one sample at a time, the slow reference"
    ] = "bookkeeping"
    accountant: Annotated[Literal["pld", "rdp"], "how epsilon is computed; both are reported"] = (
        "pld"
    )
    secure: Annotated[bool, "false: noise from the run's seed, repeatable and not private"] = True
    reveal: Annotated[bool, "record training losses and batch sizes, which are not protected"] = (
        False
    )

    @classmethod
    def read(cls, given: str | Mapping[str, Any]) -> Settings:
        known, values = options_of(cls), dict[str, Any]()
        pairs = parse_pairs(given, f"privacy={given}") if isinstance(given, str) else given
        for name, value in pairs.items():
            key = name.replace("-", "_")
            if key not in known:
                raise UnknownName("option of privacy", name, known)
            values[key] = convert(value, known[key].kind, f"privacy: {key}")
        settings = cls(**values)
        settings.validate()
        return settings

    def validate(self) -> None:
        if self.epsilon is None and self.noise is None:
            raise BadRequest(
                "privacy: give epsilon=3 (a budget, from which the noise follows) or noise=1.1"
                " (epsilon is reported)"
            )
        _above("epsilon", self.epsilon, "no training fits into it; 1 to 10 is usual")
        _above(
            "noise",
            self.noise,
            "without noise no sample is protected; 0.5 to 2 is usual",
            LEAST_NOISE,
        )
        _above("clip", self.clip, "gradients are scaled down to this length, for example 1.0")
        if not 0.0 < self.delta < 1.0:
            raise BadRequest(
                f"privacy: delta={self.delta:g}: it must be above 0 and well below one over the"
                " number of samples, for example 1e-5"
            )
        if not 0.0 <= self.adaptive < 1.0:
            raise BadRequest(
                f"privacy: adaptive={self.adaptive:g}: it must be a share of the samples, from 0"
                " (fixed clip norm) to below 1, for example 0.5"
            )
        if self.adaptive and self.per_layer:
            raise BadRequest(
                "privacy: adaptive measures the length of whole gradients, so it does not go with"
                " per_layer: leave one of them out"
            )

    def __str__(self) -> str:
        """Return the options as a user types them; most are left out where they are the default."""
        said = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (field.name in ALWAYS or value != field.default):
                text = f"{value:g}" if isinstance(value, float) else format_value(value)
                said.append(f"{field.name}={text}")
        return ",".join(said)


def _above(name: str, value: float | None, why: str, least: float = 0.0) -> None:
    if value is not None and not (least < value < math.inf):
        raise BadRequest(f"privacy: {name}={value:g}: it must be above {least:g}; {why}")
