"""What a command line of `paceline train` asks for, where another command writes it into a file."""

from __future__ import annotations

from typing import Any


def options_of_train(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Read the options that `paceline train` would get from its file, flags and settings."""
    from paceline.cli.train import train
    from paceline.common.files import read_toml
    from paceline.request.settings import apply_settings

    params = train.make_context("paceline train", list(arguments)).params
    values: dict[str, Any] = read_toml(params["file"]) if params["file"] else {}
    own = ("file", "settings", "as_json", "quiet", "progress", "watch", "debug")
    values.update({k: v for k, v in params.items() if k not in own and v is not None and v != ()})
    return apply_settings(values, list(params["settings"]))
