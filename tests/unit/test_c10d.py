"""What the errors of torch.distributed's libraries mean."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import PeerLost, PeerSlow, TransportError
from paceline.transport.c10d import transport as module
from paceline.transport.c10d.gloo import GlooTransport

REFUSED = (
    "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:52146$1; this may"
    " indicate that a rank has ended"
)


class Store:
    def under(self, name: str) -> Store:
        return self


def connecting(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_group(self: GlooTransport, store: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(GlooTransport, "make_group", make_group)
    GlooTransport(Store(), "127.0.0.1", 0, 3, 30.0, 0, "world")


def test_a_refused_connection_is_no_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo calls it a timeout after three attempts, which take a moment."""
    with pytest.raises(PeerLost):
        connecting(REFUSED, monkeypatch)


def test_a_wait_that_took_as_long_as_it_may_is_a_slow_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MARGIN_S", 1e9)  # any wait is as long as the limit
    with pytest.raises(PeerSlow, match="while waiting for the connections"):
        connecting("Timed out waiting for 3 ranks", monkeypatch)


def test_other_errors_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportError, match="gloo: no such device"):
        connecting("no such device", monkeypatch)
