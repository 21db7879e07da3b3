"""The commands that repeat a setting and a study."""

from __future__ import annotations

import shlex
from typing import Any

from paceline.report.answer import compared, leader
from paceline.report.judge import mean_of, serial_speedup, speed
from paceline.report.lines import Line, Study
from paceline.report.score import score_of
from paceline.request.config import Config

# of the record, of the machine, or of the study: a person who trains with a setting sets none
LEFT_OUT = (
    "out", "resume", "seed", "memory_format", "sample_every_s", "profile", "data_dir",
    "target_accuracy", "evaluate_every", "evaluate_samples", "checkpoint_every", "threads",
)  # fmt: skip
# Paceline decides these from the others, and the record holds the decision
DECIDED = ("loss", "metric", "servers", "transport", "shard", "overlap", "momentum")
FIRST = ("model", "data", "strategy", "workers")  # the order of the flags; then Config's


def command_of(study: Study, line: Line) -> str:
    """Return the command that trains with a setting; "" where an option was a Python object.

    It is `paceline train`, or for a loop of the user's own what starts that script.
    """
    run = (line.completed or line.runs)[0]
    config, known = run.record["config"], Config.options()
    if config.get("own_loop"):
        return str(run.record["environment"].get("command") or "")
    names = _asked(study, run.name, config)
    words = ["paceline", "train"]
    for name in [*FIRST, *(n for n in known if n not in FIRST)]:
        value = config.get(name)
        plain = name == "strategy" or value != known[name].default
        if name in names and plain and value not in (None, [], False):
            words += _flag(name, value)
    threads = config.get("threads")
    if threads and threads != max(1, study.cores // line.workers):
        words += ["--threads", str(threads)]
    return "" if any(word.startswith("<") for word in words) else shlex.join(words)


def _asked(study: Study, run: str, config: dict[str, Any]) -> set[str]:
    """Return the names of the options that the user set, as far as the records tell."""
    planned: dict[str, Any] = next((r for r in study.about.get("runs", []) if r["name"] == run), {})
    if "options" not in planned:
        return {name for name in config if name not in (*LEFT_OUT, *DECIDED)}
    names = {name.partition(".")[0] for name in planned["options"]}
    if study.definition.get("scaling") == "weak":  # the study computed these for each setting
        names = names - {"global_batch_size", "epochs"} | {"batch_size", "steps"}
    return {*FIRST, *names}.difference(LEFT_OUT)


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if name in ("plugin", "faults"):
        return [word for each in value for word in (flag, str(each))]
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return [flag, text]


def winner(study: Study) -> Line | None:
    """Return the setting to train with: the leader if it is faster than serial, else serial.

    Without serial to compare with it is the setting with the best score, else the fastest.
    """
    lines = compared(study)
    if lines:
        best = leader(study, lines)
        serial = study.serial(best)
        verdict = speed(study, best, serial)
        return best if verdict is not None and verdict.lower else serial
    done, score = [x for x in study.lines if x.completed], score_of(study)
    known = {x.id: found.mean for x in done if (found := score.spread(x)) is not None}
    if known:
        sign = 1 if score.higher_is_better else -1
        return max((x for x in done if x.id in known), key=lambda x: sign * known[x.id])
    return max(done, key=lambda x: mean_of(serial_speedup(study, x)), default=None)


def study_command(study: Study) -> str:
    """Return the command that made the study, as it was typed; "" if it was made in Python."""
    said = (study.about.get("environment") or {}).get("command") or ""
    return str(said) if str(said).startswith("paceline study") else ""
