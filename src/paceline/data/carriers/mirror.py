"""Download files from a public web server with pooch, each verified by its SHA-256."""

from __future__ import annotations

import logging
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from paceline.data.carriers.base import Say, Unpack, Unreachable, Way, scratch_in

TIMEOUT_S = 60
CHUNK_BYTES = 1 << 20
MAX_BYTES = 1 << 30  # of one download
SHOW_FROM_BYTES = 8 << 20  # smaller downloads report no progress
SHOW_EVERY_BYTES = 16 << 20


def mirror(base: str, sha256: Mapping[str, str], unpack: Unpack) -> Way:
    """Download `base`/FILE for each FILE with its pinned SHA-256, then unpack them."""

    def way(work: Path, say: Say) -> None:
        with scratch_in(work) as scratch:
            for file, digest in sha256.items():
                _download(f"{base}/{file}", digest, scratch / file, say)
            unpack(scratch, work)

    return way


def _download(url: str, sha256: str, target: Path, say: Say) -> None:
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)  # it announces each download
    downloader = pooch.HTTPDownloader(
        progressbar=_Progress(say),
        chunk_size=CHUNK_BYTES,
        timeout=TIMEOUT_S,
        # Otherwise requests decompresses what a server compressed, and the SHA-256 differs.
        headers={"Accept-Encoding": "identity"},
    )
    try:
        pooch.retrieve(url, f"sha256:{sha256}", target.name, target.parent, downloader=downloader)
    except (OSError, ValueError) as error:  # requests' own errors are OSErrors
        host = urllib.parse.urlsplit(url).hostname
        raise Unreachable(f"{host}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the short reason inside the error of pooch or requests."""
    if (response := getattr(error, "response", None)) is not None:
        return f"{response.status_code} {response.reason}"
    text = str(error)
    if "does not match the known hash" in text:
        return "the file is not the one it should be (its SHA-256 differs)"
    if "timed out" in text:
        return f"no answer in {TIMEOUT_S} s"
    if found := re.search(r"\[Errno -?\d+\] ([^'\")]+)", text):
        return found[1].strip()
    return text[:120]


class _Progress:
    """A progress bar as pooch expects it: it writes a line now and then, and ends a flood."""

    def __init__(self, say: Say) -> None:
        self.total, self._done, self._say = 0, 0, say

    def update(self, count: int) -> None:
        shown = self._done // SHOW_EVERY_BYTES
        self._done += count
        if self._done > MAX_BYTES:
            raise ValueError(f"the server sent more than {MAX_BYTES >> 20} MB")
        if self.total > SHOW_FROM_BYTES and shown != self._done // SHOW_EVERY_BYTES:
            self._say(f"  {min(self._done, self.total) / 1e6:.0f} of {self.total / 1e6:.0f} MB")

    def reset(self) -> None:
        """pooch resets the bar after the last chunk, and then reports the total once more."""
        self._done, self.total = 0, 0

    def close(self) -> None:
        pass
