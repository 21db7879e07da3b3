"""Starting ranks of which some may die before the run begins: the others begin without them.

A rank that loses another one while it connects or sets itself up closes its transport, so that
every other rank notices. Then all ranks that are alive answer a roll call, connect again and set
themselves up again. Rank 0 calls the roll: it waits until each rank has answered, or has ended as
the launcher says, or has lost its connection to the board.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.errors import PeerLost
from paceline.run.start import NotBegun
from paceline.transport.base import Rendezvous, Transport
from paceline.transport.board.client import Board
from paceline.transport.c10d.store import connect_store
from paceline.transport.remaining import with_absent

POLL_S = 0.002


def begin(attempts: Iterator[Callable[[], Transport]], run: Callable[[Transport], None]) -> None:
    """Run with the first transport of which all ranks live until they have set themselves up."""
    lost = PeerLost(None)
    for connect in attempts:
        transport: Transport | None = None
        try:
            transport = connect()
            run(transport)
            return
        except NotBegun as failed:
            lost = failed.lost
        except PeerLost:
            raise  # another rank is the cause: this one says goodbye
        except Exception:
            if isinstance(board := getattr(transport, "store", None), Board):
                board.leave()
            raise
        finally:
            if transport is not None:
                with suppress(Exception):  # the process ends, or connects anew
                    transport.close()
    raise lost


def attempts(
    kind: Any, rendezvous: Rendezvous, survives: bool
) -> Iterator[Callable[[], Transport]]:
    """Give functions that connect this process to the other ranks: to all, then to those left."""
    if not survives or rendezvous.ended is None:
        yield partial(kind.connect, rendezvous)
        return
    yield partial(_connected, kind, rendezvous)
    for attempt in range(1, rendezvous.size):
        present = call_roll(rendezvous, attempt)
        generation = rendezvous.generation + attempt
        again = replace(rendezvous, generation=generation, present=present)
        yield partial(_connected, kind, again)


def _connected(kind: Any, rendezvous: Rendezvous) -> Transport:
    try:
        transport: Transport = kind.connect(rendezvous)
    except PeerLost as lost:
        raise NotBegun(lost) from None
    return with_absent(transport, rendezvous.members, rendezvous.rank, rendezvous.size)


def call_roll(rendezvous: Rendezvous, attempt: int) -> tuple[int, ...]:
    """Return the ranks that are alive, the same on all of them."""
    launcher_knows = rendezvous.ended
    assert launcher_knows is not None
    store, rank = connect_store(replace(rendezvous, joined=True)), rendezvous.rank
    store.set(f"roll/{attempt}/{rank}", "here")

    def ended() -> frozenset[int]:
        return launcher_knows() | store.gone().keys()

    if rank == 0:
        awaited = set(range(1, rendezvous.size))
        while awaited:
            awaited -= {r for r in awaited if store.check([f"roll/{attempt}/{r}"])}
            awaited -= ended()
            time.sleep(POLL_S)
        here = set(range(rendezvous.size)) - ended()
        store.set(f"roll/{attempt}", json.dumps(sorted(here)))
    while not store.check([f"roll/{attempt}"]):
        if 0 in ended():
            raise PeerLost(0, "before the run began")
        time.sleep(POLL_S)
    return tuple(json.loads(store.get(f"roll/{attempt}")))
