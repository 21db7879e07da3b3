"""The model of your own loop, on a server: sent by worker 0, or built there.

Worker 0 sends it as a pickle. Opening a pickle runs code, so it carries the mark of the run's
secret, and a server opens nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import nn

from paceline.common.sealing import seal, unseal
from paceline.errors import BadRequest
from paceline.transport.base import Transport
from paceline.transport.notes import receive_bytes, send_bytes

Build = str | Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def send_model(
    transport: Transport,
    server: int,
    secret: bytes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    content = seal(secret, cloudpickle.dumps((model, optimizer)))
    send_bytes(transport, torch.frombuffer(bytearray(content), dtype=torch.uint8), server)


def receive_model(transport: Transport, secret: bytes) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Receive worker 0's model and optimizer. Refuses what does not carry the run's secret."""
    received: tuple[nn.Module, torch.optim.Optimizer] = cloudpickle.loads(
        unseal(secret, receive_bytes(transport, 0).numpy().tobytes())
    )
    return received


def receive_or_build(
    transport: Transport, secret: bytes, build: Build | None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the server's model and optimizer."""
    return receive_model(transport, secret) if build is None else built(build)


def built(build: Build) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the model and the optimizer on the server itself."""
    make: Any = build
    if isinstance(build, str):
        module, _, name = build.partition(":")
        try:
            make = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise BadRequest(
                f"build={build} is not a module:function that can be imported here: {error}"
            ) from None
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise BadRequest(
            f"build={build} must return (model, optimizer); it returned a {type(made).__name__}"
        )
    return made
