"""MPI's own start, which the launcher bounds: Open MPI waits without end for a lost daemon."""

import time
from typing import Any

import pytest

from paceline.common.waits import Waits
from paceline.errors import RunFailed
from paceline.launch.mpi import Starting

heard: list[tuple[str, dict[str, Any]]] = []


def starting(entered: int, left: int) -> Starting:
    heard.clear()
    found = Starting(lambda *message: heard.append(message), 2, Waits(lost_s=0.01))
    for kind in entered * ["connecting"] + left * ["connected"]:
        found.hear(kind, {})
    found.look()
    time.sleep(0.02)
    return found


@pytest.mark.parametrize(("left", "waiting"), [(0, 2), (1, 1)])
def test_all_are_inside_and_some_do_not_come_out(left: int, waiting: int) -> None:
    with pytest.raises(RunFailed, match=rf"not started within 0.01 s on {waiting} of 2 ranks"):
        starting(2, left).look()


@pytest.mark.parametrize(("entered", "left"), [(0, 0), (1, 0), (2, 2)])
def test_a_rank_that_is_slow_before_it_is_waited_for(entered: int, left: int) -> None:
    found = starting(entered, left)
    found.look()
    assert (found.look_s is None) == (left == 2)


def test_other_messages_are_passed_on() -> None:
    starting(1, 1).hear("notice", {"text": "slow"})
    assert heard == [("notice", {"text": "slow"})]
