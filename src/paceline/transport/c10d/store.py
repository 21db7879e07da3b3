"""The board as PyTorch's libraries use it: their key-value store, where the ranks of a run meet."""

from __future__ import annotations

from datetime import timedelta

from paceline.transport.base import Rendezvous
from paceline.transport.board.client import Board
from paceline.transport.patience import Patience

# For waits that have no deadline of their own: a server may hear nothing during a long evaluation.
LONG = timedelta(hours=24)
MEET_S = 300.0  # for a key that another rank sets, where nothing tells that it lives


def connect_store(rendezvous: Rendezvous) -> Board:
    """Connect to the run's board."""
    return Board(
        rendezvous.board,
        rendezvous.secret,
        rendezvous.rank,
        lost_s=rendezvous.waits.lost_s,
        # a read may have to wait for a slow rank's write
        wait_s=LONG.total_seconds() if rendezvous.watched else MEET_S,
        alive=not rendezvous.joined,
    )


def patience_for(rendezvous: Rendezvous, board: Board) -> Patience:
    """A rank's `Patience`, which uses the board at the first long wait."""
    patience = Patience(
        rendezvous.rank,
        rendezvous.size,
        rendezvous.waits.deadline_s,
        lambda: board.under(f"patience-{rendezvous.generation}"),
        rendezvous.watched,
        rendezvous.waits.give_up_s,
        rendezvous.waits.lost_s,
    )
    patience.say = rendezvous.say or patience.say
    if rendezvous.status is not None:
        patience.open_status(rendezvous.status)
    return patience


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
