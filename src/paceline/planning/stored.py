"""A profile as a file: versioned JSON, portable and small. Reading it refuses what is damaged."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.common.files import write_whole
from paceline.errors import BadRequest
from paceline.planning.accuracy import Accuracy, Branch, Followed
from paceline.planning.compute import MEDIANS, Compute, Steps
from paceline.planning.fit import QUANTILES, Line
from paceline.planning.measurements import Row
from paceline.planning.profile import (
    CodecCost,
    LinkCost,
    Made,
    Memory,
    Model,
    Profile,
    TensorShape,
)
from paceline.record.shapes import (
    Maybe,
    OrNull,
    Values,
    anything,
    fault,
    not_negative,
    positive,
    speed,
    text,
    whole,
)

SCHEMA = 1
DIGITS = 6  # of every measured number: more than any measurement has
AGAIN = "make it again with `paceline profile`"

_LINE = {"fixed": not_negative, "slope": not_negative}
_COSTS = tuple(
    name for name in LinkCost.__dataclass_fields__ if name not in ("transport", "points")
)
SHAPE: dict[str, Any] = {
    "source": text,
    "model": {
        "name": text,
        "parameters": positive,
        "dtype_bytes": positive,
        "tensors": [{"name": text, "shape": [whole]}],
    },
    "data": text,
    "made": {"date": text, "machine": Values(anything), "versions": Values(text)},
    "compute": {
        "steps": [
            {
                "batch_size": positive,
                "quantiles_s": [speed],
                "count": positive,
                **dict.fromkeys(MEDIANS, Maybe(not_negative)),
            }
        ],
        "threads": positive,
        "speeds": [speed],
        "together": OrNull(speed),
        "core_share": OrNull(not_negative),
        "ready": [not_negative],
    },
    "codecs": [
        {"name": text, "kind": text, "message_bytes": whole, "encode": _LINE, "decode": _LINE}
    ],
    "memory": OrNull({"peak_bytes": positive, "batch_size": positive}),
    "links": [
        {"transport": text, **dict.fromkeys(_COSTS, not_negative), "points": [[not_negative]]}
    ],
    "measurements": [
        {"workers": positive, "hosts": positive, "batch_size": positive, "step_s": speed}
    ],
    "accuracy": Maybe(
        {
            "target": speed,
            "branched_at": whole,
            "lr_scaling": text,
            "branches": [{"batch_size": positive, "steps": [positive]}],
            "noise_scale": OrNull(speed),
            "followed": [
                {
                    "strategy": text,
                    "workers": positive,
                    "batch_size": positive,
                    "steps": [positive],
                    "codec": text,
                }
            ],
        }
    ),
    "missing": [text],
}


def text_of(profile: Profile) -> str:
    """Return the profile as JSON, with a line per list of numbers."""
    plain = _rounded({"schema": SCHEMA, **asdict(profile)})
    return _folded(json.dumps(plain, indent=1, allow_nan=False)) + "\n"


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write the file whole, or not at all."""
    try:
        write_whole(Path(path), text_of(profile))
    except OSError as error:
        raise BadRequest(f"out={path} cannot be written: {error.strerror}") from None


def refuse_place(path: str | Path) -> None:
    """Refuse a place for a profile before anything is measured: a folder, or another file."""
    path = Path(path)
    if path.is_dir():
        raise BadRequest(f"out={path} is a folder: give the name of a file, {path}/profile.json")
    if not path.parent.is_dir():
        raise BadRequest(f"out={path}: the folder {path.parent} does not exist")
    if path.exists() and not _looks_like_one(path):
        raise BadRequest(f"out={path} exists and is not a profile: choose another name")


def _looks_like_one(path: Path) -> bool:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"schema", "compute", "links"} <= found.keys()


def read_profile(path: str | Path) -> Profile:
    """Read a profile; refuse a damaged one, one of another schema, and other files."""
    plain = _read(Path(path))
    if (wrong := fault(plain, SHAPE) or _contradiction(plain)) is not None:
        raise BadRequest(f"{path} is a damaged profile: {wrong}; {AGAIN}")
    compute, model, made = plain["compute"], plain["model"], plain["made"]
    memory = plain["memory"]
    return Profile(
        source=plain["source"],
        model=Model(
            model["name"],
            model["parameters"],
            model["dtype_bytes"],
            tuple(TensorShape(t["name"], tuple(t["shape"])) for t in model["tensors"]),
        ),
        data=plain["data"],
        made=Made(made["date"], made["machine"], made["versions"]),
        compute=Compute(
            tuple(_steps(each) for each in compute["steps"]),
            compute["threads"],
            tuple(compute["speeds"]),
            compute["together"],
            compute["core_share"],
            tuple(compute["ready"]),
        ),
        codecs=tuple(
            CodecCost(
                c["name"], c["kind"], c["message_bytes"], _line(c["encode"]), _line(c["decode"])
            )
            for c in plain["codecs"]
        ),
        memory=Memory(memory["peak_bytes"], memory["batch_size"]) if memory else None,
        links=tuple(
            LinkCost(
                link["transport"],
                **{name: link[name] for name in _COSTS},
                points=tuple((size, seconds) for size, seconds in link["points"]),
            )
            for link in plain["links"]
        ),
        measurements=tuple(
            Row(r["workers"], r["hosts"], r["batch_size"], r["step_s"])
            for r in plain["measurements"]
        ),
        accuracy=_accuracy(plain.get("accuracy")),
        missing=tuple(plain["missing"]),
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file that says that it is a profile of this schema."""
    try:
        plain = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadRequest(
            f"{path} does not exist: make it with `paceline profile --model cnn --data mnist --out"
            f" {path.name}`"
        ) from None
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path} is not a profile, or damaged: {error}; {AGAIN}") from None
    if not isinstance(plain, dict) or not whole(plain.get("schema")):
        raise BadRequest(f"{path} is not a profile: it has no schema; {AGAIN}")
    if "compute" not in plain and "result" in plain:
        raise BadRequest(
            f"{path} is the record of a run: make a profile of it with `paceline profile"
            f" {path.parent}`"
        )
    if plain["schema"] != SCHEMA:
        newer = "use a newer Paceline, or " if plain["schema"] > SCHEMA else ""
        raise BadRequest(
            f"{path} has schema {plain['schema']}; this Paceline knows {SCHEMA}: {newer}{AGAIN}"
        )
    return plain


def _contradiction(plain: dict[str, Any]) -> str | None:
    """Describe what has the right shape and cannot be true; None: nothing."""
    compute, tensors = plain["compute"], plain["model"]["tensors"]
    sizes = [steps["batch_size"] for steps in compute["steps"]]
    if not sizes:
        return "compute.steps is empty"
    if sizes != sorted(set(sizes)):
        return "compute.steps is not in the order of the batch sizes"
    for steps in compute["steps"]:
        found, where = steps["quantiles_s"], f"quantiles_s of batch size {steps['batch_size']}"
        if len(found) != QUANTILES:
            return f"{where} has {len(found)} numbers, not {QUANTILES}"
        if found != sorted(found):
            return f"{where} does not rise"
    if not compute["speeds"]:
        return "compute.speeds is empty"
    if any(fraction > 1 for fraction in compute["ready"]):
        return "compute.ready has a fraction above 1"
    if compute["ready"] and len(compute["ready"]) != len(tensors):
        return f"compute.ready has {len(compute['ready'])} numbers for {len(tensors)} tensors"
    branches = (plain.get("accuracy") or {"branches": ()})["branches"]
    sizes = [branch["batch_size"] for branch in branches]
    if branches and (len(sizes) < 2 or sizes != sorted(set(sizes))):
        return "accuracy.branches are not two batch sizes or more, in their order"
    if any(not branch["steps"] for branch in branches):
        return "a branch of accuracy has no steps"
    if any(len(point) != 2 for link in plain["links"] for point in link["points"]):
        return "a point of a link is not a pair of bytes and seconds"
    return None


def _steps(plain: dict[str, Any]) -> Steps:
    parts = {part: plain.get(part) for part in MEDIANS}
    return Steps(plain["batch_size"], tuple(plain["quantiles_s"]), plain["count"], **parts)


def _accuracy(plain: dict[str, Any] | None) -> Accuracy | None:
    if plain is None:
        return None
    return Accuracy(
        plain["target"],
        plain["branched_at"],
        plain["lr_scaling"],
        tuple(Branch(b["batch_size"], tuple(b["steps"])) for b in plain["branches"]),
        plain["noise_scale"],
        tuple(
            Followed(f["strategy"], f["workers"], f["batch_size"], tuple(f["steps"]), f["codec"])
            for f in plain["followed"]
        ),
    )


def _line(plain: dict[str, float]) -> Line:
    return Line(plain["fixed"], plain["slope"])


def _rounded(value: Any) -> Any:
    """Return the value with as many digits as a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return value


def _folded(text: str) -> str:
    """Put every list that holds only numbers on one line."""

    def on_one_line(found: re.Match[str]) -> str:
        return f"[{', '.join(found[0][1:-1].replace(',', ' ').split())}]"

    return re.sub(r"\[[\s\d.,eE+-]+\]", on_one_line, text)
