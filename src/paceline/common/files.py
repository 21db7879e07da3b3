"""Reading and writing files that other processes may look at."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest


def read_toml(
    path: str | Path, hint: str = "FILE is a TOML file with options; a data set goes into --data"
) -> dict[str, Any]:
    path = Path(path)
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BadRequest(f"{path} does not exist ({hint})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"{path} is not valid TOML: {error}") from None
