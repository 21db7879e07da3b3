"""What a worker and a server have in common: a context, counters, faults, a replica."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.collectives.base import Collective, choose
from paceline.common.seeding import derive, generator, seed_everything
from paceline.data.adopt import some_indices
from paceline.data.base import Stream
from paceline.data.content import split, to_device
from paceline.errors import BadRequest
from paceline.faults.base import Fault
from paceline.parallel.base import Form, Given, Part
from paceline.parallel.piecewise import bare, in_file, into_memory, with_only
from paceline.record.machine import cpu_name
from paceline.registry import Spec
from paceline.replica import remembered
from paceline.replica.memory_format import measure_memory_format
from paceline.replica.precision import Precision
from paceline.replica.replica import Replica, enter_training
from paceline.request.groups import grouped
from paceline.request.job import Job
from paceline.request.session import Session
from paceline.run.whole import names_by_group
from paceline.strategies.base import Context, Strategy, codec_for
from paceline.transport.activity import Point
from paceline.transport.base import Transport
from paceline.transport.metered import Meter, Metered
from paceline.types import RecorderLike

Notify = Callable[[str, dict[str, Any]], None]


def no_loss(outputs: Any, targets: Any) -> Tensor:
    raise BadRequest("your own step or loop computes the loss itself")


def make_context(
    transport: Transport,
    strategy: Strategy,
    workers: int,
    *,
    codec: Spec | str,
    seed: int,
    recorder: RecorderLike,
    init: Literal["broadcast", "seed"] = "broadcast",
    overlap: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Context:
    """Return what a strategy needs to know about this rank.

    Ranks 0 to workers - 1 are workers, the others are servers. `say` gets the notices about slow
    ranks.
    """
    rank = transport.rank
    transport.patience.say = say
    if (line := transport.patience.activity.line) is not None:
        line.describe("server" if rank >= workers else "worker")
    transport.patience.name = lambda other: (
        f"worker {other}" if other < workers else f"the server (rank {other})"
    )
    transport.tolerant = transport.patience.tolerant = strategy.traits.survives
    serves = rank >= workers
    encoder = codec_for(strategy, codec)
    encoder.timer.now = transport.now
    alike = [r for r in transport.present if (r >= workers) == serves]
    ctx = Context(
        transport=transport,
        peers=group_apart(transport, alike) if transport.tolerant else transport.group(alike),
        role="server" if serves else "worker",
        worker_index=-1 if serves else rank,
        workers=workers,
        servers=tuple(range(workers, transport.size)),
        codec=encoder,
        collective=lambda name: choose(name, ctx.peers),
        recorder=recorder,
        random=generator(seed, "strategy", rank),
        shared_random=generator(seed, "strategy"),
        init=init,
        overlap=overlap,
    )
    return ctx


def along_copies(job: Job, ctx: Context) -> Context:
    """What the strategy sees of a model that is split: this rank's part in all copies."""
    arrangement, rank = job.arrangement, ctx.worker_index
    copies = ctx.peers.group(arrangement.ranks_of_part(rank))

    def collective(name: str) -> Collective:
        return choose(name, copies)

    return replace(
        ctx,
        transport=copies,
        peers=copies,
        worker_index=copies.rank,
        workers=copies.size,
        collective=collective,
    )


def group_apart(transport: Transport, ranks: Sequence[int], number: int = 0) -> Transport:
    """Return a group that can be closed while the transport that it is made from stays open."""
    if tuple(ranks) == transport.present and transport.traits.second_channel:
        transport = transport.side(f"group-{number}")
    return transport.group(ranks)


def _meet(faults: list[Fault], point: Point, step: int, rank: int) -> None:
    for fault in faults:
        fault.reached(point, step, rank)


@dataclass
class Rank:
    """One rank of a run: its strategy, its context, and the faults that were asked for."""

    job: Job
    device: torch.device
    strategy: Strategy
    ctx: Context
    meter: Meter
    faults: list[Fault]
    notify: Notify
    # What the strategy sees: the workers that hold the same part of the model. It is `ctx` unless
    # the model is split.
    along: Context
    whole_order: Sequence[Sequence[str]] = ()  # of a model that is split: its optimizer's groups

    @property
    def parts(self) -> int:
        """The workers that hold a copy of the model together."""
        return self.job.arrangement.parts

    @classmethod
    def of(
        cls, session: Session, transport: Transport, recorder: RecorderLike, notify: Notify
    ) -> Rank:
        job = session.job
        faults = job.faults()
        for fault in faults:
            transport = fault.wrap(transport)
        activity = transport.patience.activity
        activity.heard = lambda point, step: _meet(faults, point, step, activity.rank)
        activity.enter("set up")
        config, strategy = job.config, job.strategy()
        metered = Metered(transport)
        ctx = make_context(
            metered,
            strategy,
            job.workers,
            codec=config.codec,
            seed=config.seed,
            recorder=recorder,
            init="seed" if config.init == "seed" else "broadcast",
            overlap=config.overlap == "on",
            say=lambda text: notify("waiting", {"text": text}),
        )
        along = along_copies(job, ctx) if job.arrangement.form is not None else ctx
        return cls(job, session.device, strategy, ctx, metered.meter, faults, notify, along)

    def replica(self) -> Replica:
        """Build the model, its optimizer and its flat buffers.

        All ranks seed the model alike. Random numbers after that (dropout, augmentation) differ by
        worker.
        """
        job, ctx = self.job, self.ctx
        seed_everything(job.config.seed)
        part = None
        if job.arrangement.form is None:
            model = job.model().to(self.device)
            enter_training(model)
        else:
            part = self._part()
            model = part.model
        if self.along.worker_index != 0:
            copy = ctx.transport.rank if part is None else self.along.worker_index
            seed_everything(derive(job.config.seed, "worker", copy))
        loss = job.loss() if job.config.step is None else no_loss
        channels_last = self._memory_format(model) == "channels_last"
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Replica(
            model,
            job.optimizer(model, whole=part is None),
            loss,
            flat=self.strategy.traits.flat,
            channels_last=channels_last,
            precision=Precision(job.config.precision, self.device),
            clip_norm=job.config.clip_norm,
            step=job.step_function(),
            allocate=ctx.transport.allocate,
            part=part,
        )

    def _part(self) -> Part:
        """Split the model with the workers that hold this copy of it."""
        job, arrangement = self.job, self.job.arrangement
        group = self.ctx.peers.group(arrangement.ranks_of_copy(self.ctx.worker_index))
        inputs, _ = self._samples()
        given, form = Given(group, inputs, job.config.seed, self.ctx.peers), arrangement.build()
        model = self._model_for(form, given)
        enter_training(model)
        self.whole_order = names_by_group(model, grouped(model, job.config.groups))
        part = form.split(model, given)
        if form.slices:
            into_memory(part.model)
        return part

    def _model_for(self, form: Form, given: Given) -> torch.nn.Module:
        """Build the model with memory for what this rank needs, or whole where that is all of it.

        A model that was given as a Module is whole already.
        """
        job, found, needs = self.job, None, None
        if not isinstance(job.config.model, torch.nn.Module):
            with suppress(Exception):  # a constructor that looks at numbers needs real ones
                found = bare(job.model)
        if found is not None:
            needs = form.needs(found[0], given)
        seed_everything(job.config.seed)
        folder = job.out if job.out.is_dir() else Path(tempfile.gettempdir())
        if found is not None and form.slices and self.device.type == "cpu":
            return in_file(job.model, folder)
        if found is None or needs is None:
            return job.model().to(self.device)
        model = with_only(job.model, found[1], needs, folder)
        for name, module in model.named_modules():
            if needs(name):
                module.to(self.device)
        return model

    def _samples(self) -> tuple[Any, Any]:
        """Some training samples, the same on all workers."""
        job, train = self.job, self.job.data.train
        assert not isinstance(train, Stream)
        some = min(32, max(job.batch_sizes), len(train))
        indices = some_indices(train, job.data.loader, some)
        inputs, targets = to_device(split(train.batch(indices)), self.device)
        return inputs, targets

    def _memory_format(self, model: torch.nn.Module) -> str:
        """Return the memory format that worker 0 has measured to be the faster one."""
        job, ctx = self.job, self.ctx
        if job.memory_format != "auto":
            return job.memory_format
        choice = torch.zeros(1, dtype=torch.int64)
        train = job.data.train
        measures = ctx.worker_index == 0 and job.config.step is None
        if measures and not isinstance(train, Stream):
            inputs, targets = self._samples()
            choice += self._faster_format(model, inputs, targets) == "channels_last"
        ctx.transport.control.broadcast(choice)
        chosen = "channels_last" if int(choice) else "contiguous"
        if ctx.worker_index == 0:
            self.notify("chosen", {"memory_format": chosen})
        return chosen

    def _faster_format(self, model: torch.nn.Module, inputs: Any, targets: Any) -> str:
        """Return the faster memory format, as it was measured before or now.

        It is remembered, so that a run that is repeated on this machine gives the same bits.
        """
        job = self.job
        if not isinstance(inputs, Tensor) or inputs.dim() != 4:
            return "contiguous"
        about = (job.threads, job.config.precision, str(self.device), cpu_name(), torch.__version__)
        key = remembered.key_of(model, inputs, *about)
        found = remembered.recall(key)
        if found is None:
            found = measure_memory_format(model, job.loss(), inputs, targets)
            remembered.remember(key, found)
        return found
