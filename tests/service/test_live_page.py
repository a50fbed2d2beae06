"""The page of a live run: sessions of browsers, and what a browser shows while the run continues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.config import dump
from relax_hpc.config.schema import SamplesConfig
from relax_hpc.queue.operations import OUT
from relax_hpc.rollout.sample_log import SampleLog
from relax_hpc.service.page.session import cookie_name, is_session, make_session
from relax_hpc.service.page.shared_reading import SharedReading
from relax_hpc.service.page.snapshot import take_snapshot
from tests.helpers.browser import Tab
from tests.helpers.queue_helpers import small
from tests.helpers.service_helpers import TOKEN, Service, service
from tests.service.test_page import EVIL, sample

SESSION = make_session(TOKEN.encode())
COOKIE = cookie_name(TOKEN.encode())


@asynccontextmanager
async def page_service(path: Path) -> AsyncIterator[Service]:
    """A service whose run has a configuration file, a sample, and an operation."""
    async with service(path) as running:
        dump(small(), running.run.config)
        log = SampleLog(running.run.samples / "a.jsonl.gz", SamplesConfig(), steps=1)
        log.keep([sample(3, response=EVIL)], step=1)
        log.close()
        body = {"num_replicas": 3}
        await running.live.ask(running.supervisor.operations.create(OUT, body, "", 600.0))
        while not running.live.wanted.operations or running.live.is_hub_away:
            await running.live.wait_for_change(0.1)
        yield running


async def send(running: Service, method: str, path: str, **more: Any) -> aiohttp.ClientResponse:
    """A request without the bearer token."""
    url = running.url + path
    async with running.session.request(method, url, allow_redirects=False, **more) as reply:
        await reply.read()
        return reply


def test_only_a_session_opens_the_page(tmp_path: Path) -> None:
    async def play() -> None:
        async with page_service(tmp_path) as running:
            form = await send(running, "GET", "/page")
            assert form.status == 401 and "<form" in await form.text()
            for path in ("/page/state", "/page/samples"):
                assert (await send(running, "GET", path)).status == 401
            for forged in ("", "x", "1.x", f"{SESSION}0", SESSION.replace(".", ".0"), "\u00e9"):
                assert not is_session(TOKEN.encode(), forged)
            old = make_session(TOKEN.encode(), now=0.0)
            bad = {"Cookie": f"{COOKIE}={old}"}
            assert (await send(running, "GET", "/page/state", headers=bad)).status == 401

            wrong = await send(running, "POST", "/page/login", data={"token": TOKEN + "x"})
            assert wrong.status == 401 and "This is not the token" in await wrong.text()
            other_site = {"Sec-Fetch-Site": "cross-site"}
            refused = await send(
                running, "POST", "/page/login", data={"token": TOKEN}, headers=other_site
            )
            assert refused.status == 403 and "Set-Cookie" not in refused.headers
            long = await send(running, "POST", "/page/login", data={"token": "x" * 10_000})
            assert long.status == 400

            opened = await send(running, "POST", "/page/login", data={"token": TOKEN})
            assert opened.status == 303 and opened.headers["Location"] == "../page"
            cookie = opened.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
            value = cookie.partition("=")[2].partition(";")[0]
            good = {"Cookie": f"{COOKIE}={value}"}
            page = await send(running, "GET", "/page", headers=good)
            assert page.status == 200 and TOKEN not in await page.text()
            for header, text in (("Referrer-Policy", "no-referrer"), ("Cache-Control", "no-store")):
                assert page.headers[header] == text
            answer = await (await send(running, "GET", "/page/state", headers=good)).json()
            assert answer["state"]["operations"]["rows"][0]["cells"][1] == "scale out"
            # Without the service, the hub is asked.
            snapshot = await asyncio.to_thread(take_snapshot, running.run)
            assert snapshot["state"]["operations"]["rows"][0]["cells"][0] == "so-000001"
            # The session opens the page, and nothing else of the service.
            assert (await send(running, "GET", "/openapi.json", headers=good)).status == 401
            assert (await send(running, "GET", "/pagex", headers=good)).status == 401
            out = await send(running, "POST", "/page/logout", headers=good)
            assert out.status == 303 and "Max-Age=0" in out.headers["Set-Cookie"]
            assert running.limits.refused["unauthorized"] == 3

    asyncio.run(play())


def test_browsers_share_a_reading_and_see_its_age() -> None:
    entered, released, calls = threading.Event(), threading.Event(), []

    def read() -> int:
        calls.append(1)
        entered.set()
        assert released.wait(60.0)
        if len(calls) == 2:
            raise ConfigError("no run")
        return len(calls)

    async def play() -> None:
        reading = SharedReading(read, pause_s=0.0)
        both = asyncio.gather(reading.get(), reading.get())
        while not entered.is_set():
            await asyncio.sleep(0.01)
        released.set()
        assert [value for value, _ in await both] == [1, 1] and len(calls) == 1
        while len(calls) < 2:
            await asyncio.sleep(0.01)
            value, age_s = await reading.get()
        # The second reading failed: the first value is shown, with its age.
        assert value == 1 and age_s > 0.0

    asyncio.run(play())


def test_an_unreadable_run_is_named() -> None:
    def read() -> int:
        raise ConfigError("x: no run here")

    with pytest.raises(ConfigError, match="no run here"):
        asyncio.run(SharedReading(read, pause_s=0.0).get())


@contextmanager
def served_in_thread(path: Path) -> Iterator[Service]:
    """`page_service` in another thread, for a browser that this thread controls."""
    ready, over = threading.Event(), threading.Event()
    running: list[Service] = []

    async def serve() -> None:
        async with page_service(path) as started:
            running.append(started)
            ready.set()
            await asyncio.to_thread(over.wait, 120.0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        assert ready.wait(60.0)
        yield running[0]
    finally:
        over.set()
        thread.join(60.0)


def test_a_person_signs_in_and_watches_the_run(tmp_path: Path) -> None:
    tab = Tab(tmp_path / "browser")
    try:
        with served_in_thread(tmp_path / "run") as running:
            tab.open(f"{running.url}/page", width=360)
            for token, expected in (("wrong", "alert"), (TOKEN, "article")):
                tab.wait_for("document.querySelector('input') !== null")
                tab.value(f"document.querySelector('input').value = '{token}'")
                tab.value("document.querySelector('button').click()")
                if expected == "alert":
                    text = "document.querySelector('[role=alert]')?.innerText"
                    tab.wait_for(f"{text} === 'This is not the token of this run.'")
            tab.wait_for("document.querySelectorAll('article').length === 1")
            tab.wait_for("document.querySelector('#operations td') !== null")
            assert tab.value("document.cookie") == "" and tab.value("location.search") == ""
            assert "SCALE OUT" in tab.texts("#operations")[0].upper()
            assert tab.value("document.documentElement.scrollWidth") <= 360
            assert all(url.startswith(running.url) for url in tab.requests())
            assert not any(TOKEN in url for url in tab.requests())
            # Chromium logs each answer with status 401, which is the form here.
            assert all("401" in complaint for complaint in tab.complaints())
            tab.value("document.querySelector('#logout button').click()")
            tab.wait_for("document.querySelector('input[type=password]') !== null")
    finally:
        tab.close()
