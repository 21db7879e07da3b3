"""`paceline.join`: make this process a rank of a run with the user's own loop (run/own_loop.py)."""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.common.allocator import keep_freed_memory
from paceline.errors import BadRequest, voiced
from paceline.launch.joined import Meeting
from paceline.launch.own_record import Folder, ended_by
from paceline.launch.place import Wanted
from paceline.launch.seat import end_with_its_launcher
from paceline.launch.seat import find as find_seat
from paceline.registry import strategies, transports
from paceline.run.loop.saving import described
from paceline.run.own_loop import Pace
from paceline.run.own_server import Build
from paceline.strategies.base import Strategy
from paceline.transport.alone import Alone
from paceline.transport.base import Transport, Waits
from paceline.transport.choose import best_transport


def join(
    strategy: str | Strategy = "allreduce",
    *,
    codec: str = "none",
    transport: str = "auto",
    servers: int | None = None,
    seed: int = 0,
    deadline_s: float = 30.0,
    give_up_s: float | None = None,
    lost_s: float = 60.0,
    insecure: bool = False,
    check_every: int = 0,
    build: Build | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> Pace:
    """Make this process one of the ranks that a launcher has started; alone it is the only rank.

    On a server's rank this call serves until the workers have left, then exits the process.

    `strategy`: a name with options (`local-sgd:every=8`) or a Strategy; `codec`: what encodes the
    messages; `transport`: what moves them; `seed`: of the strategy's random choices.
    `deadline_s`: seconds after which a wait for a slow rank is reported; `give_up_s`: seconds after
    which it ends (never, where it is known that the rank lives); `lost_s`: seconds after which a
    host that does not answer is lost.
    `insecure`: let ranks on several hosts meet though their launcher hands over no secret.
    `servers`: how many of the ranks are servers, the last ones (1 for `ps`).
    `check_every`: steps between checks that identical replicas are still identical.
    `build`: a function, or its name as `module:function`, that returns (model, optimizer). Servers
    call it instead of receiving the model from worker 0; with `insecure` they must.
    `out`: a folder for a record like that of `train`, which `paceline report` reads. `resume`: go
    on with the record in that folder, if there is one. Those of worker 0 count.
    """
    chosen: Strategy = strategies.build(strategy) if isinstance(strategy, str) else strategy
    keep_freed_memory()
    if transport != "auto":
        transports.entry(transport)  # refuses an unknown name, also for one worker
    seat = find_seat()
    serves = chosen.traits.serves == "ranks"
    if servers is not None and (servers < 1 or not serves):
        has = "1 or more" if serves else "none"
        raise BadRequest(f"servers={servers}: strategy {chosen.name} has {has}")
    count = (servers or 1) if serves else 0
    size = seat.size if seat else 1
    if size - count < 1:
        raise BadRequest(
            f"{chosen.name} with {count} server(s) needs {count + 1} ranks or more, not {size}:"
            f" paceline launch -n {count + 1} SCRIPT"
        )
    most = chosen.traits.most_workers
    if most is not None and size - count > most:
        raise BadRequest(
            f"strategy {chosen.name} runs {most} worker, not {size - count}: start"
            " fewer ranks, or choose another strategy"
        )
    secret = b""
    if seat is None:
        folder = Folder(out, resume, None)
        connected: Transport = Alone(deadline_s)
        if folder.status is not None:
            connected.patience.open_status(folder.status)
    else:
        name = transport
        if name == "auto":
            name = best_transport(several_hosts=not seat.one_host)
        kind = transports.entry(name).make
        if (missing := kind.missing()) is not None:
            raise BadRequest(f"transport {name} is not available here: {missing}")
        waits = Waits(deadline_s, give_up_s, lost_s)
        wanted = Wanted(None if out is None else Path(out), insecure, waits)
        end_with_its_launcher(seat)
        meeting = Meeting(seat, wanted)
        for notice in meeting.notices if meeting.leads else ():
            print(f"paceline: {voiced(notice)}", file=sys.stderr)
        secret = meeting.secret
        if count and not secret and build is None:
            raise BadRequest(
                f"{chosen.name}: worker 0 sends the servers its model as a pickle, and"
                f" {seat.launcher} hands over no secret that would protect it from strangers. Use"
                " paceline launch or mpirun, or name a file that only you can read in"
                " PACELINE_SECRET_FILE on all hosts, or let the servers build the model:"
                " join(..., build='module:function')"
            )
        folder = Folder(out, resume, meeting)
        meeting.rendezvous = replace(meeting.rendezvous, status=folder.status)
        connected = meeting.connect(kind, waits)
    known = {
        "strategy": described(chosen),
        "workers": size - count,
        "servers": count or None,
        "codec": codec,
        "transport": connected.name,
        "seed": seed,
        "deadline_s": deadline_s,
        "give_up_s": give_up_s,
        "lost_s": lost_s,
        "insecure": insecure,
    }
    pace = Pace(
        chosen,
        connected,
        size - count,
        codec,
        seed,
        check_every,
        secret,
        build,
        seat.local_rank if seat else 0,
        folder.record(connected, seat, known),
    )
    if pace.ctx.role == "server":
        pace.serve()
        sys.stdout.flush()
        sys.exit(0)
    atexit.register(_end, pace, connected, folder)
    return pace


def _end(pace: Pace, transport: Transport, folder: Folder) -> None:
    """At the end of the script, which need not have called `finish`; servers wait for its leave."""
    with suppress(Exception):  # the process ends anyway
        if ended_by() is None:
            pace.leave()
    folder.complete()
    with suppress(Exception):
        transport.close()
