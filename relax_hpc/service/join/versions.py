"""Versions of the weights that a member process fetches from the service of the run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import xxhash

from relax_hpc.base.rundir import private_folder
from relax_hpc.training.weights.version_files import LISTING

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERSION = re.compile(r"i\d{6}-v\d{6,7}")
_PREFIX = "relax-join"
_PIECE_BYTES = 1 << 20
_SILENCE_S = 30.0
"""Seconds without data after which a transfer is tried again from where it stopped."""
_TRIES = 5
_MAX_LISTING_BYTES = 16 << 20


class FetchError(Exception):
    """A version could not be fetched."""


class FetchedVersions:
    """Versions in a folder of this node, which the engine reads. For one event loop."""

    def __init__(self, session: aiohttp.ClientSession, api: str, staging: Path) -> None:
        """``session``: sends the member's token. ``api``: address of the service. ``staging``:
        folder that the engine can read, memory-backed if possible."""
        self._session, self._api = session, api
        sweep(staging)
        self.root = private_folder(staging / f"{_PREFIX}-{os.getuid()}-{os.getpid()}")
        self._fetching = asyncio.Lock()

    async def get(self, version: str) -> Path:
        """Folder of ``version``, fetched unless it is here. Older ones are removed. FetchError: it
        cannot be fetched, or it is damaged."""
        if not _VERSION.fullmatch(version):
            raise FetchError(f"version: found {version!r:.80}, allowed: as in i000001-v000123")
        target = self.root / version
        async with self._fetching:
            if not target.exists():
                await self._fetch(version, target)
                # The engine may still read the one before.
                for path in sorted(self.root.glob("i*-v*"))[:-2]:
                    shutil.rmtree(path, ignore_errors=True)
        return target

    def remove(self) -> None:
        """Remove all versions."""
        shutil.rmtree(self.root, ignore_errors=True)

    async def _fetch(self, version: str, target: Path) -> None:
        partial = self.root / f".{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            listing = await self._read_listing(version)
            for name, sums in listing.items():
                await self._fetch_file(f"{self._api}/versions/{version}/{name}", partial, sums)
            partial.rename(target)
        except OSError as error:
            raise FetchError(f"{version}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    async def _read_listing(self, version: str) -> dict[str, dict[str, Any]]:
        url = f"{self._api}/versions/{version}/{LISTING}"
        try:
            async with self._session.get(url) as reply:
                if reply.status != 200:
                    raise FetchError(f"{version}: the service answers {reply.status}")
                data = b""
                async for piece in reply.content.iter_chunked(_PIECE_BYTES):
                    data += piece
                    if len(data) > _MAX_LISTING_BYTES:
                        raise FetchError(f"{version}: {LISTING} is too large")
                return _parse_listing(data)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise FetchError(f"{version}: {error!r}") from error
        except ValueError as error:
            raise FetchError(f"{version}: {LISTING}: {error}") from error

    async def _fetch_file(self, url: str, folder: Path, sums: dict[str, Any]) -> None:
        """Fetch a file and compare it with ``sums``. A transfer that breaks off is continued."""
        name = url.rpartition("/")[2]
        state, size, failure = xxhash.xxh3_128(), 0, ""
        with (folder / name).open("wb") as file:
            for _ in range(_TRIES):
                try:
                    async for piece in self._pieces(url, size):
                        state.update(piece)
                        size += file.write(piece)
                        if size > sums["bytes"]:
                            break
                except (aiohttp.ClientError, TimeoutError) as error:
                    failure = repr(error)
                if size >= sums["bytes"]:
                    break
        if size != sums["bytes"] or state.hexdigest() != sums["xxh3_128"]:
            cause = failure or "its checksum differs"
            raise FetchError(f"{url}: {size} of {sums['bytes']} bytes: {cause}")

    async def _pieces(self, url: str, start: int) -> AsyncIterator[bytes]:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
        headers = {"Range": f"bytes={start}-"} if start else {}
        async with self._session.get(url, headers=headers, timeout=timeout) as reply:
            if reply.status != (206 if start else 200):
                raise FetchError(f"{url}: the service answers {reply.status}")
            async for piece in reply.content.iter_chunked(_PIECE_BYTES):
                yield piece


def _parse_listing(data: bytes) -> dict[str, dict[str, Any]]:
    """Sums by file name. ValueError: malformed, or a name that leaves the folder."""
    listing = json.loads(data)
    if not isinstance(listing, dict) or not listing:
        raise ValueError("it lists no files")
    for name, sums in listing.items():
        is_sums = isinstance(sums, dict) and isinstance(sums.get("bytes"), int)
        if not (_NAME.fullmatch(name) and is_sums and isinstance(sums.get("xxh3_128"), str)):
            raise ValueError(f"found {name!r:.80}, expected a file with its sums")
    return listing


def sweep(staging: Path) -> None:
    """Remove versions of members that were killed."""
    for folder in staging.glob(f"{_PREFIX}-{os.getuid()}-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)
