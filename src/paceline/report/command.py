"""The commands that repeat a setting and a study."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import Any

from paceline.report.lines import Line, Study
from paceline.request.config import Config

# of the record, of the machine, or of the study: a person who trains with a setting sets none
LEFT_OUT = (
    "out", "resume", "seed", "memory_format", "sample_every_s", "profile", "data_dir",
    "target_accuracy", "evaluate_every", "evaluate_samples", "checkpoint_every", "threads",
)  # fmt: skip
# Paceline decides these from the others, and the record holds the decision
DECIDED = ("loss", "metric", "servers", "transport", "shard", "overlap", "momentum")
FIRST = ("model", "data", "strategy", "workers")  # the order of the flags; then Config's
# Spark clusters that Paceline has started: their addresses say nothing to a later command, which
# finds the cluster that is up by itself
OWN_MASTERS = re.compile(r"spark://(master|127\.0\.0\.1|localhost):\d+")


def command_of(study: Study, line: Line, **changed: Any) -> str:
    """Return the command that trains with a setting; "" where an option was a Python object.

    It is `paceline train`, or for a loop of the user's own what starts that script. `changed` are
    options with other values (None leaves one out); the script of a user sets its options itself,
    so there is no command for them.
    """
    run = (line.completed or line.runs)[0]
    config, known = {**run.record["config"], **changed}, Config.options()
    if config.get("own_loop"):
        return "" if changed else str(run.record["environment"].get("command") or "")
    names = _asked(study, run.name, config) | set(changed)
    words = ["paceline", "train"]
    for name in [*FIRST, *(n for n in known if n not in FIRST)]:
        value = config.get(name)
        if name == "master" and OWN_MASTERS.fullmatch(str(value)):
            continue
        plain = name == "strategy" or value != known[name].default
        if name in names and plain and value not in (None, [], False):
            words += _flag(name, value)
    threads = config.get("threads")
    if threads and threads != max(1, study.cores // int(config["workers"])):
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


def study_command(study: Study, **changed: Any) -> str:
    """Return the command that made the study, as it was typed; "" if it was made in Python.

    `changed` are flags with other values. The study goes on in the folder that it has.
    """
    said = str((study.about.get("environment") or {}).get("command") or "")
    if not said.startswith("paceline study"):
        return ""
    try:
        words = shlex.split(said)
    except ValueError:  # an unbalanced quote, in a record of an earlier version
        return said if not changed else ""
    for name, value in changed.items():
        words = [*_without(words, f"--{name}"), f"--{name}", str(value)]
    return shlex.join(words) if changed else said


def _without(words: list[str], flag: str) -> list[str]:
    """Return a command without a flag and its value."""
    kept: list[str] = []
    for before, word in pairwise(["", *words]):
        if word != flag and before != flag and not word.startswith(f"{flag}="):
            kept.append(word)
    return kept
