"""`paceline.join`: this process takes its place in the line, for a loop of a person's own
(run/own_loop.py).
"""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from typing import Any

from paceline.common.allocator import keep_freed_memory
from paceline.errors import BadRequest
from paceline.launch.joined import Meeting
from paceline.launch.seat import find as find_seat
from paceline.registry import strategies, transports
from paceline.run.own_loop import Pace
from paceline.run.own_server import Build
from paceline.strategies.base import Strategy
from paceline.transport.alone import Alone
from paceline.transport.base import Transport


def join(
    strategy: str | Strategy = "allreduce",
    *,
    codec: str = "none",
    transport: str = "auto",
    servers: int | None = None,
    seed: int = 0,
    deadline_s: float = 30.0,
    check_every: int = 0,
    build: Build | None = None,
) -> Pace:
    """Take this process's place in the line. On a server's rank this serves until the workers have
    left, then exits.

    `servers`: how many of the ranks are servers (the last ones; 1 for `ps`). `check_every`: steps
    between checks that replicas which should be identical are. `build`: what servers make instead
    of being sent it: a function, or its name as `module:function`, that returns (model, optimizer);
    a launcher that hands over no secret needs it.
    """
    chosen: Strategy = strategies.build(strategy) if isinstance(strategy, str) else strategy
    keep_freed_memory()
    seat = find_seat()
    count = (1 if servers is None else servers) if chosen.serves == "ranks" else 0
    size = seat.size if seat else 1
    if size - count < 1:
        raise BadRequest(
            f"{chosen.name} with {count} server(s) needs {count + 1} ranks or more; here is {size}:"
            " paceline launch -n"
        )
    if chosen.most_workers is not None and size - count > chosen.most_workers:
        raise BadRequest(f"strategy {chosen.name} runs {chosen.most_workers} worker, not {size}")
    secret = b""
    if seat is None:
        line: Transport = Alone(deadline_s)
    else:
        name = (
            transport if transport != "auto" else "shm" if seat.local_size == seat.size else "gloo"
        )
        kind: Any = transports.entry(name).make
        if (missing := kind.missing()) is not None:
            raise BadRequest(f"transport {name} is not available here: {missing}")
        meeting = Meeting(seat)
        secret = meeting.secret
        if count and not secret and build is None:
            raise BadRequest(
                f"{chosen.name}: worker 0 sends the servers its model as a pickle, which a stranger"
                f" could replace: {seat.launcher} hands over no secret. Use paceline launch or"
                " mpirun, name a file that only you can read in PACELINE_SECRET_FILE on all hosts,"
                " or let servers build it themselves: join(..., build='module:function')"
            )
        line = meeting.connect(kind, deadline_s)
    pace = Pace(chosen, line, size - count, codec, seed, check_every, secret, build)
    if pace.ctx.role == "server":
        pace.serve()
        sys.stdout.flush()
        sys.exit(0)
    atexit.register(_say_goodbye, line)
    return pace


def _say_goodbye(line: Transport) -> None:
    with suppress(Exception):
        line.close()
