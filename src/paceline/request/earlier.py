"""An earlier run that is to be resumed: its folder and its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest

ONE_SESSION = ("resume", "out", "launcher", "master", "max_time")  # not those of the next one
AUTO = "auto"  # as `resume`: go on with the run in `out`, if there is one


def run_folder(resume: str | Path) -> Path:
    """Return the folder of a run that is named by its folder or by one of its checkpoints."""
    folder = Path(resume)
    return folder.parent.parent if (folder / "checkpoint.json").is_file() else folder


def load_config(folder: str | Path) -> dict[str, Any]:
    """Return the options of an earlier run, without those that belong to one session only."""
    path = run_folder(folder) / "config.json"
    try:
        saved = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadRequest(
            f"{folder} is not a run that can be resumed: it has no config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from None
    if not isinstance(saved, dict):
        raise BadRequest(f"{path} is not a run's configuration")
    if saved.get("own_loop"):
        raise BadRequest(
            f"{folder} is the run of a loop of your own, not of train: start its script again, with"
            " join(out=..., resume=True) and pace.load(...)"
        )
    return {k: v for k, v in saved.items() if v is not None and k not in ONE_SESSION}
