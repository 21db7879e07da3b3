"""Train a PyTorch model on several processes, and measure which strategy suits it best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api import Run, compare, load, load_data, ray_train, render, study, train
    from paceline.callbacks.base import Callback
    from paceline.data.prepare.anything import prepare
    from paceline.errors import BadRequest, PacelineError, RunFailed
    from paceline.launch.join import join
    from paceline.launch.split import SplitModel, split
    from paceline.planning.ask import plan, profile
    from paceline.run.own_loop import Pace

    __version__: str

__all__ = [
    "BadRequest",
    "Callback",
    "Pace",
    "PacelineError",
    "Run",
    "RunFailed",
    "SplitModel",
    "compare",
    "join",
    "load",
    "load_data",
    "plan",
    "prepare",
    "profile",
    "ray_train",
    "render",
    "split",
    "study",
    "train",
]

_HOMES = {
    "Run": "api",
    "train": "api",
    "ray_train": "api",
    "study": "api",
    "render": "api",
    "compare": "api",
    "load": "api",
    "load_data": "api",
    "Callback": "callbacks.base",
    "prepare": "data.prepare.anything",
    "Pace": "run.own_loop",
    "join": "launch.join",
    "plan": "planning.ask",
    "profile": "planning.ask",
    "split": "launch.split",
    "SplitModel": "launch.split",
    "BadRequest": "errors",
    "PacelineError": "errors",
    "RunFailed": "errors",
}


def __getattr__(name: str) -> Any:
    """On first use: importing torch takes a second that `paceline --help` should not."""
    if name == "__version__":
        from importlib.metadata import version

        return version("paceline")
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"paceline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
