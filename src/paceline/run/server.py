"""A server: holds parameters for the workers until all of them have left."""

from __future__ import annotations

import socket
import time

import torch

from paceline.record.machine import boot_id
from paceline.record.sampler import NetBytes, Sampler
from paceline.record.writer import Recorder
from paceline.request.session import Session
from paceline.run.rank import Notify, Rank
from paceline.strategies.parts.serving import served
from paceline.transport.base import Transport


def run_server(
    session: Session, transport: Transport, recorder: Recorder, notify: Notify, sampler: Sampler
) -> None:
    torch.set_num_threads(1)
    net = NetBytes(sampler)
    rank = Rank.of(session, transport, recorder, notify)
    replica = rank.replica()
    recorder.write(
        "start",
        host=socket.gethostname(),
        boot=boot_id(),
        role="server",
        threads=1,
        clock=time.perf_counter(),
        parameters=replica.parameter_count,
        over_network=transport.traits.over_network,
    )
    net.start()
    rank.strategy.serve(rank.ctx, replica)
    net.stop()
    recorder.write(
        "summary",
        **sampler.summary(),
        net_sent_bytes=net.sent,
        net_received_bytes=net.received,
        setup_sent_bytes=rank.meter.total("setup").sent_bytes,
        **served(rank.meter.total("train")),
        traffic=rank.meter.described(),
    )
