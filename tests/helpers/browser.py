"""A real browser, where there is one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from tests.requirements import requires

_BROWSER_S = 60.0
"""Seconds for the browser to start, to answer, and to end."""


def seen(page: Path, fragment: str = "") -> str:
    """Elements of ``page``, as the browser has them once its scripts have run."""
    requires("chromium")
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'browser'}",
    ]
    command += ["--virtual-time-budget=5000", "--dump-dom", f"{page.as_uri()}#{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


class Tab:
    """A tab of a headless Chromium, controlled over its DevTools protocol.

    (https://chromedevtools.github.io/devtools-protocol)
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: for the files of the browser."""
        requires("chromium")
        self.events: list[dict[str, Any]] = []
        """Events of the page so far: requests, exceptions, messages of its console."""
        self._loop = asyncio.new_event_loop()
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += [f"--user-data-dir={folder}", "--remote-debugging-port=0"]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._number = 0
        self._run(self._connect(folder, self._browser_url()))
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._run(self._session.close())
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_BROWSER_S)
        self._loop.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Result of a command of the protocol."""
        return self._run(self._call(method, parameters))

    def open(self, url: str, width: int = 1200, is_dark: bool = False) -> None:
        """Load ``url`` in a window of ``width`` pixels, and wait until it is loaded."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + _BROWSER_S
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        """Texts of the elements that match a CSS selector."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.value(f"{elements}.map((node) => node.innerText)")

    def complaints(self) -> list[str]:
        """Exceptions and errors of the page so far, among them violations of its policy."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Addresses that the page has asked so far, without those inside of it."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        urls = [event["params"]["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith("data:")]

    def _browser_url(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "DevTools listening on " in line:
                return line.partition("listening on ")[2].strip()
        raise AssertionError("chromium has not started")

    async def _connect(self, folder: Path, browser: str) -> None:
        self._session = aiohttp.ClientSession()
        address = browser.split("/")[2]
        async with self._session.get(f"http://{address}/json/list") as response:
            tabs = await response.json()
        url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        self._socket = await self._session.ws_connect(url, max_msg_size=1 << 28)

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        async with asyncio.timeout(_BROWSER_S):
            await self._socket.send_json(message)
            while True:
                answer = await self._socket.receive_json()
                if "method" in answer:
                    self.events.append(answer)
                elif answer["id"] == self._number:
                    assert "error" not in answer, answer
                    return answer["result"]

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)
