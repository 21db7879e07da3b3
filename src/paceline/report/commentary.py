"""What the data says, in plain sentences, each with the figures behind it; never a sentence that
the data does not carry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

from paceline.report.accuracy import accuracy_gained, accuracy_paid
from paceline.report.advice import SLOW, next_steps
from paceline.report.answer import compared, leader, like_the_leader
from paceline.report.comment import Comment
from paceline.report.lines import Line, Study
from paceline.report.messages import what_compression_costs
from paceline.report.networks import by_bandwidth
from paceline.report.noise import SPEED, Verdict, judge, speed
from paceline.report.privacy import what_privacy_costs
from paceline.report.tables import axis_rows
from paceline.report.words import count, listed, pace_against, percent, size, times, workers

SLOWER = 0.03  # less is not worth a sentence
# of the others' samples: a worker with fewer has smaller batches, which cost more per sample
EQUAL = 0.9
ELSEWHERE = 30.0  # per cent of a core: more than a launcher takes
TELLING = 0.15  # a share of the time that explains something


def comments(study: Study) -> list[Comment]:
    """Everything that can be said."""
    rules: tuple[Callable[[Study], Iterator[Comment]], ...] = (
        failures, disturbed, by_bandwidth, unlike_work, accuracy_paid, accuracy_gained, not_reached, within_noise,
        slow_workers, slower_than_serial,
        beyond_the_cores,
        what_privacy_costs, what_compression_costs, bytes_moved, from_linear, drift, along_the_data, measuring_cost, next_steps,
    )  # fmt: skip
    return [comment for rule in rules for comment in rule(study)]


# --- the rules


def failures(study: Study) -> Iterator[Comment]:
    for line in study.lines:
        if line.errors:
            reason = line.errors[0].splitlines()[0]
            yield Comment(
                "failed",
                f"`{line.id}` was not completed in {len(line.errors)} of {len(line.runs)} runs;"
                f" {reason}",
            )
    for damage in study.unreadable:
        yield Comment("failed", f"A record is left out: {damage}")
    for damage in (damage for run in study.runs for damage in run.damaged):
        yield Comment("failed", f"Events are left out: {damage}")


def disturbed(study: Study) -> Iterator[Comment]:
    """Was the machine ours? What the container used beyond what the workers did."""
    others = []
    for run in study.runs:
        machine = (run.record.get("machine") or {}).get("cpu_percent")
        own = [w["cpu_percent"] for w in run.record["workers"] if w.get("cpu_percent") is not None]
        if machine is not None and own and len(own) == len(run.record["workers"]):
            others.append(machine - sum(own))
    if others and median(others) >= ELSEWHERE:
        yield Comment(
            "disturbed",
            f"Something else used the machine: {median(others):.0f}% of a core beside the workers"
            f" (median of {count(len(others), 'run')}). Times and speedups are those of a busy"
            " machine.",
            {"most in one run": f"{max(others):.0f}%"},
        )
    if any(run.record["config"].get("profile") for run in study.runs):
        yield Comment(
            "disturbed",
            "Some runs were profiled, which slows them down: their times are not for comparison.",
        )


def unlike_work(study: Study) -> Iterator[Comment]:
    """Runs that were not planned together may differ in more than their names say."""
    done = [x for x in study.lines if x.completed and not study.definition]
    batches = {x.id: sum(x.completed[0].record["config"].get("batch_sizes") or [0]) for x in done}
    if len({b for b in batches.values() if b}) > 1:
        text = (
            "These runs did not make the same steps: their global batches differ, so accuracy after"
            " training is not comparable."
        )
        yield Comment(
            "unlike", text, {name: f"{batch} samples per step" for name, batch in batches.items()}
        )


def amdahl(points: list[tuple[int, float]]) -> float | None:
    """The serial share s of S(P) = 1 / (s + (1-s)/P) that fits best (least squares in 1/S); None
    where it would be none.
    """
    above = [(p, s) for p, s in points if p > 1 and s > 0]
    weight = sum((1 - 1 / p) ** 2 for p, _ in above)
    if not above or not weight:
        return None
    share = sum((1 - 1 / p) * (1 / s - 1 / p) for p, s in above) / weight
    return share if 0.0 <= share <= 1.0 else None


def from_linear(study: Study) -> Iterator[Comment]:
    """How far from linear, and why: for the most workers that had a core each."""
    for label in study.series:
        own = [x for x in study.lines if x.label == label and not x.oversubscribed and x.train_s]
        top = max((x for x in own if x.workers > 1), key=lambda x: x.workers, default=None)
        if top is None:
            continue
        one = study.own_speedup(top)
        gain = one or study.serial_speedup(top)
        if gain is None:
            continue
        reasons, figures = _reasons(study, top)
        figures = {
            "speedup": times(gain.mean),
            "efficiency": percent(gain.mean / top.workers, 0),
            **figures,
        }
        linear = percent(gain.mean / top.workers, 0)
        reference = "with one" if one is not None else "serial"
        text = (
            f"`{label}` with {workers(top.workers)} was {times(gain.mean)} as fast as {reference},"
            f" {linear} of linear"
        )
        if gain.mean >= 0.95 * top.workers:
            yield Comment("linear", text + ": as good as linear.", figures)
            continue
        verdict = speed(study, top, study.line(label, 1) or study.serial(top))
        if verdict is not None and verdict.runs >= 2 and not verdict.told:
            text += ", which these runs cannot tell from noise"
        serial_share = _serial_share(study, own, top, verdict)
        if serial_share is not None:
            figures["serial share (Amdahl)"] = percent(serial_share, 0)
            text += (
                f", as if {percent(serial_share, 0)} of its work could not be divided (Amdahl's"
                " law)"
            )
        yield Comment("linear", f"{text}. {reasons}" if reasons else f"{text}.", figures)


def _serial_share(
    study: Study, own: list[Line], top: Line, verdict: Verdict | None
) -> float | None:
    """Amdahl's, where it applies: the work is the same, workers exchange something, and the noise
    is smaller than the share.
    """
    sent = top.per_step("payload_sent_bytes")
    same_work = len({round(x.samples, -2) for x in own}) == 1
    if (
        not same_work
        or verdict is None
        or verdict.runs < 2
        or (sent is not None and sent.mean == 0)
    ):
        return None
    points = [(x.workers, s.mean) for x in own if (s := study.own_speedup(x)) is not None]
    share = amdahl(points)
    gain = study.own_speedup(top)
    if share is None or gain is None:
        return None
    unsure = math.expm1(verdict.limit) / gain.mean / (1 - 1 / top.workers)
    return share if unsure < share else None


def _reasons(study: Study, line: Line) -> tuple[str, dict[str, str]]:
    """What took the time, as far as it was measured."""
    sync, idle = line.share("sync_s"), line.share("idle_s")
    figures = {}
    told = []
    if sync is not None and idle is not None:
        figures = {"exchange": percent(sync, 0), "waiting": percent(idle, 0)}
        if sync >= TELLING:
            told.append(f"{percent(sync, 0)} of a worker's time went into the exchange")
        if idle >= TELLING:
            told.append(f"{percent(idle, 0)} into waiting for the slowest")
    grown = (
        _compute_growth(study, line) if sync is not None else None
    )  # otherwise the exchange is in it
    if grown is not None:
        figures["computing per sample against one worker"] = times(grown)
        if grown >= 1 + TELLING:
            told.append(
                f"computing one sample took {times(grown)} as long as in one worker (smaller"
                " batches"
                + (", shared cores)" if line.oversubscribed else ", shared memory and caches)")
            )
    sent = line.per_step("payload_sent_bytes")
    if sent is not None:
        figures["bytes per worker and step"] = size(sent.mean)
    text = "; ".join(told)
    return (text[0].upper() + text[1:] + "." if text else ""), figures


def _compute_growth(study: Study, line: Line) -> float | None:
    """A worker's computing time per sample, against that of one worker."""
    base = study.line(line.label, 1) or study.serial(line)
    if base is None:
        return None
    each = [
        x.over_workers(lambda w: w["compute_s"] / w["samples"] if w["samples"] else None)
        for x in (line, base)
    ]
    return each[0].mean / each[1].mean if each[0] and each[1] and each[1].mean else None


def slower_than_serial(study: Study) -> Iterator[Comment]:
    """Per setting: where it was slowest against serial, and why; how it was with other numbers of
    workers.
    """
    for label in study.series:
        slower: list[tuple[Line, Line, float, Verdict]] = []
        for line in (x for x in study.lines if x.label == label and x.workers > 1):
            serial, gain = study.serial(line), study.serial_speedup(line)
            verdict = speed(study, line, serial)
            if serial is None or gain is None or verdict is None:
                continue
            if verdict.higher and verdict.apart > SLOWER:
                slower.append((line, serial, gain.mean, verdict))
        if not slower:
            continue
        line, serial, _, verdict = min(slower, key=lambda found: found[2])
        reasons, figures = _reasons(study, line)
        shared = f"{_crowd(line)} shared {study.cores} cores." if line.oversubscribed else ""
        each_time = f" {verdict.each_time}" if verdict.split else ""
        yield Comment(
            "slower",
            f"`{label}` with {workers(line.workers)} was slower than serial{each_time}: "
            f"{pace_against(line, serial)}{verdict.seen}. {shared} {reasons}".replace(
                ".  ", ". "
            ).strip(),
            {
                **{
                    f"against serial, {workers(x.workers)}": times(gain) for x, _, gain, _ in slower
                },
                **figures,
            },
        )


def _crowd(line: Line) -> str:
    """Who was there: workers with their threads, and servers."""
    servers = line.servers
    threads = f" with {line.threads} threads each" if line.threads > 1 else ""
    return f"{workers(line.workers)}{threads}" + (
        f" and {servers} server{'s' * (servers > 1)}" if servers else ""
    )


def beyond_the_cores(study: Study) -> Iterator[Comment]:
    """What more workers than cores did to the time, over all strategies that tried."""
    worse: list[tuple[str, Line, float]] = []
    better: list[tuple[str, Line, float]] = []
    for label in study.series:
        own = [x for x in study.lines if x.label == label and x.train_s]
        fitting, more = (
            [x for x in own if not x.oversubscribed],
            [x for x in own if x.oversubscribed],
        )
        if not fitting or not more:
            continue
        best = min(fitting, key=lambda x: x.sample_s or math.inf)
        last = max(more, key=lambda x: x.workers)
        verdict = speed(study, last, best)
        if (
            best.sample_s
            and last.sample_s
            and verdict is not None
            and verdict.told
            and abs(verdict.apart) > SLOWER
        ):
            ratio = last.sample_s / best.sample_s
            (worse if ratio > 1 else better).append((label, last, ratio))
    if worse:
        most = max(worse, key=lambda w: w[2])
        yield Comment(
            "oversubscribed",
            f"More workers than the {study.cores} cores made {listed([w[0] for w in worse])}"
            f" slower; most of all `{most[0]}`, which took {times(most[2])} as long for a sample"
            f" with {workers(most[1].workers)} as at its best without oversubscription.",
            {f"{label} x {line.workers}": times(ratio) for label, line, ratio in worse},
        )
    if better:
        yield Comment(
            "oversubscribed",
            f"{listed([b[0] for b in better])} gained from more workers than cores.",
            {f"{label} x {line.workers}": times(ratio) for label, line, ratio in better},
        )


def slow_workers(study: Study) -> Iterator[Comment]:
    """A worker that took much longer over its samples than the others, in every run."""
    for line in study.lines:
        if line.workers < 2 or not line.completed:
            continue
        slow: list[set[int]] = []
        ratios: dict[int, float] = {}
        for run in line.completed:
            each = [w for w in run.record["workers"] if w["role"] == "worker" and w["samples"]]
            found = set()
            for w in each:
                others = [o for o in each if o is not w]
                usual = median(o["compute_s"] / o["samples"] for o in others) if others else 0.0
                own = w["compute_s"] / w["samples"]
                smaller = others and w["samples"] < EQUAL * median(o["samples"] for o in others)
                if usual > 0 and own >= SLOW * usual and not smaller:
                    found.add(w["rank"])
                    ratios[w["rank"]] = own / usual
            slow.append(found)
        for rank in sorted(set.intersection(*slow) if slow else set()):
            idle = line.share("idle_s")
            waited = (
                f" The workers waited {percent(idle, 0)} of the time."
                if idle is not None and idle >= TELLING
                else ""
            )
            yield Comment(
                "slow worker",
                f"Worker {rank} of `{line.id}` was slow: it took {times(ratios[rank])} as long for"
                " a sample as the others"
                f" did{' (seen in one run)' * (len(line.completed) < 2)}.{waited}",
                {"times the median of the others": times(ratios[rank])},
            )


def not_reached(study: Study) -> Iterator[Comment]:
    if study.target is None:
        return
    missing = [x for x in study.lines if x.completed and x.reached[0] < x.reached[1]]
    if missing:
        names = [x.id for x in missing]
        text = (
            f"The target of {100 * study.target:g}% was not reached in every run by"
            f" {listed(names)}."
        )
        yield Comment("target", text, {x.id: "{} of {} runs".format(*x.reached) for x in missing})


def within_noise(study: Study) -> Iterator[Comment]:
    """Settings that cannot be told from the one that the answer names."""
    lines = compared(study) or [
        x for x in study.lines if x.train_s and x.strategy != "serial" and x.workers > 1
    ]
    if len(lines) < 2:
        return
    if judge(SPEED, study).all is None:
        yield Comment(
            "noise",
            "No setting was run twice: differences in time below 10% are not told. Give more"
            " `--seeds`.",
        )
        return
    best, same = leader(study, lines), like_the_leader(study, lines)
    if same:
        gain, least = study.serial_speedup(best), min(x.sample_s or math.inf for x in (best, *same))
        fastest = (
            "the fastest, " if best.sample_s == least and (gain is None or gain.mean > 1) else ""
        )
        yield Comment(
            "noise",
            f"{listed([x.id for x in same])} cannot be told from {fastest}`{best.id}`: the"
            " difference is within noise.",
            {
                x.id: f"{x.train_s.low:.2f} to {x.train_s.high:.2f} s"
                for x in (best, *same)
                if x.train_s
            },
        )


def bytes_moved(study: Study) -> Iterator[Comment]:
    """What was sent for a step, by workers and servers; equal settings are named together."""
    counts = sorted({x.workers for x in study.lines if x.workers > 1 and x.strategy != "serial"})
    if not counts:
        return
    at = max((c for c in counts if c <= study.cores), default=counts[0])
    lines = [x for x in study.lines if x.workers == at]
    moved = {x.label: sent for x in lines if (sent := x.sent_per_step()) is not None}
    if len(moved) < 2:
        return
    low, high = min(moved.values()), max(moved.values())
    if high <= 1.05 * low:
        return
    least, most = (
        [k for k, v in moved.items() if abs(v - edge) <= 0.01 * edge] for edge in (low, high)
    )
    servers = any(x.servers for x in lines if x.label in moved)
    yield Comment(
        "bytes",
        f"With {workers(at)},"
        f" {_sent(least, 'least', low, ' per worker and step' + ', servers included' * servers)}"
        f" and {_sent(most, 'most', high)}.",
        {label: size(value) for label, value in sorted(moved.items(), key=lambda item: item[1])},
    )


def _sent(labels: list[str], what: str, value: float, unit: str = "") -> str:
    if len(labels) == 1:
        return f"`{labels[0]}` sent the {what} ({size(value)}{unit})"
    return f"{len(labels)} settings sent the {what} ({size(value)}{unit}: {listed(labels)})"


def drift(study: Study) -> Iterator[Comment]:
    far = [
        (x, d)
        for x in study.lines
        if (d := x.over_workers(lambda w: w.get("replica_distance_max"))) is not None and d.mean > 0
    ]
    if far:
        line, distance = max(far, key=lambda f: f[1].mean)
        text = (
            f"Replicas drifted farthest apart in `{line.id}`: {percent(distance.mean, 1)} of the"
            " length of their mean."
        )
        yield Comment(
            "drift",
            text,
            {x.id: percent(d.mean, 2) for x, d in sorted(far, key=lambda f: -f[1].mean)[:12]},
        )
    stale = [
        (x, s)
        for x in study.lines
        if (s := x.over_workers(lambda w: w.get("staleness_mean"))) is not None and s.mean > 0
    ]
    if stale:
        line, mean = max(stale, key=lambda f: f[1].mean)
        text = (
            f"Gradients were stalest in `{line.id}`: {mean.mean:.1f} updates by others behind, on"
            " average."
        )
        yield Comment(
            "drift",
            text,
            {x.id: f"{s.mean:.2f}" for x, s in sorted(stale, key=lambda f: -f[1].mean)[:12]},
        )


def slope(points: list[tuple[float, float]]) -> float | None:
    """Of log y against log x, by least squares; None for fewer than three points."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len(logs) < 3:
        return None
    mx, my = sum(x for x, _ in logs) / len(logs), sum(y for _, y in logs) / len(logs)
    spread = sum((x - mx) ** 2 for x, _ in logs)
    return sum((x - mx) * (y - my) for x, y in logs) / spread if spread else None


def along_the_data(study: Study) -> Iterator[Comment]:
    """Time against the number of samples: 1 is proportional."""
    by_series: dict[str, list[tuple[float, float]]] = {}
    for row in axis_rows(study, "data_share"):
        if row["train_s"] is not None:
            by_series.setdefault(row["series"], []).append((row["samples"], row["train_s"]))
    slopes = {
        name: s for name, points in by_series.items() if (s := slope(sorted(points))) is not None
    }
    if slopes:
        low, high = min(slopes.values()), max(slopes.values())
        powers = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        verdict = (
            "in proportion"
            if all(abs(s - 1) <= 0.1 for s in slopes.values())
            else "not in proportion"
        )
        yield Comment(
            "data",
            f"Training time grew as the number of samples to the power {powers}: {verdict}.",
            {name: f"slope {s:.2f}" for name, s in slopes.items()},
        )


def measuring_cost(study: Study) -> Iterator[Comment]:
    shares = [
        sum(w["measuring_s"] for w in own) / total
        for run in study.runs
        if (
            own := [
                w
                for w in run.record["workers"]
                if None not in (w.get("measuring_s"), w.get("measured_s"))
            ]
        )
        and (total := sum(w["measured_s"] for w in own))
    ]
    if shares:
        text = (
            f"Measuring itself (events, samples) took {percent(sum(shares) / len(shares), 2)} of"
            " the workers' time."
        )
        yield Comment("measuring", text, {"highest in one run": percent(max(shares), 2)})
