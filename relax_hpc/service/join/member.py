"""The member process: it connects to the service of a run, and sends its requests to an engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import orjson

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, ConfigError
from relax_hpc.base.foreign_files import read_regular
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.rollout.external import MEMBER_FETCH, MEMBER_FILES
from relax_hpc.rollout.external.preflight import describe_model
from relax_hpc.service import relay
from relax_hpc.service.join.versions import FetchedVersions, FetchError

_UPDATE = "/update_weights_from_disk"
_ALLOWED = {
    ("GET", "/health"),
    ("GET", "/model_info"),
    ("GET", "/server_info"),
    ("POST", "/generate"),
    ("POST", "/abort_request"),
    ("POST", "/flush_cache"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/freeze_gc"),
    ("POST", _UPDATE),
}
"""Requests that the run may send to the engine."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_ENGINE_S = 10.0
"""Seconds for the engine to describe itself."""
_MAX_KEY_BYTES = 4096
_JSON = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinSettings:
    """Arguments of `relax-hpc join`."""

    engine: str
    """Address of the engine."""
    api: str
    """Address of the service of the run."""
    token: str
    """Token of a member."""
    engine_key: str = ""
    """API key of the engine; empty: it has none."""
    staging: Path = Path("/dev/shm")
    """Folder for versions, which the engine can read."""
    wait_s: float = 3600.0
    """Seconds without the service after which the process ends."""


class EngineMember:
    """Connects one engine to a run."""

    def __init__(self, settings: JoinSettings) -> None:
        self._settings = settings
        self._name = secrets.token_hex(8)
        """Name of this process. It stays the same when the process connects again."""
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._end: int | None = None
        """Exit code, once the engine has left."""
        self._last_state = ""

    async def run(self) -> int:
        """Serve until the engine has left; the exit code: 0 it was removed, 78 it was refused, 75
        the service could not be reached."""
        settings = self._settings
        key = {"Authorization": f"Bearer {settings.token}"}
        engine_key = {"Authorization": f"Bearer {settings.engine_key}"}
        async with (
            # trust_env false: the tokens must not be sent to a proxy.
            aiohttp.ClientSession(headers=key, trust_env=False) as service,
            aiohttp.ClientSession(
                headers=engine_key if settings.engine_key else {},
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                trust_env=False,
            ) as engine,
        ):
            self._engine = engine
            self._versions = FetchedVersions(service, settings.api, settings.staging)
            try:
                return await self._connect_repeatedly(service)
            finally:
                for task in self._requests.values():
                    task.cancel()
                await asyncio.gather(*self._requests.values(), return_exceptions=True)
                self._versions.remove()

    async def _connect_repeatedly(self, service: aiohttp.ClientSession) -> int:
        loop = asyncio.get_running_loop()
        pause_s, connected_at = _FIRST_PAUSE_S, loop.time()
        while True:
            began = loop.time()
            try:
                await self._serve(service)
                connected_at = loop.time()
            except aiohttp.WSServerHandshakeError as error:
                if error.status in (400, 401, 403, 404):
                    raise ConfigError(
                        f"--api {self._settings.api}: the service answers {error.status}; check "
                        "the address, and the token of --token-file, which may be revoked"
                    ) from error
                self._say(f"the service answers {error.status}")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self._say(f"the service cannot be reached: {error}")
            except (ValueError, KeyError) as error:
                self._say(f"the service sent a message that this release cannot read: {error}")
            if self._end is not None:
                return self._end
            if loop.time() - connected_at > self._settings.wait_s:
                self._say(f"no service for {self._settings.wait_s:g} s")
                return EXIT_RETRY
            if loop.time() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    async def _serve(self, service: aiohttp.ClientSession) -> None:
        """Serve over one connection, until it ends."""
        query = urlencode({"member": self._name, "url": self._settings.engine})
        url = f"{self._settings.api}/members/connect?{query}"
        async with service.ws_connect(
            url, heartbeat=relay.BEAT_S, max_msg_size=relay.MAX_MESSAGE_BYTES
        ) as socket:
            self._say("connected")
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._receive(socket, relay.unpack(message.data))
        for task in self._requests.values():
            task.cancel()
        if self._end is None:
            self._say("disconnected")

    def _receive(self, socket: aiohttp.ClientWebSocketResponse, message: dict[str, Any]) -> None:
        kind, number = message["kind"], message.get("number", 0)
        if kind == relay.REQUEST:
            task = asyncio.create_task(self._answer(socket, number, message))
            self._requests[number] = task
            task.add_done_callback(lambda done: self._forget(number, done))
        elif kind == relay.CANCEL and number in self._requests:
            self._requests[number].cancel()
        elif kind == relay.STATE:
            self._say(str(message.get("text", "")))
        elif kind == relay.LEFT:
            reason, detail = message.get("reason", ""), message.get("detail", "")
            self._say(
                f"the engine has left: {reason} {detail}" if reason else "the engine has left"
            )
            self._end = EXIT_CONFIG if reason else EXIT_DONE

    def _forget(self, number: int, done: asyncio.Task[None]) -> None:
        # Each connection counts from 1, so that a later request may have the same number.
        if self._requests.get(number) is done:
            del self._requests[number]

    def _say(self, text: str) -> None:
        if text and text != self._last_state:
            self._last_state = text
            print(log_entry(text), file=sys.stderr, flush=True)

    async def _answer(
        self, socket: aiohttp.ClientWebSocketResponse, number: int, message: dict[str, Any]
    ) -> None:
        """Answer one request of the run."""
        with contextlib.suppress(ConnectionError):
            try:
                await self._send_reply(socket, number, message)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                text = f"the engine does not answer: {error!r}"
                await socket.send_bytes(relay.pack(kind=relay.ERROR, number=number, text=text))

    async def _send_reply(
        self, socket: aiohttp.ClientWebSocketResponse, number: int, message: dict[str, Any]
    ) -> None:
        method, path, body = message["method"], message["path"], message["body"]
        plain_path = path.partition("?")[0]
        if plain_path in (MEMBER_FILES, MEMBER_FETCH) or (method, plain_path) not in _ALLOWED:
            status, content = await self._answer_itself(plain_path, body)
            await self._send_whole(socket, number, status, content)
            return
        if plain_path == _UPDATE:
            try:
                body = await self._with_own_path(body)
            except (FetchError, ValueError, KeyError) as error:
                await self._send_whole(socket, number, 502, {"error": str(error)})
                return
        url = self._settings.engine + path
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Content-Type": _JSON}
        async with self._engine.request(
            method, url, data=body or None, headers=headers, timeout=timeout
        ) as reply:
            head = {"status": reply.status, "content_type": reply.content_type}
            await socket.send_bytes(relay.pack(kind=relay.HEAD, number=number, **head))
            async for data in reply.content.iter_any():
                await socket.send_bytes(relay.pack(kind=relay.DATA, number=number, data=data))
        await socket.send_bytes(relay.pack(kind=relay.END, number=number))

    async def _send_whole(
        self, socket: aiohttp.ClientWebSocketResponse, number: int, status: int, content: Any
    ) -> None:
        head = {"status": status, "content_type": _JSON}
        await socket.send_bytes(relay.pack(kind=relay.HEAD, number=number, **head))
        data = orjson.dumps(content)
        await socket.send_bytes(relay.pack(kind=relay.DATA, number=number, data=data))
        await socket.send_bytes(relay.pack(kind=relay.END, number=number))

    async def _answer_itself(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and content of the answer to a request for this process."""
        try:
            if path == MEMBER_FILES:
                return 200, await self._describe_engine()
            if path == MEMBER_FETCH:
                folder = await self._versions.get(str(orjson.loads(body)["version"]))
                return 200, {"path": str(folder)}
        except (FetchError, OSError, ValueError, KeyError) as error:
            return 502, {"error": str(error)}
        return 403, {"error": f"{path}: not allowed"}

    async def _describe_engine(self) -> Any:
        """Files of the model with which the engine was started."""
        timeout = aiohttp.ClientTimeout(total=_ENGINE_S)
        url = f"{self._settings.engine}/server_info"
        async with self._engine.get(url, timeout=timeout) as reply:
            reply.raise_for_status()
            model = Path(str((await reply.json())["model_path"]))
        return await asyncio.to_thread(describe_model, model)

    async def _with_own_path(self, body: bytes) -> bytes:
        """Body of an update whose path is the folder of the version on this node."""
        content = orjson.loads(body)
        folder = await self._versions.get(content["weight_version"])
        return orjson.dumps({**content, "model_path": str(folder)})


def main(
    engine: str, api: str, token_file: str, engine_key_file: str, staging: str, wait_s: float
) -> int:
    """Connect an engine to a run until it has left. Returns the exit code."""
    for name, url in (("ENGINE_URL", engine), ("--api", api)):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{name}: found {url!r:.200}, allowed: http://HOST:PORT or https://")
    if not Path(staging).is_dir():
        raise ConfigError(f"--staging: {staging} is no folder; name one that the engine can read")
    settings = JoinSettings(
        engine=engine.rstrip("/"),
        api=api.rstrip("/"),
        token=_read_secret("--token-file", token_file),
        engine_key=_read_secret("--engine-key-file", engine_key_file) if engine_key_file else "",
        staging=Path(staging),
        wait_s=wait_s,
    )
    return asyncio.run(EngineMember(settings).run())


def _read_secret(option: str, path: str) -> str:
    text = read_regular(Path(path), _MAX_KEY_BYTES).decode(errors="replace").strip()
    if not text:
        raise ConfigError(f"{option}: {path} is empty, expected a token")
    return text
