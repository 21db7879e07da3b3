"""Which transport `auto` means: the one that prefers itself most, of those that fit."""

from __future__ import annotations

from paceline.errors import BadRequest
from paceline.registry import transports


def best_transport(device: str = "cpu", several_hosts: bool = False) -> str:
    """Return the name of the transport for ranks on one host, or on several."""
    kind = device.partition(":")[0]
    found = [
        (entry.make.traits.preference, entry.name)
        for entry in transports
        if entry.make.traits.preference is not None
        and kind in entry.make.traits.devices
        and (entry.make.traits.crosses_hosts or not several_hosts)
        and entry.make.available()
    ]
    if not found:
        where = "between hosts" if several_hosts else "here"
        raise BadRequest(f"no transport moves memory of device {device} {where}: use --device cpu")
    return max(found)[1]
