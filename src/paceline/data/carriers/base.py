"""What all carriers share: the types, the error, and a folder for intermediate files."""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Say = Callable[[str], None]

# Puts the wanted files into a folder, or raises Unreachable.
Way = Callable[[Path, Say], None]

# Makes the wanted files, in the second folder, from what a carrier put into the first.
Unpack = Callable[[Path, Path], None]


class Unreachable(Exception):
    """A way to get files failed. The next way is tried."""


@contextmanager
def scratch_in(work: Path) -> Iterator[Path]:
    """Make a folder for intermediate files in `work`, and remove it afterwards.

    Errors in reading what was downloaded become Unreachable.
    """
    scratch = work / "package-download"
    scratch.mkdir()
    try:
        yield scratch
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise Unreachable(f"the package is not as expected: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
