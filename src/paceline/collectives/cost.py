"""What a schedule costs on a network: rounds, bytes and seconds (the alpha-beta-gamma model).

    alpha   latency_s         seconds from the start of a message until its first byte arrives
    beta    s_per_byte        seconds per byte on a link, in each direction at the same time
    gamma   s_per_byte_added  seconds that a rank needs to add one byte to its own buffer

Rounds are synchronous, so a round lasts as long as its slowest rank. A rank that sends s bytes,
receives t bytes and adds u bytes in a round needs alpha + beta max(s, t) + gamma u. All messages of
a round are under way at the same time, so the latency counts once per round; the bytes of one rank
share its link. For a buffer of n bytes:

    ring               2 (P-1) (alpha + n beta / P) + (P-1)/P n gamma
    tree               2 ceil(log2 P) (alpha + n beta) + ceil(log2 P) n gamma
    halving-doubling   2 log2(P) alpha + 2 (P-1)/P n beta + (P-1)/P n gamma   (P a power of two)
    star               2 alpha + 2 (P-1) n beta + (P-1) n gamma

The model leaves out what the hosts' software adds to each message and traffic that shares a link.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from paceline.collectives.schedule import Round, Schedule
from paceline.errors import BadRequest

Load = tuple[float, float]  # what one rank moves and adds in a round, in buffers


@dataclass(frozen=True)
class Cost:
    """What a schedule costs."""

    rounds: int
    sent_bytes: tuple[float, ...]  # by rank
    seconds: float

    @property
    def busiest_bytes(self) -> float:
        """Bytes that the rank sends which sends most."""
        return max(self.sent_bytes)


def cost(
    schedule: Schedule,
    size_bytes: float,
    latency_s: float,
    s_per_byte: float,
    s_per_byte_added: float = 0.0,
) -> Cost:
    """Return rounds, bytes and seconds of a schedule for a buffer of `size_bytes`.

    A bandwidth of b bits per second in each direction is `s_per_byte = 8 / b`.

    >>> from paceline.collectives.base import schedule_of
    >>> cost(schedule_of("ring", 4), 4e6, latency_s=50e-6, s_per_byte=8 / 1e9).seconds
    0.0483
    """
    given = {
        "size_bytes": size_bytes,
        "latency_s": latency_s,
        "s_per_byte": s_per_byte,
        "s_per_byte_added": s_per_byte_added,
    }
    for name, value in given.items():
        if not 0 <= value < float("inf"):
            raise BadRequest(f"cost: {name}={value}: it must be a number, 0 or more")
    seconds = 0.0
    for ranks in loads(schedule):
        seconds += latency_s + size_bytes * max(
            moved * s_per_byte + added * s_per_byte_added for moved, added in ranks
        )
    sent = tuple(size_bytes * share for share in sent_shares(schedule))
    return Cost(len(schedule.rounds), sent, seconds)


def loads(schedule: Schedule) -> list[list[Load]]:
    """For each round, the loads that can be the slowest: (moved, added), in buffers.

    A rank moves the larger of what it sends and what it receives. A load is left out if another
    rank of the round has as much to move and as much to add.
    """
    return [_slowest(transfers, schedule.chunks) for transfers in schedule.rounds]


def sent_shares(schedule: Schedule) -> list[float]:
    """What each rank sends in all rounds together, in buffers."""
    chunks = [0] * schedule.ranks
    for transfers in schedule.rounds:
        for t in transfers:
            chunks[t.source] += t.stop - t.start
    return [count / schedule.chunks for count in chunks]


def _slowest(transfers: Round, chunks: int) -> list[Load]:
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    added: dict[int, int] = defaultdict(int)
    for t in transfers:
        count = t.stop - t.start
        sent[t.source] += count
        received[t.target] += count
        added[t.target] += count if t.adds else 0
    found: list[tuple[int, int]] = []
    ranks = sent.keys() | received.keys()
    for moved, adds in sorted({(max(sent[r], received[r]), added[r]) for r in ranks}, reverse=True):
        if not found or adds > found[-1][1]:
            found.append((moved, adds))
    return [(moved / chunks, adds / chunks) for moved, adds in found]
