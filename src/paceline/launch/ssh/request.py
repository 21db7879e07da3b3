"""What the options of `train` mean for the hosts, looked at before any of them is reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import BadRequest
from paceline.launch.seat import Seat
from paceline.launch.ssh.hosts import Host, described
from paceline.registry import Spec, strategies
from paceline.request.config import Config

AUTO = "auto"  # --resume auto: what is in --out, if anything is


def check(options: Mapping[str, Any], hosts: Sequence[Host]) -> None:
    """Refuse options of `train` that would fail on these hosts.

    What a resumed run or a plugin says is on the hosts, and only the ranks read it.
    """
    if options.get("resume", AUTO) != AUTO or options.get("plugin"):
        return
    given, ranks = options.get("workers"), sum(len(host.ranks) for host in hosts)
    seat = Seat("ssh", 0, ranks, 0, len(hosts[0].ranks))
    fitted = seat.fit({name: value for name, value in options.items() if name != "workers"})
    workers = int(fitted["workers"])
    names = f"{described(hosts)} {'takes' if len(hosts) == 1 else 'take'}"
    if given is not None and str(given) != str(workers):
        servers = ranks - workers
        less = f", of which {servers} would be a server" if servers else ""
        raise BadRequest(
            f"--workers {given}, but {names} {_count(ranks, 'rank')}{less}: name another number of"
            " hosts or slots (--hosts a:2,b has three), or leave --workers out"
        )
    chosen = Config.make(fitted).strategy
    strategy = strategies.build(chosen) if isinstance(chosen, str | Spec) else chosen
    most = strategy.traits.most_workers
    if most is not None and workers > most:
        raise BadRequest(
            f"strategy {strategy.name} runs {_count(most, 'worker')}, and {names}"
            f" {_count(ranks, 'rank')}: choose another, such as --strategy allreduce"
        )


def shared_folder(options: Mapping[str, Any]) -> str:
    """The folder of the run, which all hosts must see."""
    resumed = options.get("resume")
    return str(options.get("out") or (resumed if resumed != AUTO else None) or "runs")


def lost_after_s(options: Mapping[str, Any]) -> float:
    """The seconds after which a host that does not answer is lost."""
    return Config.make({k: v for k, v in options.items() if k == "lost_s"}).waits.lost_s


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
