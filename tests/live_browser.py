"""A real browser that stays open: visit an address, run JavaScript there, take pictures.

It is driven through a pipe (Chromium's --remote-debugging-pipe), without a thread or a library.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.browser import CHROMIUM

DEADLINE_S = 60.0


class Page:
    """One page of the browser. `errors` collects what the page's console complains about."""

    def __init__(self, process: subprocess.Popen[bytes], read: int, write: int) -> None:
        self.process, self._read, self._write = process, read, write
        self._number, self._rest, self._session = 0, b"", ""
        self.errors: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def visit(self, address: str, width: int = 1280, dark: bool = False) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900,
                 deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Evaluate an expression on the page; a promise is awaited."""
        answer = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Evaluate it until it is true; fail after the deadline."""
        last, end = None, time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            with suppress(AssertionError):  # the page is being loaded
                last = self.run(script)
            if last:
                return last
            time.sleep(0.02)
        raise AssertionError(f"{script} is {last!r}; the page says: {self.text()[:800]}")

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def picture(self, path: Path, height: int | None = None) -> None:
        """Save the whole page as a PNG."""
        size = self.run("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": height or size[1], "scale": 1}
        shot = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol, and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for answer in self._heard():
                if answer.get("id") == self._number:
                    assert "error" not in answer, answer["error"]
                    return dict(answer["result"])
                self._note(answer)
        raise AssertionError(f"the browser did not answer {method}")

    def _heard(self) -> list[dict[str, Any]]:
        ready, _, _ = select.select([self._read], [], [], 1.0)
        if not ready:
            return []
        piece = os.read(self._read, 1 << 20)
        assert piece, "the browser has ended"
        *whole, self._rest = (self._rest + piece).split(b"\0")
        return [json.loads(message) for message in whole]

    def _note(self, message: dict[str, Any]) -> None:
        content = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(content["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and content["entry"]["level"] == "error":
            self.errors.append(content["entry"]["text"])


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """Start a browser that reaches this machine only, and end it."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def place() -> None:  # Chromium reads commands from 3 and answers on 4
        first, second = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(first, 3)
        os.dup2(second, 4)

    process = subprocess.Popen(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=place, pass_fds=(3, 4), start_new_session=True,  # noqa: PLW1509
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(process, ours_in, ours_out)
    finally:
        os.close(ours_out)  # the browser ends when its pipe is closed
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours_in)
