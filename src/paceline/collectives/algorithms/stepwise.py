"""Step-wise reduce: an all-reduce without its second half. Each rank continues with a partial sum.

    chunked   the share-reduce half of the ring: chunk c starts at rank c + start and is summed
              along the ring, so rank p ends with chunk c's sum over the ranks visited so far:
              p - c - start + 1 of them (mod P)
    literal   0 -> 1 -> ... -> P-1 with the whole buffer: rank p ends with the sum over 0 .. p

Half the bytes and half the rounds of a ring all-reduce. `counts` computes from the schedule how
many ranks are in each sum. If the start moves on from step to step, each rank's values reach every
other rank in turn. With a fixed start the first rank never receives anything.
"""

from __future__ import annotations

from typing import Annotated

from paceline.collectives.algorithms.ring import share_reduce
from paceline.collectives.schedule import Round, Schedule, Shape, Transfer, followed_by, states
from paceline.errors import BadRequest
from paceline.registry import operations

CHUNKED = (
    "In round r, rank p sends chunk (p - rSTART) mod P to rank (p + 1) mod P, which adds it to its"
    " own. There is no second half: every rank continues with the partial sums that it holds."
)
LITERAL = (
    "In round r, the rank at place r of the line sends its sum, the whole buffer, to the next rank,"
    " which adds it to its own. Every rank continues with the sum over the ranks up to itself."
)


@operations.register("stepwise")
def stepwise(
    ranks: int,
    chunked: Annotated[bool, "false: the whole buffer from rank to rank"] = True,
    start: Annotated[int, "the rank where chunk 0 (or the whole buffer) starts"] = 0,
) -> Schedule:
    """The first half of a ring only: each rank keeps the sum over the ranks up to itself."""
    if not 0 <= start < ranks:
        raise BadRequest(f"stepwise: start={start}: a rank, 0 to {ranks - 1}")
    if chunked:
        return followed_by(
            "stepwise",
            ranks,
            ranks,
            ("share-reduce", share_reduce(ranks, start)),
            rules={"share-reduce": CHUNKED.replace("START", f" - {start}" if start else "")},
        )
    order = [(start + i) % ranks for i in range(ranks)]
    collect: list[Round] = [
        (Transfer(order[i], order[i + 1], 0, 1, True),) for i in range(ranks - 1)
    ]
    return followed_by(
        "stepwise",
        1,
        ranks,
        ("reduce", collect),
        rules={"reduce": LITERAL},
        shape=Shape("line", (tuple(order),)),
    )


def counts(schedule: Schedule, rank: int) -> list[int]:
    """For each chunk, how many ranks' contributions this rank's copy holds at the end."""
    return [sum(holding) for holding in states(schedule)[-1][rank]]
