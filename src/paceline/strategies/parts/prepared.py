"""A collective that has measured, before the first step, which way is fastest (`auto`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.collectives.base import Collective, choose
from paceline.strategies.base import Context
from paceline.transport.base import Transport

if TYPE_CHECKING:
    from paceline.strategies.parts.saved import Saved


def prepared(
    ctx: Context,
    name: str,
    buffers: Iterable[Tensor],
    saved: Saved | None = None,
    over: Transport | None = None,
) -> Collective:
    """Build a collective over the workers and prepare it for these buffers; all workers call it.

    A resumed run keeps the choices of `auto`, because the order in which floats are added depends
    on them.
    """
    collective = choose(name, over if over is not None else ctx.peers)
    if saved is not None and saved.own:
        collective.obey(saved.state.get("collective", {}))
    for buffer in buffers:
        collective.prepare(buffer)
    if collective.choices:
        ctx.recorder.write("choice", collective=collective.choices)
    return collective
