"""Serves the live page on loopback: a page, its style and script, and the picture as it changes.

    from paceline.watch.server import serve
    serve("runs/a")                                     # until Ctrl-C

The server answers to nothing but these five paths, reads nothing outside the folder, and reads
nothing at all while no page is open.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import BadRequest
from paceline.look import css
from paceline.watch.state import Watched

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost", "[::1]")  # by which a browser may reach the page
EVERY_S, CATCHING_UP_S, LOOK_S = 1.0, 0.05, 0.1
INSTALL = "pip install 'paceline[watch]'"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def serve(
    folder: str | Path,
    port: int = 0,
    say: Callable[[str], None] = print,
    browser: bool = False,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Serve the page of a folder until Ctrl-C, or until `goes_on` returns False.

    `say` gets the address once the port is open. `browser` opens it where there is a display.
    """
    need_extra()
    import uvicorn

    opened = listen(port)
    server: uvicorn.Server | None = None

    async def look() -> None:
        if server is not None and not goes_on():
            server.should_exit = True

    app = application(Watched(folder), lambda: server is not None and server.should_exit)
    server = uvicorn.Server(
        uvicorn.Config(
            only_from_here(app),
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
            callback_notify=look,
            timeout_notify=1,
        )
    )
    address = f"http://{LOOPBACK}:{opened.getsockname()[1]}/"
    with opened, suppress(KeyboardInterrupt):
        say(address)
        if browser:
            open_browser(address)
        server.run(sockets=[opened])


def need_extra() -> None:
    """Refuse to go on without Starlette and uvicorn."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise BadRequest(f"the live page needs {' and '.join(missing)}: {INSTALL}")


def listen(port: int) -> socket.socket:
    """Open a port of loopback; 0 takes a free one."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((LOOPBACK, port))
        opened.listen()
    except OSError as error:
        opened.close()
        why = {
            errno.EADDRINUSE: "is in use by another program",
            errno.EACCES: "needs the rights of root",
        }.get(error.errno or 0, f"cannot be opened ({error.strerror})")
        raise BadRequest(
            f"port {port} {why}: choose another --port, or leave it out for a free one"
        ) from None
    return opened


def open_browser(address: str) -> bool:
    """Open the address if there is a browser with windows; text browsers would take the terminal.

    `webbrowser` knows graphical browsers only where there is a display.
    """
    try:
        found = webbrowser.get()
    except webbrowser.Error:
        return False
    return type(found) is not webbrowser.GenericBrowser and found.open(address)


Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


def only_from_here(app: Starlette) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Refuse requests for another host name.

    A web page of a stranger can let its name point to 127.0.0.1 (DNS rebinding) and could then read
    this server's answers. Its requests carry its name. Any port is right, for `ssh -L`.
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [v.decode("latin-1") for k, v in scope.get("headers", ()) if k == b"host"]
        name = hosts[0].lower() if len(hosts) == 1 else ""
        if name.rpartition(":")[0] in NAMES or name in NAMES:
            await app(scope, receive, send)
            return
        from starlette.responses import PlainTextResponse

        refused = PlainTextResponse(f"This page answers to {LOOPBACK} only.\n", 403, HEADERS)
        await refused(scope, receive, send)

    return checked


def application(watched: Watched, ending: Callable[[], bool]) -> Starlette:
    """Return the server's paths. `ending` tells when to send the last picture and stop."""
    from starlette.applications import Starlette
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    def fixed(text: str, kind: str) -> Callable[[Request], Response]:
        return lambda request: Response(text, headers=HEADERS, media_type=kind)

    async def state(request: Request) -> Response:
        content, _ = await _picture(watched, request.query_params.get("run"), ending())
        return Response(content, headers=HEADERS, media_type="application/json")

    async def stream(request: Request) -> Response:
        pictures = _pictures(watched, request, ending)
        return StreamingResponse(pictures, headers=HEADERS, media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/", fixed(_page("watch.html"), "text/html")),
            Route("/watch.css", fixed(css() + _page("watch.css"), "text/css")),
            Route("/watch.js", fixed(_page("watch.js"), "text/javascript")),
            Route("/state.json", state),
            Route("/stream", stream),
        ]
    )


def _page(name: str) -> str:
    return files("paceline.watch").joinpath("page", name).read_text("utf-8")


async def _picture(watched: Watched, run: str | None, closing: bool) -> tuple[str, bool]:
    """Return the picture as JSON, and whether there is more to read at once."""
    picture = await asyncio.to_thread(watched.picture, run)
    behind = picture["run"] is not None and picture["run"]["reading"] is not None
    text = json.dumps({**picture, "closing": closing}, allow_nan=False, separators=(",", ":"))
    return text, behind


async def _pictures(
    watched: Watched, request: Request, ending: Callable[[], bool]
) -> AsyncIterator[str]:
    """Send the picture when it has changed, as server-sent events, until one side ends."""
    run, sent = request.query_params.get("run"), ""
    while True:
        closing = ending()
        text, behind = await _picture(watched, run, closing)
        yield f"data: {text}\n\n" if text != sent else ": nothing new\n\n"
        sent = text
        if closing:
            return
        waited, pause = 0.0, CATCHING_UP_S if behind else EVERY_S
        while waited < pause and not ending():
            await asyncio.sleep(min(LOOK_S, pause))
            waited += LOOK_S
        if await request.is_disconnected():
            return


def lower_priority() -> None:
    """Let the workers of a run go first."""
    with suppress(OSError):
        os.nice(10)
