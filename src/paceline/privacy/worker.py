"""What a worker of a private run does: it draws samples in secret, makes private gradients, and
records its steps in the ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.data.base import Stream
from paceline.data.batches import Batches
from paceline.data.content import Arguments, split, to_device
from paceline.data.shards import StaticShards
from paceline.errors import BadRequest
from paceline.privacy.apart import NOTICE, apart
from paceline.privacy.bookkeeping import TRIED
from paceline.privacy.gradient import PrivateGradient
from paceline.privacy.ledger import Ledger, LedgerEntry, described, read_account
from paceline.privacy.noise import draw_key
from paceline.privacy.plan import Protection
from paceline.privacy.sampling import PoissonBatches, ShuffledBatches
from paceline.types import Batch

if TYPE_CHECKING:
    from paceline.replica.replica import Replica
    from paceline.request.session import Session
    from paceline.strategies.base import Context


class Private:
    """The privacy of one worker. Its keys are drawn in its own process and never leave it."""

    def __init__(self, session: Session, ctx: Context, device: torch.device) -> None:
        job = session.job
        assert job.protection is not None
        self.protection: Protection = job.protection
        self._session = session
        self.settings = self.protection.settings
        self._job, self._ctx, self._device = job, ctx, device
        self.worker = ctx.worker_index
        seed = None if self.settings.secure else job.config.seed
        self.keys = {
            what: draw_key(seed, what, self.worker, session.number) for what in ("noise", "samples")
        }
        self.ledger: Ledger | None = None
        self.made = 0

    def batches(self) -> Batches:
        given, shards = self._job.data.train, self._session.shards()
        assert not isinstance(given, Stream)
        assert isinstance(shards, StaticShards)
        train = apart(given)
        self._own, self._train = shards.chunks[self.worker], train
        if self.settings.sampling == "shuffle":
            return ShuffledBatches(train, shards, self.worker, self._device)
        return PoissonBatches(train, shards, self.worker, self._device, self.keys["samples"])

    def attach(self, replica: Replica, state: dict[str, Any] | None) -> None:
        """Attach a replica whose weights are set, and begin the worker's ledger.

        The model is tried out on a few samples of the worker's own shard; no result leaves it.
        """
        job, guarantee = self._job, self.protection.guarantee
        together = (
            (self._ctx.peers.control.all_reduce, sum(job.batch_sizes))
            if job.strategy().traits.noise_adds_up and job.workers > 1
            else None
        )
        self.gradient = PrivateGradient(
            replica,
            self.settings,
            guarantee.noise,
            self.keys["noise"],
            expected=job.batch_sizes[self.worker],
            parts=job.workers if guarantee.joins else 1,
            together=together,
        )
        few = self._own[torch.linspace(0, len(self._own) - 1, min(TRIED, len(self._own))).long()]
        inputs, targets = to_device(split(self._train.batch(few)), self._device)
        if isinstance(inputs, Arguments):
            raise BadRequest(
                "privacy: batches must have one input and targets; this data gives the inputs"
                f" {', '.join(inputs)}"
            )
        self.gradient.try_out(inputs, targets, len(few))
        if self._train is not self._job.data.train:
            self.gradient.clipper.notices.append(NOTICE)
        if state is not None:
            self.gradient.load(state)
        asked, told = self.settings, self.protection
        assert asked.noise is not None
        entry = LedgerEntry(
            self._session.number,
            asked.noise,
            told.rate,
            0,
            told.per,
            told.start,
            asked.trust,
            asked.secure,
        )
        self.ledger = Ledger(self._session.out, self.worker, entry, self.protection.steps)

    def forward_backward(self, batch: Batch, scale: float) -> float:
        assert self.ledger is not None
        self.ledger.before_step()
        self.made += 1
        return self.gradient.forward_backward(batch, scale)

    @property
    def epsilon(self) -> float:
        """Return an estimate of the epsilon spent, for the progress bar."""
        return self.protection.curve.at(self.made)

    def revealed(self, batch: Batch, loss: float) -> dict[str, Any]:
        """Return what is recorded of a step.

        That is the expected size and no loss, unless the user set reveal=true.
        """
        if self.settings.reveal:
            return {"n": batch.weight, "loss": loss, "drawn": self.gradient.drawn}
        return {"n": batch.weight, "loss": None}

    def spent(self) -> list[dict[str, Any]]:
        """Return the ledger's entries for a checkpoint."""
        return described(read_account(self._session.out))

    def settle(self) -> None:
        if self.ledger is not None:
            self.ledger.settle()
