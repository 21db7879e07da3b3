"""A server: holds parameters for the workers until all of them have left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.record.sampler import NetBytes, Sampler
from paceline.record.writer import Recorder
from paceline.request.session import Session
from paceline.run.rank import Notify, Rank
from paceline.run.step_log import place_of, summary_of
from paceline.strategies.base import Context, Strategy
from paceline.strategies.parts.serving import served
from paceline.transport.base import Transport
from paceline.transport.metered import Meter

if TYPE_CHECKING:
    from paceline.replica.replica import Replica


def run_server(
    session: Session, transport: Transport, recorder: Recorder, notify: Notify, sampler: Sampler
) -> None:
    torch.set_num_threads(1)
    rank = Rank.of(session, transport, recorder, notify)
    replica = rank.replica()
    notify("begins", {})
    record_serving(rank.strategy, rank.ctx, replica, recorder, sampler, rank.meter)


def record_serving(
    strategy: Strategy,
    ctx: Context,
    replica: Replica,
    recorder: Recorder,
    sampler: Sampler,
    meter: Meter,
) -> None:
    """Serve as a server does, between a `start` and a `summary`."""
    net = NetBytes(sampler)
    recorder.write(
        "start",
        **place_of("server", torch.get_num_threads(), ctx.transport.traits, ctx.transport.now()),
        parameters=replica.parameter_count,
    )
    net.start()
    ctx.transport.patience.activity.enter("exchange")
    strategy.serve(ctx, replica)
    net.stop()
    recorder.write("summary", **summary_of(sampler, net, meter), **served(meter.total("train")))
