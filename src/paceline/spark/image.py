"""The image of the containers: built from this checkout, and again when its source has changed."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import BadRequest, RunFailed
from paceline.spark.engine import Engine

IMAGE = "paceline-spark"
LABEL = "paceline.source"  # on the image: which source it was built from
TOP = Path(__file__).parents[3]
DOCKERFILE = Path("deploy") / "Dockerfile"
LAST_LINES = 12


def ensure(engine: Engine, options: str, say: Callable[[str], None], top: Path = TOP) -> str:
    """Build the image if it is missing or older than the source. Return its name.

    `options` are further options of `docker build`.
    """
    known = label_of(engine, IMAGE)
    if not (top / DOCKERFILE).is_file():
        if known is not None:
            return IMAGE
        raise BadRequest(
            f"the image {IMAGE} is missing, and this installation of Paceline has no {DOCKERFILE}:"
            f" type `{engine.name} build -f {DOCKERFILE} -t {IMAGE} .` in a checkout of Paceline,"
            " or name an image that has Paceline with --image"
        )
    wanted = digest(top)
    if known != wanted:
        say(f"building the image {IMAGE} (the first time this takes some minutes)")
        _build(engine, top, wanted, split(options, "build-options"), say)
        # The image that this one replaces has no name any more.
        engine.tried("image", "prune", "--force", "--filter", f"label={LABEL}")
    return IMAGE


def label_of(engine: Engine, image: str) -> str | None:
    """Return the image's label, which may be empty; None where there is no such image."""
    form = f'{{{{index .Config.Labels "{LABEL}"}}}}'
    code, out, _ = engine.tried("image", "inspect", "--format", form, image)
    return out.strip() if code == 0 else None


def digest(top: Path) -> str:
    """Return a checksum of everything that the Dockerfile copies, and of the file itself."""
    found = hashlib.sha256()
    for path in _files(top):
        content = path.read_bytes()
        found.update(f"{path.relative_to(top)} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:16]


def _files(top: Path) -> Iterator[Path]:
    names = ("constraints.txt", "pyproject.toml", "deploy/Dockerfile", "deploy/spark-node.sh")
    yield from (top / name for name in names)
    for path in sorted((top / "src").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def split(options: str, flag: str) -> list[str]:
    """Split the value of a flag into words, as a shell does."""
    try:
        return shlex.split(options)
    except ValueError as error:
        raise BadRequest(f"--{flag} {options!r}: {error}") from None


def _build(
    engine: Engine, top: Path, source: str, options: list[str], say: Callable[[str], None]
) -> None:
    command = [engine.name, "build", "--file", str(top / DOCKERFILE), "--tag", IMAGE]
    command += ["--label", f"{LABEL}={source}", *options, str(top)]
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines = [*lines[-LAST_LINES + 1 :], line.rstrip()]
                if line.startswith(("STEP ", "Step ")):
                    say(line.strip()[:100])
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise RunFailed(
            f"{engine.name} could not build the image {IMAGE} (--build-options may give it a proxy"
            " or an index of packages). Its last lines:\n" + "\n".join(lines)
        )
