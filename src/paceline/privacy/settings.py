"""What a person asks for: `epsilon=3,delta=1e-5,clip=1.0`, or `noise=1.1,delta=1e-5,clip=1.0`, and
how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from paceline.common.values import convert, format_value, parse_pairs
from paceline.errors import BadRequest, UnknownName
from paceline.registry import options_of

LEAST_NOISE = 1e-100  # with less, its square is 0 and epsilon cannot be computed
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
    clip: Annotated[float, "the most that one sample's gradient may count for (its length)"] = 1.0
    trust: Annotated[
        Literal["peers", "curator"],
        "peers: every message is protected; curator: the released model only",
    ] = "peers"
    sampling: Annotated[
        Literal["poisson", "shuffle"], "shuffle: epsilon without the gain from secret sampling"
    ] = "poisson"
    per_layer: Annotated[bool, "every layer has a bound of its own"] = False
    adaptive: Annotated[
        float, "the clip norm follows: this share of samples stays unclipped (0: it stays)"
    ] = 0.0
    clipping: Annotated[
        Literal["bookkeeping", "loop"], "loop: one sample at a time, the slow reference"
    ] = "bookkeeping"
    accountant: Annotated[Literal["pld", "rdp"], "how epsilon is computed; both are reported"] = (
        "pld"
    )
    secure: Annotated[bool, "false: noise from the run's seed, to be repeated; protects nobody"] = (
        True
    )
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
        _above("epsilon", self.epsilon, "no training fits into it: 1 to 10 is usual")
        _above(
            "noise", self.noise, "without noise nobody is protected: 0.5 to 2 is usual", LEAST_NOISE
        )
        _above("clip", self.clip, "it is the length to which gradients are cut: 1.0, say")
        if not 0.0 < self.delta < 1.0:
            raise BadRequest(
                f"privacy: delta={self.delta:g}: it must be above 0 and well below one over the"
                " number of samples: 1e-5, say"
            )
        if not 0.0 <= self.adaptive < 1.0:
            raise BadRequest(
                f"privacy: adaptive={self.adaptive:g}: a share of the samples, 0.5, say (0: the"
                " clip norm stays)"
            )
        if self.adaptive and self.per_layer:
            raise BadRequest(
                "privacy: adaptive follows the length of whole gradients: leave per_layer out, or"
                " adaptive"
            )

    def __str__(self) -> str:
        """As it can be typed: what is always said, and what differs from the default."""
        said = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (field.name in ALWAYS or value != field.default):
                said.append(
                    f"{field.name}={f'{value:g}' if isinstance(value, float) else format_value(value)}"
                )
        return ",".join(said)


def _above(name: str, value: float | None, why: str, least: float = 0.0) -> None:
    if value is not None and not (least < value < math.inf):
        raise BadRequest(f"privacy: {name}={value:g}: it must be above {least:g}; {why}")
