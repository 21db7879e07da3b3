"""What one worker costs, from a profile."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.errors import BadRequest
from paceline.planning.compute import Steps
from paceline.planning.predict import Worker
from paceline.planning.profile import LinkCost, Profile
from paceline.planning.programs import FREE, Costs, Overlap
from paceline.registry import Spec

# Adding what arrives is measured with each transport; all give nearly the same.
PREFERRED = ("gloo", "shm", "mpi")


def worker_of(
    profile: Profile, overlap: bool = False
) -> Callable[[int, str], tuple[Worker, str | None]]:
    """A function that gives a worker's costs for a batch size and a codec, and a notice."""
    links = [link for name in PREFERRED if (link := profile.link(name)) is not None]
    added = links[0].s_per_byte_added if links else 0.0
    speeds = [math.log(speed) for speed in profile.compute.speeds]
    deviation = statistics.stdev(speeds) if len(speeds) > 1 else 0.0
    layout, size = profile.model.layout, max(1, profile.model.gradient_bytes)

    def worker_at(batch_size: int, codec: str) -> tuple[Worker, str | None]:
        steps, notice = profile.compute.at(batch_size)
        name = Spec.of(codec).name
        cost = profile.codec(name)
        if cost is None and name != "none":
            notice = notice or (
                f"the profile has not measured codec {name}: encoding and decoding count as free"
            )
        costs = Costs(
            s_per_byte_added=added,
            encode=cost.encode if cost else FREE,
            decode=cost.decode if cost else FREE,
            summed_s_per_byte=added,
            update_s_per_byte=(steps.update_s or 0.0) / size,
            moved_s_per_message=_both(links, "message"),
            moved_s_per_byte=_both(links, "byte"),
        )
        whole = Worker(layout, steps.quantiles_s, batch_size, costs, deviation)
        return (replace(whole, overlap=overlap_of(profile, steps)) if overlap else whole), notice

    return worker_at


def _both(links: Sequence[LinkCost], per: str) -> float:
    """The processor time of a sender and a receiver together."""
    if not links:
        return 0.0
    ends = ("sent", "received")
    return float(sum(getattr(links[0], f"cpu_s_per_{per}_{end}") for end in ends))


def overlap_of(profile: Profile, steps: Steps) -> Overlap:
    """How a step is divided, and when its buckets of gradients are ready."""
    parts = (steps.load_s, steps.forward_s, steps.backward_s, steps.update_s)
    if any(part is None for part in parts) or not profile.compute.ready:
        raise BadRequest(
            "the profile does not say when gradients are ready, so overlap cannot be predicted:"
            " make it with `paceline profile --model ... --data ...`"
        )
    load, forward, backward, update = (part or 0.0 for part in parts)
    whole = load + forward + backward + update
    return Overlap(
        (load + forward) / whole,
        backward / whole,
        tuple((size // profile.model.dtype_bytes, ready) for size, ready in profile.buckets()),
    )
