"""Bytes of any length, sent beside the payload: a model, what a server remembers."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.transport.base import Transport


def send_bytes(transport: Transport, content: Tensor, to: int) -> None:
    transport.send_note(torch.tensor([content.numel()]), to).wait()
    if content.numel():
        transport.send_note(content, to).wait()


def receive_bytes(transport: Transport, source: int) -> Tensor:
    length = torch.zeros(1, dtype=torch.int64)
    transport.recv_note(length, source).wait()
    content = torch.zeros(int(length), dtype=torch.uint8)
    if content.numel():
        transport.recv_note(content, source).wait()
    return content
