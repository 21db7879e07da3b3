"""Plan a private run: refuse what cannot be private, choose the noise, count the steps that the
budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.base import Data, Stream
from paceline.data.shards import StaticShards
from paceline.errors import BadRequest
from paceline.privacy.accounting import Spent, epsilon_of, most_times, noise_for
from paceline.privacy.guarantee import Curve, Guarantee
from paceline.privacy.ledger import (
    LedgerEntry,
    begin,
    described,
    entries_in,
    read_account,
    the_most,
)
from paceline.privacy.native import loops
from paceline.privacy.sampling import rate_of, steps_per_epoch
from paceline.privacy.settings import Settings
from paceline.record import checkpoint

if TYPE_CHECKING:
    from paceline.codecs.base import Codec
    from paceline.request.config import Config
    from paceline.strategies.base import Strategy


@dataclass(frozen=True)
class Protection:
    """The plan of a private run."""

    settings: Settings  # with the noise
    guarantee: Guarantee
    rate: float  # the largest sampling rate of a worker
    per: int  # steps in which a sample is used at most once
    steps: int  # steps of this session, as many as the budget allows
    until: int  # the run's last step
    cut_short: bool  # whether the budget allows fewer steps than were asked for
    curve: Curve
    earlier: tuple[LedgerEntry, ...]  # what earlier sessions have spent
    start: int  # steps of the present epoch that an earlier session made (sampling=shuffle)

    def notices(self, samples: int) -> list[str]:
        """Return what the user should know about the guarantee before the run starts."""
        settings, found = self.settings, []
        spent = (
            f"epsilon {self.curve.at(self.steps):.3g} at delta {settings.delta:g} after"
            f" {self.steps:,} steps"
        )
        found.append(
            f"private: noise {settings.noise:g} x clip {settings.clip:g}, {spent}."
            f" {self.guarantee.sentences[0]}"
        )
        if settings.secure:
            found.append(
                "the noise and the samples are drawn in secret, so the run cannot be repeated or"
                " resumed bit for bit"
            )
        else:
            found.append(
                "NOT PRIVATE: secure=false takes the noise from the seed, and with the seed the"
                " noise can be subtracted"
            )
        if self.cut_short:
            found.append(
                f"the budget epsilon={settings.epsilon:g} allows {self.steps:,} steps: training"
                " stops there"
            )
        if settings.delta >= 1 / samples:
            found.append(
                f"delta={settings.delta:g} is not below 1/{samples:,}, so it allows one person's"
                " sample to be revealed: use a smaller delta"
            )
        if settings.sampling == "shuffle":
            found.append(
                "sampling=shuffle: batches are not secret, so epsilon does not include the gain"
                " from sampling"
            )
        if settings.reveal:
            found.append(
                "reveal=true: losses and batch sizes of training are recorded and are not protected"
            )
        return found


def check(config: Config, strategy: Strategy, codec: Codec) -> Settings | None:
    """Read the settings, and refuse a combination for which no guarantee can be stated."""
    if config.privacy is None:
        return None
    settings = Settings.read(config.privacy)
    if strategy.traits.noise_adds_up is None:
        raise BadRequest(f"privacy with {strategy.name}: {strategy.traits.not_private_because}")
    if config.shard == "global" or config.partition == "by-label":
        asked = "shard=global" if config.shard == "global" else "partition=by-label"
        raise BadRequest(
            f"privacy with {asked}: a worker's part of the data must be fixed and must not depend"
            f" on the data: leave {asked} out"
        )
    if config.balance is not None and config.balance.startswith("measured"):
        raise BadRequest(
            "privacy with balance=measured: the times of secret batches would be sent to all"
            " workers: give speeds instead"
        )
    if config.profile and not settings.reveal:
        raise BadRequest(
            "privacy with profile: the number of calls can tell how many samples were drawn: leave"
            " it out, or add reveal=true"
        )
    if config.resume and config.out and not same_folder(config.out, config.resume):
        raise BadRequest(
            "privacy: a private run goes on in its own folder, where its ledger is: leave --out out"
        )
    if config.overlap == "on":
        raise BadRequest(
            "privacy with overlap=on: nothing can be sent before the backward pass has ended,"
            " because clipping needs all of it: leave overlap out"
        )
    collects = (
        getattr(strategy, "when", "step") == "epoch"
        and bool(strategy.traits.noise_adds_up)
        and config.workers > 1
    )
    if (
        collects
        and settings.trust == "curator"
        and config.checkpoint_every
        and "epoch" not in config.checkpoint_every
    ):
        raise BadRequest(
            "privacy with when=epoch, trust=curator and"
            f" checkpoint_every={config.checkpoint_every}: within an epoch, what a worker has"
            " collected has only a part of the noise, and a checkpoint would contain it: use"
            " checkpoint_every=epoch"
        )
    if (
        not codec.lossless
        and config.workers > 1
        and settings.trust == "curator"
        and strategy.traits.noise_adds_up
    ):
        kept = f", and the residual of {codec.name} would be unprotected" if codec.feedback else ""
        raise BadRequest(
            f"privacy with codec {codec.name} and trust=curator: a message is encoded when it has"
            f" only a part of the noise{kept}: use trust=peers, where each worker adds the whole"
            " noise first"
        )
    return settings


def protect(
    settings: Settings,
    strategy: Strategy,
    data: Data,
    batch_sizes: tuple[int, ...],
    epochs: int | None,
    steps: int | None,
    resumed: Resumed,
) -> Protection:
    """Choose the noise for epsilon, unless it is given; count the steps that the budget allows."""
    if isinstance(data.train, Stream):
        raise BadRequest(
            "privacy needs samples that can be drawn one by one, which a stream does not allow"
        )
    if min(batch_sizes) < 1:
        raise BadRequest("privacy: every worker needs a batch of 1 or more")
    shards = StaticShards(len(data.train), batch_sizes)
    workers = range(len(batch_sizes))
    if poor := [w for w in workers if not len(shards.chunks[w])]:
        raise BadRequest(
            f"privacy: worker {poor[0]} gets none of the {len(data.train)} samples: batch sizes are"
            " too unequal"
        )
    if settings.sampling == "poisson":
        rate, per, epoch = (
            max(rate_of(shards, w) for w in workers),
            1,
            steps_per_epoch(len(data.train), sum(batch_sizes)),
        )
    else:
        rate, per = 1.0, shards.steps_per_epoch
        epoch = per
    known = [n for n in (steps, epochs * epoch if epochs is not None else None) if n is not None]
    left = max(0, min(known) - resumed.step)
    before, offset = resumed.spent, resumed.into_epoch(batch_sizes, per)
    wanted = -(-(offset + left) // per)
    if settings.epsilon is not None and before:
        _refuse_if_spent(settings, before)
    if settings.noise is None:
        assert settings.epsilon is not None
        noise = noise_for(
            settings.epsilon, settings.delta, rate, max(1, wanted), settings.accountant, before
        )
        settings = replace(settings, noise=noise)
    assert settings.noise is not None
    allowed = left
    if settings.epsilon is not None and left:
        fits = most_times(
            settings.epsilon,
            settings.delta,
            settings.noise,
            rate,
            wanted,
            settings.accountant,
            before,
        )
        if fits * per <= offset:
            one = epsilon_of(
                (*before, Spent(settings.noise, rate, 1)), settings.delta, settings.accountant
            )
            raise BadRequest(
                f"privacy: epsilon={settings.epsilon:g} leaves no room for another step, with which"
                f" it would be {one:.3g}: use more noise, smaller batches, or a larger epsilon"
            )
        allowed = max(0, min(left, fits * per - offset))
    guarantee = Guarantee.of(
        settings, len(batch_sizes), bool(strategy.traits.noise_adds_up), strategy.name
    )
    # A run with a session of trust=curator keeps that weaker promise.
    if any(entry.trust == "curator" for entry in resumed.entries):
        guarantee = guarantee.weakened(
            replace(settings, trust="curator"), len(batch_sizes), strategy.name
        )
    loops()  # compile them once, before the workers need them
    curve = Curve.of(settings, rate, max(1, allowed), per, before, offset)
    return Protection(
        settings,
        guarantee,
        rate,
        per,
        allowed,
        resumed.step + allowed,
        allowed < left,
        curve,
        resumed.entries,
        offset,
    )


def _refuse_if_spent(settings: Settings, before: tuple[Spent, ...]) -> None:
    spent = epsilon_of(before, settings.delta, settings.accountant)
    assert settings.epsilon is not None
    if spent >= settings.epsilon:
        raise BadRequest(
            f"privacy: the budget epsilon={settings.epsilon:g} is spent: this run has used"
            f" {spent:.4g}, and going back to a checkpoint gives nothing back. A larger epsilon is"
            " a weaker guarantee, and a new run on the same people adds to it"
        )


def same_folder(out: str, resume: str) -> bool:
    """Whether `resume` is the folder `out`, or one of its checkpoints (two levels below)."""
    given = Path(resume).resolve()
    return Path(out).resolve() in (given, given.parent.parent)


@dataclass(frozen=True)
class Resumed:
    """The step from which a run goes on, and what earlier sessions have spent."""

    step: int = 0
    entries: tuple[LedgerEntry, ...] = ()
    checkpoint: Path | None = None

    @property
    def spent(self) -> tuple[Spent, ...]:
        return tuple(entry.spent for entry in self.entries)

    def into_epoch(self, batch_sizes: tuple[int, ...], per: int) -> int:
        """Return how many of the `per` steps of the present shuffled epoch have been made.

        With other batch sizes, or another number of workers than before, StaticShards deals the
        rest of the epoch out anew. That rest takes fewer steps than planned, but at least one, so
        the epoch counts as one with a single step left. That never counts too few epochs.
        """
        if self.checkpoint is None or per == 1:
            return 0
        place = checkpoint.load_own(self.checkpoint, 0)["batches"]["shards"]
        if place["kind"] != "static":
            return 0  # the workers refuse this checkpoint
        same = tuple(place["batch_sizes"]) == batch_sizes
        dealt_anew = bool((place["seen_at_start"] if same else place["seen"]).any())
        return per - 1 if dealt_anew else int(place["position"]) if same else 0

    @classmethod
    def of(
        cls,
        resume_from: Path | None,
        folder: Path | None,
        private: bool,
        spent: tuple[LedgerEntry, ...] = (),
    ) -> Resumed:
        """Read what was spent from the run's folder and the checkpoint, and take the larger.

        The checkpoint may come from another folder.
        """
        if resume_from is None or folder is None:
            return cls(entries=spent)
        said = checkpoint.about(resume_from)
        kept = said.get("privacy")
        if private and kept is None:
            raise BadRequest(
                f"{resume_from} is from a run without privacy, so its weights are not protected:"
                " begin a new run with privacy"
            )
        if not private and kept is not None:
            raise BadRequest(
                f"{resume_from} is from a private run: going on without privacy would break its"
                " guarantee; add --privacy"
            )
        if kept is None:
            return cls()
        saved = entries_in(kept, resume_from / "checkpoint.json")
        entries = the_most([*read_account(folder), *saved])
        return cls(said["step"], tuple(entries), resume_from)


def begin_session(folder: Path, protection: Protection, at_least: int) -> int:
    """Begin a session in the run's folder, before its workers start; return its number."""
    return begin(folder, protection.earlier, at_least)


def account(folder: Path, protection: Protection) -> dict[str, Any]:
    """Return run.json's `privacy`, from the ledger in the run's folder."""
    settings, entries = protection.settings, read_account(folder)
    spent = tuple(entry.spent for entry in entries)
    secure = settings.secure and all(entry.secure for entry in entries)
    return {
        "epsilon": epsilon_of(spent, settings.delta, settings.accountant),
        "delta": settings.delta,
        "accountant": settings.accountant,
        "epsilon_rdp": epsilon_of(spent, settings.delta, "rdp"),
        "budget": settings.epsilon,
        "sampling": settings.sampling,
        "rate": protection.rate,
        "trust": "curator" if any(e.trust == "curator" for e in entries) else settings.trust,
        "noise": settings.noise,
        "noise_per_worker": protection.guarantee.noise,
        "clip": settings.clip,
        "clipping": settings.clipping,
        "per_layer": settings.per_layer,
        "adaptive": settings.adaptive,
        "steps": sum(entry.steps for entry in entries),
        "cut_short": protection.cut_short,
        "secure": secure,
        "private": secure,
        "guarantee": list(protection.guarantee.sentences),
        "sessions": described(entries),
    }
