"""Whether a run can be private, and what it then does: the noise, how long the budget lasts, what
is promised.
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
from paceline.privacy.ledger import LedgerEntry, begin, described, read_account, the_most
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
    """A private run, worked out. `steps`: how many it makes from here, as far as the budget allows;
    `until`: the last one.
    """

    settings: Settings  # with the noise
    guarantee: Guarantee
    rate: float  # the largest of the workers'
    per: int  # steps in which a sample is seen once at most
    steps: int
    until: int
    cut_short: bool  # by the budget
    curve: Curve
    earlier: tuple[LedgerEntry, ...]  # what earlier sessions have spent and promised
    start: int  # steps of the present epoch that were made before (sampling=shuffle)

    def notices(self, samples: int) -> list[str]:
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
                "its noise and its samples are drawn in secret: such a run cannot be repeated or"
                " resumed bit for bit"
            )
        else:
            found.append(
                "NOT PRIVATE: secure=false takes noise from the seed, and whoever knows it can take"
                " the noise away"
            )
        if self.cut_short:
            found.append(
                f"the budget epsilon={settings.epsilon:g} allows {self.steps:,} steps: training"
                " stops there"
            )
        if settings.delta >= 1 / samples:
            found.append(
                f"delta={settings.delta:g} is not below 1/{samples:,}: it may give a whole person"
                " away; use less"
            )
        if settings.sampling == "shuffle":
            found.append(
                "sampling=shuffle: batches are not secret, so epsilon is reported without the gain"
                " from sampling"
            )
        if settings.reveal:
            found.append(
                "reveal=true: losses and batch sizes of training are recorded, and are not"
                " protected"
            )
        return found


def check(config: Config, strategy: Strategy, codec: Codec) -> Settings | None:
    """What was asked for; a combination whose guarantee cannot be stated is refused."""
    if config.privacy is None:
        return None
    settings = Settings.read(config.privacy)
    if strategy.noise_adds_up is None:
        raise BadRequest(f"privacy with {strategy.name}: {strategy.not_private_because}")
    if config.shard == "global" or config.partition == "by-label":
        asked = "shard=global" if config.shard == "global" else "partition=by-label"
        raise BadRequest(
            f"privacy with {asked}: every worker draws from a fixed part of the data, which must"
            " not depend on it: leave it out"
        )
    if config.balance is not None and config.balance.startswith("measured"):
        raise BadRequest(
            "privacy with balance=measured: how long secret batches take would be sent around: give"
            " speeds"
        )
    if config.profile and not settings.reveal:
        raise BadRequest(
            "privacy with profile: how often functions are called can tell how many samples were"
            " drawn: add reveal=true"
        )
    if config.resume and config.out and not same_folder(config.out, config.resume):
        raise BadRequest(
            "privacy: a private run goes on in its own folder, where what it has spent is written"
            " down: leave out= out"
        )
    if config.overlap == "on":
        raise BadRequest(
            "privacy with overlap=on: clipping needs the whole backward pass before anything can be"
            " sent: leave it out"
        )
    collects = (
        getattr(strategy, "when", "step") == "epoch"
        and bool(strategy.noise_adds_up)
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
            f" checkpoint_every={config.checkpoint_every}: what a worker has collected in the"
            " middle of an epoch has a part of the noise only, and would be in its checkpoint: use"
            " checkpoint_every=epoch"
        )
    if (
        not codec.lossless
        and config.workers > 1
        and settings.trust == "curator"
        and strategy.noise_adds_up
    ):
        kept = (
            f", and what {codec.name} leaves out it remembers unprotected" if codec.feedback else ""
        )
        raise BadRequest(
            f"privacy with codec {codec.name} and trust=curator: a message is encoded before its"
            f" noise is whole{kept}: use trust=peers, where every worker adds all of it first"
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
    """Noise from epsilon where it is not given; how many steps the budget allows."""
    if isinstance(data.train, Stream):
        raise BadRequest("privacy needs samples that can be drawn one by one: a stream cannot be")
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
                f"privacy: epsilon={settings.epsilon:g} leaves no room for another step (which"
                f" would make it {one:.3g}): more noise, smaller batches, or a larger epsilon"
            )
        allowed = max(0, min(left, fits * per - offset))
    guarantee = Guarantee.of(
        settings, len(batch_sizes), bool(strategy.noise_adds_up), strategy.name
    )
    if any(
        line.trust == "curator" for line in resumed.lines
    ):  # what was promised less before cannot be promised more now
        guarantee = guarantee.weakened(
            replace(settings, trust="curator"), len(batch_sizes), strategy.name
        )
    loops()  # compiled here, once, before the workers need it
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
        resumed.lines,
        offset,
    )


def _refuse_if_spent(settings: Settings, before: tuple[Spent, ...]) -> None:
    spent = epsilon_of(before, settings.delta, settings.accountant)
    assert settings.epsilon is not None
    if spent >= settings.epsilon:
        raise BadRequest(
            f"privacy: the budget epsilon={settings.epsilon:g} is spent: this run has used"
            f" {spent:.4g}, and going back to a checkpoint gives nothing back; a larger epsilon is"
            " a weaker promise, and a new run on the same people adds to it"
        )


def same_folder(out: str, resume: str) -> bool:
    """`resume` is a run's folder, or one of its checkpoints, two below."""
    given = Path(resume).resolve()
    return Path(out).resolve() in (given, given.parent.parent)


@dataclass(frozen=True)
class Resumed:
    """From where a run goes on, and what was spent on the way there."""

    step: int = 0
    lines: tuple[LedgerEntry, ...] = ()
    checkpoint: Path | None = None

    @property
    def spent(self) -> tuple[Spent, ...]:
        return tuple(line.spent for line in self.lines)

    def into_epoch(self, batch_sizes: tuple[int, ...], per: int) -> int:
        """Of the `per` steps of a shuffled epoch, how many have been made; at least, where that is
        not certain.

        With other batch sizes or another number of workers than before, the rest of an epoch is
        dealt out anew (StaticShards), and takes fewer steps than it would have: one at least, so
        that it counts as an epoch that has one step left.
        """
        if self.checkpoint is None or per == 1:
            return 0
        place = checkpoint.load_own(self.checkpoint, 0)["batches"]["shards"]
        if place["kind"] != "static":
            return 0  # a worker refuses to go on from it
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
        """What was spent is in the run's folder and in the checkpoint, which may have been taken
        elsewhere: the more of it.
        """
        if resume_from is None or folder is None:
            return cls(lines=spent)
        said = checkpoint.about(resume_from)
        kept = said.get("privacy")
        if private and kept is None:
            raise BadRequest(
                f"{resume_from} is from a run without privacy: what its weights know cannot be"
                " taken back"
            )
        if not private and kept is not None:
            raise BadRequest(
                f"{resume_from} is from a private run: going on without privacy would undo its"
                " promise"
            )
        if kept is None:
            return cls()
        lines = the_most([*read_account(folder), *(LedgerEntry(**entry) for entry in kept)])
        return cls(said["step"], tuple(lines), resume_from)


def begin_session(folder: Path, protection: Protection, at_least: int) -> int:
    """In the run's folder, before its workers start."""
    return begin(folder, protection.earlier, at_least)


def account(folder: Path, protection: Protection) -> dict[str, Any]:
    """run.json's `privacy`: from what is written down in the run's folder."""
    settings, lines = protection.settings, read_account(folder)
    spent, secure = (
        tuple(line.spent for line in lines),
        settings.secure and all(line.secure for line in lines),
    )
    return {
        "epsilon": epsilon_of(spent, settings.delta, settings.accountant),
        "delta": settings.delta,
        "accountant": settings.accountant,
        "epsilon_rdp": epsilon_of(spent, settings.delta, "rdp"),
        "budget": settings.epsilon,
        "sampling": settings.sampling,
        "rate": protection.rate,
        "trust": "curator" if any(line.trust == "curator" for line in lines) else settings.trust,
        "noise": settings.noise,
        "noise_per_worker": protection.guarantee.noise,
        "clip": settings.clip,
        "clipping": settings.clipping,
        "per_layer": settings.per_layer,
        "adaptive": settings.adaptive,
        "steps": sum(line.steps for line in lines),
        "cut_short": protection.cut_short,
        "secure": secure,
        "private": secure,
        "guarantee": list(protection.guarantee.sentences),
        "sessions": described(lines),
    }
