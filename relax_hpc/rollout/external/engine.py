"""`Engine` of a server that another program started. It is never started or ended here."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.queue.storage.media import read_placeholders
from relax_hpc.rollout.engines.engine import (
    EngineFault,
    FaultReason,
    GenerateRequest,
    Generation,
    PromptScores,
)
from relax_hpc.rollout.engines.sglang.client import SglangClient
from relax_hpc.rollout.engines.sglang.engine import (
    SAVED_INTERVAL_TOKENS,
    SIGN_OF_LIFE_TOKENS,
)
from relax_hpc.rollout.external import MEMBER_FETCH, MEMBER_FILES, preflight
from relax_hpc.rollout.external.preflight import JoinRefused, RequiredFlags
from relax_hpc.rollout.external.shared_versions import SharedVersions
from relax_hpc.training.models.families import route_shape_of_model

CONNECTING, HEALTH_CHECKING, PREFLIGHT = "CONNECTING", "HEALTH_CHECKING", "PREFLIGHT"
WEIGHT_SYNCING = "WEIGHT_SYNCING"
"""Phases of an engine that joins, the last one when it loads its first version."""
_FIRST_ANSWER_S = 10.0
"""Seconds for the answers to the first requests, without one that generates a token."""
_MISSED_BEATS = 2
"""Heartbeat requests in a row without an answer after which an engine is lost."""
_LOADER = "auto"
"""SGLang's own loader. A server of another program does not have the run's loader."""
_UNAUTHORIZED, _FORBIDDEN, _SERVER_ERROR = 401, 403, 500


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalAddress:
    """Address of the server of an external engine."""

    number: int
    """Number of the engine in its group, from 1000 on. Never used for another engine."""
    url: str
    key: str = ""
    """API key of the server; empty: it has none."""
    has_member: bool = False
    """Whether a member process next to the engine relays its requests, see
    `relax_hpc.service.join`."""


class RemoteEngine:
    """`Engine` with a server at an `ExternalAddress`."""

    name = "external engine"

    def __init__(
        self,
        config: Config,
        address: ExternalAddress,
        model_dir: Path,
        version: Version,
        shared: SharedVersions,
    ) -> None:
        self._config, self._address, self._model_dir = config, address, model_dir
        self._version, self._shared = version, shared
        self.phase = CONNECTING
        self.pause_s = 0.0
        self.seed: int | None = None
        """Seed of the server, once it is known."""
        self.taken_seeds: frozenset[int] = frozenset()
        """Seeds of other engines, which this one may not have."""
        self._client = self._make_client(data_ranks=1)
        self.loss_reason: FaultReason = "dead"
        """Reason of the loss that `wait_dead` describes."""
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._beating: asyncio.Task[None] | None = None
        self._given = set[int]()
        """Codes of all versions that the engine was given."""
        self._is_updating = False

    def _make_client(self, data_ranks: int) -> SglangClient:
        rollout = self._config.rollout
        # The flags of the configuration are those of the run's own servers.
        settings = replace(rollout.engine, flags={"dp_size": data_ranks})
        return SglangClient(
            self._address.url,
            self._address.key,
            settings,
            self._version,
            rollout.partial_rollout,
            rollout.groups_per_request * self._config.samples_per_prompt,
            route_shape_of_model(self._model_dir, self._config.model),
            load_format=_LOADER,
            vocabulary=preflight.vocabulary_size(self._model_dir),
        )

    async def start(self) -> None:
        """Connect, and compare the server with the run. EngineFault: it may work later.
        JoinRefused: it may not join."""
        self.phase = CONNECTING
        await self._check_is_engine()
        self.phase = HEALTH_CHECKING
        if not await self._client.healthy():
            raise EngineFault("connection", f"{self._address.url}: /health gave no answer")
        self.phase = PREFLIGHT
        info = await self._client.server_info(_FIRST_ANSWER_S)
        seed = info.get("random_seed")
        self.seed = seed if isinstance(seed, int) else None
        await self._check_files(str(info.get("model_path")))
        preflight.check_flags(info, self._required_flags())
        data_ranks = info.get("dp_size")
        if isinstance(data_ranks, int) and data_ranks > 1:
            await self._client.close()
            self._client = self._make_client(data_ranks)
        self._beating = asyncio.create_task(self._beat())

    async def _check_is_engine(self) -> None:
        url = self._address.url
        try:
            info = await self._client.model_info(_FIRST_ANSWER_S)
        except EngineFault as fault:
            if fault.status in (_UNAUTHORIZED, _FORBIDDEN):
                raise JoinRefused(
                    "unauthorized", f"{url}: {fault.status}; check rollout.external.key_file"
                ) from fault
            if fault.reason == "http_error" and fault.status < _SERVER_ERROR:
                raise JoinRefused(
                    preflight.NOT_AN_ENGINE, f"{url} is no SGLang server: {fault}"
                ) from fault
            raise
        if "weight_version" not in info or not info.get("is_generation"):
            raise JoinRefused(
                preflight.NOT_AN_ENGINE,
                f"{url}: /model_info describes no model that generates text",
            )

    async def _check_files(self, model_path: str) -> None:
        """JoinRefused unless the engine was started from the files of the run's model."""
        if read_placeholders(self._model_dir):
            raise JoinRefused(
                preflight.FLAGS_MISSING,
                "the run's prompts may have media, which only its own servers read",
            )
        expected = await asyncio.to_thread(preflight.describe_model, self._model_dir)
        if self._address.has_member:
            found = await self._client.ask(MEMBER_FILES, None, _FIRST_ANSWER_S)
        else:
            try:
                found = await asyncio.to_thread(preflight.describe_model, Path(model_path))
            except (OSError, ValueError) as error:
                raise JoinRefused(preflight.MODEL_MISMATCH, _unreadable(model_path)) from error
            if not found:
                raise JoinRefused(preflight.MODEL_MISMATCH, _unreadable(model_path))
        preflight.check_files(found, expected, model_path)

    def _required_flags(self) -> RequiredFlags:
        rollout = self._config.rollout
        saves_tokens = rollout.save_partial == "tokens"
        return RequiredFlags(
            dtype=rollout.engine.dtype or self._config.model.dtype,
            max_stream_interval=SAVED_INTERVAL_TOKENS if saves_tokens else SIGN_OF_LIFE_TOKENS,
            forbids_cache=rollout.partial_rollout == "recompute",
            returns_routes=self._config.model.routing_replay != "off",
            taken_seeds=self.taken_seeds,
            min_context_tokens=self._config.data.max_prompt_tokens + rollout.max_new_tokens,
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`. EngineFault: another program has changed the weights."""
        draft = request.draft
        drafted = set(draft.token_versions) if draft else set()
        generation = await self._client.generate(request)
        unknown = set(generation.token_versions.tolist()) - drafted - self._given
        if unknown:
            if draft:
                # The tokens must not be stored in the log of the attempt.
                draft.ended = None
            names = ", ".join(str(Version.decode(code)) for code in sorted(unknown))
            raise EngineFault("unknown_version", f"found tokens of {names}, which it was not given")
        return generation

    async def score(self, prompts: Sequence[Sequence[int]]) -> PromptScores:
        """See `PromptScorer`."""
        return await self._client.score(prompts)

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`."""
        self._is_updating = True
        self._given.add(version.encode())
        try:
            async with contextlib.AsyncExitStack() as stack:
                has_member = self._address.has_member
                # In a thread, because a name server may not answer for long.
                if has_member or not await asyncio.to_thread(is_local, self._address.url):
                    published = self._shared.published(directory, version)
                    directory = await stack.enter_async_context(published)
                if has_member:
                    # Before the update, during which responses pause.
                    limit_s = self._config.weights.read_timeout_s + 4 * read_seconds(directory)
                    await self._client.ask(MEMBER_FETCH, {"version": str(version)}, limit_s)
                await self._client.update_weights(directory, version)
            self._version, self.pause_s = version, self._client.pause_s
        except OSError as error:
            raise EngineFault("update_failed", f"{version}: {error}") from error
        finally:
            self._is_updating = False

    async def release(self) -> None:
        """Raise an EngineFault: the memory of an external engine is not the run's."""
        raise EngineFault("unsupported", "an external engine does not release memory")

    async def wait_dead(self) -> str:
        """Return the reason when the server does not answer heartbeats any more."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Close the connections to the server, which continues to run."""
        if self._beating:
            self._beating.cancel()
        await self._client.close()

    async def _beat(self) -> None:
        """Ask the server for its version until it is lost."""
        settings, missed = self._config.rollout.external, 0
        reason = ""
        while missed < _MISSED_BEATS:
            await asyncio.sleep(settings.heartbeat_s)
            version = self._version
            try:
                info = await self._client.model_info(settings.heartbeat_timeout_s)
            except EngineFault as fault:
                missed, reason = missed + 1, str(fault)
                continue
            missed = 0
            if version == self._version and not self._is_updating:
                reason = self._version_fault(info)
                if reason:
                    self.loss_reason = "unknown_version"
                    break
        with contextlib.suppress(asyncio.InvalidStateError):
            self._lost.set_result(reason)

    def _version_fault(self, info: dict[str, Any]) -> str:
        """Reason why the server is not used further: another program has changed its weights.
        Empty: it serves the version that it was given, or none yet."""
        served = info.get("weight_version")
        if self._version.number == self._version.incarnation == 0 or served == str(self._version):
            return ""
        return f"it serves {served}, and was given {self._version}"


def is_local(url: str) -> bool:
    """Whether the host of ``url`` is this node.

    >>> is_local("http://127.0.0.1:30000")
    True
    """
    host = urlsplit(url).hostname or ""
    try:
        entries = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        # getaddrinfo raises UnicodeError if a label of the name is too long.
        return False
    own = {item.address for item in chain.from_iterable(psutil.net_if_addrs().values())}
    addresses = {str(entry[4][0]) for entry in entries}
    return any(ipaddress.ip_address(a).is_loopback or a in own for a in addresses)


def _unreadable(model_path: str) -> str:
    return (
        f"the engine's model directory {model_path} cannot be read on this node; start the engine "
        "on the run's filesystem, or use relax-hpc join"
    )
