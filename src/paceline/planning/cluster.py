"""A cluster that is only described: its hosts, its links, its price, how fast its workers are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.common.links import Links
from paceline.errors import BadRequest
from paceline.transport.virtual import Link, Network

# Names for usual networks. Latencies are those of TCP between two processes, not of the wire.
PRESETS = {
    "lan": "1gbit,latency=100us",
    "datacenter": "25gbit,latency=30us",
    "wan": "100mbit,latency=30ms",
}
MEMORY = Link(5e-6, 1 / 5e9)  # between processes of one host: 5 us, 5 GB/s


@dataclass(frozen=True)
class Cluster:
    """Hosts with links between them."""

    between: Link
    inside: Link = MEMORY
    hosts: int | None = None  # None: as many as are needed
    per_host: int = 1  # workers on one host
    cores: int | None = None  # of one host; None: one for each worker
    speeds: tuple[float, ...] = (1.0,)  # of the workers, repeated; 1: as fast as the profile's
    price_per_hour: float | None = None  # of one host
    # The cores of the one machine on which all hosts are (a testbed); None: hosts are machines.
    common_cores: int | None = None

    @property
    def most_workers(self) -> int | None:
        return None if self.hosts is None else self.hosts * self.per_host

    def check(self, workers: int, servers: int = 0) -> None:
        if workers < 1:
            raise BadRequest(f"workers={workers}: it must be 1 or more")
        if self.most_workers is not None and workers > self.most_workers:
            raise BadRequest(
                f"{workers} workers do not fit: {self.hosts} hosts with {self.per_host} each hold"
                f" {self.most_workers}; use --hosts {-(-workers // self.per_host)}x{self.per_host}"
            )

    def network(self, workers: int, servers: int = 0) -> Network:
        """Workers fill the hosts one after the other; each server has a host of its own."""
        self.check(workers, servers)
        used = -(-workers // self.per_host)
        placed = [worker // self.per_host for worker in range(workers)]
        return Network((*placed, *range(used, used + servers)), self.between, self.inside)

    def hosts_used(self, workers: int, servers: int = 0) -> int:
        return -(-workers // self.per_host) + servers

    def speed(self, worker: int, workers: int) -> float:
        """How fast a worker is: its own speed, less what sharing the cores of its host takes."""
        host = worker // self.per_host
        neighbours = min(self.per_host, workers - host * self.per_host)
        crowd = max(1.0, neighbours / self.cores) if self.cores else 1.0
        return self.speeds[worker % len(self.speeds)] / crowd


def read_link(text: str) -> Link:
    """Read `10gbit,latency=50us`, or the name of a preset."""
    links = Links.read(PRESETS.get(text, text))
    return Link(links.latency_s, 0.0 if links.rate is None else 8 / links.rate)


def read_hosts(text: str) -> tuple[int, int]:
    """Read `16x4`, 16 hosts with 4 workers each, or `16`."""
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
    if found is None or int(found[1]) < 1 or int(found[2] or 1) < 1:
        raise BadRequest(
            f"hosts={text}: write HOSTSxWORKERS, for example 16x4: 16 hosts with 4 workers each"
        )
    return int(found[1]), int(found[2] or 1)


def read_workers(text: str) -> list[int]:
    """Read `1,2,4,8`, `1-16` or `1-16,32`."""
    found: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if ends is None or int(ends[1]) < 1 or int(ends[2] or ends[1]) < int(ends[1]):
            raise BadRequest(
                f"workers={text}: write numbers of 1 or more, for example 1,2,4,8 or 1-16"
            )
        found |= set(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return sorted(found)


def read_speeds(text: str) -> tuple[float, ...]:
    """Read the workers' speeds, `1,1,0.5`: the third is half as fast as the profile's worker."""
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < float("inf") for speed in speeds):
        raise BadRequest(f"speeds={text}: write numbers above 0, for example 1,1,0.5")
    return speeds
