"""A headless Chromium that tests look at pages with, over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 120.0


def browser_path() -> str:
    """The installed browser; skips the test if there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs a browser: make browser (Debian, as root), or install chromium")
    return found


class Page:
    """A tab: what it logged, what it requested, and the means to look at it.

    Attributes:
        errors: exceptions, and messages of the console that are errors or warnings.
        requests: the URLs that the page requested.
    """

    def __init__(self, socket: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._loop, self._number = socket, loop, 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        return self._loop.run_until_complete(self._send(method, parameters))

    async def _send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE_S)
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, found: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.errors.append(str(found["args"]))
        elif event == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(found["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])

    def open(self, url: str) -> None:
        """Go to a page and wait until it has drawn its plots."""
        self.errors.clear()
        self.requests.clear()
        self.send("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.documentElement?.dataset.ready > 0")

    def look(self, expression: str) -> Any:
        """The value of an expression on the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.look(expression):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.errors}"
            time.sleep(0.05)

    def picture(self, path: Path) -> None:
        """Write a screenshot of the visible part."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """A browser with one empty tab; its profile is in ``folder``."""
    import aiohttp

    command = [
        browser_path(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", "--window-size=1280,900",
        "about:blank",
    ]  # fmt: skip
    log = folder / "log.txt"
    folder.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        home = os.environ | {"HOME": str(folder)}
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=home)
    loop = asyncio.new_event_loop()
    session = None
    try:
        port = _port(process, log)

        async def connect() -> tuple[Any, Any]:
            session = aiohttp.ClientSession()
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (tab,) = [t for t in await answer.json() if t["type"] == "page"]
            address = tab["webSocketDebuggerUrl"]
            return session, await session.ws_connect(address, max_msg_size=0)

        session, socket = loop.run_until_complete(connect())
        yield Page(socket, loop)
    finally:
        if session is not None:
            loop.run_until_complete(session.close())
        loop.close()
        process.terminate()
        process.wait(PATIENCE_S)


def _port(process: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        if match := re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", text):
            return match[1]
        assert process.poll() is None, text
        time.sleep(0.05)
    raise AssertionError(f"the browser does not answer: {log.read_text(errors='replace')}")
