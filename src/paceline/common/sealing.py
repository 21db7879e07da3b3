"""Bytes that carry the mark of a run's secret (HMAC): a rank opens only what another rank of the
run wrote.
"""

from __future__ import annotations

import hmac

from paceline.errors import TransportError


def seal(secret: bytes, content: bytes) -> bytes:
    """What only a rank that knows the run's secret could have written."""
    return hmac.digest(secret, b"serve" + content, "sha256") + content


def unseal(secret: bytes, sealed: bytes) -> bytes:
    mark, content = sealed[:32], sealed[32:]
    if not secret or not hmac.compare_digest(
        mark, hmac.digest(secret, b"serve" + content, "sha256")
    ):
        raise TransportError(
            "what came in worker 0's name does not carry the run's secret: it is not opened"
        )
    return content
