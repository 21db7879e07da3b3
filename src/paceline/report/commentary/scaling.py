"""Comments on scaling: how far from linear the speedup of each strategy is, and why."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.report.commentary.comment import Comment
from paceline.report.judge import Verdict, own_speedup, serial_speedup, speed
from paceline.report.lines import Line, Study
from paceline.report.words import percent, size, times, workers

TELLING = 0.15  # a share of the time that explains something
LINEAR = 0.95  # of P times as fast
SLOWER = 0.03  # a smaller difference is not worth a sentence


def slower(study: Study, line: Line) -> bool:
    """Whether a setting was slower than serial by more than a little; another comment says so."""
    verdict = speed(study, line, study.serial(line))
    return verdict is not None and verdict.higher and verdict.apart > SLOWER


def from_linear(study: Study) -> Iterator[Comment]:
    """Compare each strategy's speedup with linear, for the most workers that fit the cores."""
    for label in study.series:
        own = [x for x in study.lines if x.label == label and not x.oversubscribed and x.train_s]
        top = max((x for x in own if x.workers > 1), key=lambda x: x.workers, default=None)
        if top is None:
            continue
        one = own_speedup(study, top)
        gain = one or serial_speedup(study, top)
        if gain is None or slower(study, top):
            continue
        because, figures = reasons(study, top)
        linear = percent(gain.mean / top.workers, 0)
        figures = {"speedup": times(gain.mean), "efficiency": linear, **figures}
        reference = "with one worker" if one is not None else "serial"
        text = (
            f"`{label}` with {workers(top.workers)} was {times(gain.mean)} as fast as {reference},"
            f" {linear} of linear"
        )
        if gain.mean >= LINEAR * top.workers:
            yield Comment("linear", f"{text}: practically linear.", figures)
            continue
        verdict = speed(study, top, study.line(label, 1) or study.serial(top))
        if verdict is not None and verdict.runs >= 2 and not verdict.differs:
            text += " (the speedup is within noise)"
        serial_share = _serial_share(study, own, top, verdict)
        if serial_share is not None:
            figures["serial share (Amdahl)"] = percent(serial_share, 0)
            text += (
                f", as if {percent(serial_share, 0)} of its work could not be divided (Amdahl's"
                " law)"
            )
        yield Comment("linear", f"{text}. {because}".strip(), figures)


def _serial_share(
    study: Study, own: list[Line], top: Line, verdict: Verdict | None
) -> float | None:
    """Return the serial share by Amdahl's law, where the law applies.

    It applies where the work is the same for every number of workers, the workers exchange
    something, and the noise is smaller than the share.
    """
    sent = top.per_step("payload_sent_bytes")
    same_work = len({round(x.samples, -2) for x in own}) == 1
    if not same_work or verdict is None or verdict.runs < 2:
        return None
    if sent is not None and sent.mean == 0:
        return None
    points = [(x.workers, s.mean) for x in own if (s := own_speedup(study, x)) is not None]
    share = amdahl(points)
    gain = own_speedup(study, top)
    if share is None or gain is None:
        return None
    unsure = (gain.high - gain.low) / 2 / gain.mean / (1 - 1 / top.workers)
    return share if unsure < share else None


def amdahl(points: list[tuple[int, float]]) -> float | None:
    """Return the serial share s of S(P) = 1 / (s + (1-s)/P) that fits (P, S) best.

    The fit is by least squares in 1/S. None where the best s is not between 0 and 1.
    """
    above = [(p, s) for p, s in points if p > 1 and s > 0]
    weight = sum((1 - 1 / p) ** 2 for p, _ in above)
    if not above or not weight:
        return None
    share = sum((1 - 1 / p) * (1 / s - 1 / p) for p, s in above) / weight
    return share if 0.0 <= share <= 1.0 else None


def reasons(study: Study, line: Line) -> tuple[str, dict[str, str]]:
    """Return sentences on what took a setting's time, as far as it was measured, and figures."""
    sync, idle = line.share("sync_s"), line.share("idle_s")
    figures, sentences = {}, []
    if sync is not None and idle is not None:
        figures = {"exchange": percent(sync, 0), "waiting": percent(idle, 0)}
        shares = ((sync, "the exchange"), (idle, "waiting for the slowest"))
        spent = [
            f"{percent(share, 0)} of its time on {what}"
            for share, what in shares
            if share >= TELLING
        ]
        if spent:
            sentences.append(f"A worker spent {' and '.join(spent)}.")
    # without times of the exchange, the computing time includes it
    grown = _compute_growth(study, line) if sync is not None else None
    if grown is not None:
        figures["computing per sample against one worker"] = times(grown)
        if grown >= 1 + TELLING:
            shared = "shared cores" if line.oversubscribed else "shared memory and caches"
            sentences.append(
                f"Computing one sample took {times(grown)} as long as in one worker (smaller"
                f" batches, {shared})."
            )
    sent = line.per_step("payload_sent_bytes")
    if sent is not None:
        figures["bytes per worker and step"] = size(sent.mean)
    return " ".join(sentences), figures


def _compute_growth(study: Study, line: Line) -> float | None:
    """Return a worker's computing time per sample divided by that of a single worker."""
    base = study.line(line.label, 1) or study.serial(line)
    if base is None:
        return None
    each = [
        x.over_workers(lambda w: w["compute_s"] / w["samples"] if w["samples"] else None)
        for x in (line, base)
    ]
    return each[0].mean / each[1].mean if each[0] and each[1] and each[1].mean else None
