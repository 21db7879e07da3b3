"""Messages that are authenticated with a run's secret (HMAC).

A rank unpacks only what another rank of the same run wrote.
"""

from __future__ import annotations

import hmac

from paceline.errors import TransportError


def seal(secret: bytes, content: bytes) -> bytes:
    """Return the content with its HMAC in front."""
    return hmac.digest(secret, b"serve" + content, "sha256") + content


def unseal(secret: bytes, sealed: bytes) -> bytes:
    """Return the content; `TransportError` if its HMAC is not that of the secret."""
    mark, content = sealed[:32], sealed[32:]
    if not secret or not hmac.compare_digest(
        mark, hmac.digest(secret, b"serve" + content, "sha256")
    ):
        raise TransportError(
            "a message in the name of worker 0 is not authenticated with the run's secret, so it is"
            " not opened"
        )
    return content
