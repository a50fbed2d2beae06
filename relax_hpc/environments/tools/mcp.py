"""Client for servers of the Model Context Protocol (MCP) with the stdio transport: each server is a
process, whose tools the policy may call.

Each process of environments starts a server at its first call, and all its episodes share it. If
the server dies or hangs, it is restarted and the request is sent again, twice at most. Then the
episode fails. A server that answers neither a request nor a ping counts as hanging.
https://modelcontextprotocol.io/specification, revision 2025-06-18.

The official package (mcp 2.3.0, which the locks' anyio, pydantic and starlette allow) does not
replace this client, because its `stdio_client`
- reads a line of a server without a limit; here a message has at most 64 MiB (`_MAX_LINE_BYTES`);
- starts the server in a new session, so that a hanging server survives when the process group of
  its environments is killed;
- logs a message that is not JSON-RPC with its foreign text and a traceback.
With another transport the package would save some twenty lines of JSON-RPC, for eight more packages
in the lock.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import IO, Any, Literal

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.last_error import find_last_error
from relax_hpc.environments.base import EnvironmentFault, FaultReason, MediaPart, Observation
from relax_hpc.environments.plain_values import clean_texts
from relax_hpc.environments.tool_calls import ToolError
from relax_hpc.environments.tools.base import Tool
from relax_hpc.net.workers.process import ATTEMPTS

REVISION = "2025-06-18"
_MAX_LINE_BYTES = 1 << 26
"""Maximum size of a message, which is one line."""
_ERRORS_BYTES, _ERRORS_S = 1 << 14, 1.0
"""Number of bytes of standard error that are stored, and seconds to wait for its end after the
server has ended."""
_MAX_PAGES = 1000
"""Maximum number of pages of a list of tools. A server could send pages endlessly."""
_START_S = 60.0
"""Seconds for the start of a server, whose program may be on a shared filesystem."""
_PING_S = 5.0
"""Seconds to wait for the answer to a ping."""
_END_S = 5.0
"""Seconds to wait for the end of a killed server's output. A process that it has started may keep
the output open."""
_NO_SUCH_METHOD = -32601
_INHERITED = re.compile(
    "HOME|LOGNAME|PATH|SHELL|TERM|USER|TMPDIR|TZ|LANG|LC_.*|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX"
    "|(?i:https?_proxy|all_proxy|no_proxy)|SSL_CERT_(FILE|DIR)"
)
"""Environment variables that a server gets: those that the official SDKs pass on, and those that
programs of a site need. Other variables may be secrets of the user."""
_HAS_ENDED = "the tool's server has ended"
_MEDIA: dict[str, Literal["image", "audio"]] = {"image": "image", "audio": "audio"}
"""First part of a MIME type -> kind of a medium."""
Json = dict[str, Any]


class ServerDied(ToolError):
    """The server's process has ended."""


class ServerBroken(ServerDied):
    """The server's process has exited during its start, and not because of a signal."""


class NoAnswer(ToolError):
    """The server has not answered in time."""


class ServerHung(ToolError):
    """The server has answered neither a request nor a ping."""


class McpTool(Tool):
    """One tool of a server. The server checks the arguments."""

    def __init__(self, name: str, server: Server) -> None:
        self.name, self._server = name, server

    def called(self, arguments: Mapping[str, Any]) -> Observation:
        """Answer of the server. ToolError: the call failed, or took too long. EnvironmentFault: see
        `Server.ask`."""
        result = self._server.ask("tools/call", {"name": self.name, "arguments": dict(arguments)})
        pieces = [_read_content(item) for item in result.get("content") or []]
        if not pieces and result.get("structuredContent") is not None:
            pieces = [json.dumps(result["structuredContent"], ensure_ascii=False)]
        text = "\n".join(piece for piece in pieces if isinstance(piece, str))
        if result.get("isError"):
            raise ToolError(text or f"{self.name} has failed")
        return Observation(text, tuple(piece for piece in pieces if isinstance(piece, MediaPart)))

    def close(self) -> None:
        """End the server, and with it all its tools. It also ends when the process of environments
        ends."""
        self._server.close()

    @property
    def signature(self) -> Json:
        """Signature of the tool from the server's description. ConfigError: the server does not
        describe the tool, or cannot be started. RelaxError: the server has died."""
        try:
            return self._read_signature()
        except ToolError as error:
            raise ConfigError(f"environment.options.tools.mcp: {self.name}: {error}") from error
        except EnvironmentFault as fault:
            kind = ConfigError if isinstance(fault.__cause__, ServerBroken) else RelaxError
            raise kind(f"environment.options.tools.mcp: {self.name}: {fault.__cause__}") from fault

    def _read_signature(self) -> Json:
        for tool in self._server.tools():
            if tool.get("name") == self.name:
                function = {
                    "name": self.name,
                    "description": tool.get("description", ""),
                    "parameters": tool.get("inputSchema", {}),
                }
                return {"type": "function", "function": function}
        raise ToolError(f"the server has no tool {self.name}")


def mcp_tools(servers: Mapping[str, Mapping[str, Any]]) -> list[McpTool]:
    """Tools of ``servers``: name -> `{command: [...], tools: [...], env: {...}, inherit: [...],
    timeout_s: 30}`. The policy may call the ``tools``. ConfigError: a description is invalid."""
    tools: list[McpTool] = []
    for name, description in servers.items():
        tools += _server_tools(name, description)
    return tools


def _server_tools(name: str, description: Mapping[str, Any]) -> list[McpTool]:
    try:
        options = {key: value for key, value in description.items() if key != "tools"}
        tools, server = list(description["tools"]), Server(**options)
    except (KeyError, TypeError) as error:
        allowed = (
            "command (a list), tools (a list of names), env, inherit (a list of variables), "
            "timeout_s"
        )
        raise ConfigError(
            f"environment.options.tools.mcp.servers.{name}: {error}; allowed: {allowed}"
        ) from error
    return [McpTool(tool, server) for tool in tools]


class Server:
    """A server. Any number of threads may send requests concurrently."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        inherit: Sequence[str] = (),
    ) -> None:
        """``env``: environment variables of the server. ``inherit``: names of variables that it
        inherits from this process, in addition to _INHERITED."""
        if isinstance(inherit, str):
            raise TypeError(f"inherit: found {inherit!r}, allowed: a list of names")
        self._command, self._timeout_s = list(command), float(timeout_s)
        names = {name for name in os.environ if name in inherit or _INHERITED.fullmatch(name)}
        self._env = {name: os.environ[name] for name in sorted(names)} | dict(env or {})
        self._lock = threading.Lock()
        self._connection: ServerProcess | None = None

    def ask(self, method: str, parameters: Json) -> Json:
        """The result of a request. ToolError: the server refuses the request, or takes too long.
        EnvironmentFault: the server died or hung in each attempt."""
        failure: ToolError = ServerDied(_HAS_ENDED)
        for _ in range(ATTEMPTS):
            try:
                return self._ask_once(method, parameters)
            except (ServerDied, ServerHung) as error:
                failure = error
        reason: FaultReason = "environment_died"
        if isinstance(failure, ServerHung):
            reason = "environment_timeout"
        raise EnvironmentFault(reason, f"{failure}, {ATTEMPTS} times") from failure

    def _ask_once(self, method: str, parameters: Json) -> Json:
        """The result of a request. ToolError: see `ask`. ServerDied, ServerHung: the process of the
        server has ended."""
        connection = self._connect()
        try:
            return connection.ask(method, parameters, self._timeout_s)
        except ServerDied:
            connection.close()
            raise
        except NoAnswer as error:
            if connection.answers_ping(min(_PING_S, self._timeout_s)):
                raise
            connection.close()
            raise ServerHung(f"{error}, nor to a ping") from error

    def tools(self) -> list[Json]:
        """Descriptions of all tools. ToolError: the server refuses the request, or sends too many
        pages. EnvironmentFault: see `ask`."""
        tools: list[Json] = []
        cursor: Json = {}
        for _ in range(_MAX_PAGES):
            page = self.ask("tools/list", cursor)
            tools += page.get("tools", [])
            if not page.get("nextCursor"):
                return tools
            cursor = {"cursor": page["nextCursor"]}
        raise ToolError(f"the tool's server lists its tools on more than {_MAX_PAGES} pages")

    def close(self) -> None:
        """End the process; the next call starts it again."""
        with self._lock:
            if self._connection:
                self._connection.close()

    def _connect(self) -> ServerProcess:
        """The process of the server, started and initialized. ToolError: it cannot be started."""
        with self._lock:
            if self._connection is None or self._connection.has_ended:
                self._connection = ServerProcess(self._command, self._env)
                self._initialize(self._connection)
            return self._connection

    def _initialize(self, connection: ServerProcess) -> None:
        client = {"name": "relax_hpc", "version": "1"}
        parameters = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": client}
        try:
            connection.ask("initialize", parameters, max(_START_S, self._timeout_s))
            connection.send({"method": "notifications/initialized"})
        except (NoAnswer, ServerDied) as error:
            connection.close()
            text = connection.read_error() or str(error)
            kind = ServerBroken if connection.has_exited else ServerDied
            raise kind(f"the tool's server cannot be started: {text}") from error
        except ToolError:
            # The server refuses. It is ended, so that no request goes to a server that is not
            # initialized.
            connection.close()
            raise


class ServerProcess:
    """The process of a server, with the requests that wait for its answers."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """ToolError: the program does not exist."""
        try:
            # In the same process group, so that it is killed together with this process.
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise ToolError(f"the tool's server cannot be started: {error}") from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        os.set_blocking(self._process.stdin.fileno(), False)
        self._numbers = itertools.count(1)
        self._requests: dict[int, Future[Json]] = {}
        self._write_lock = threading.Lock()
        self.has_ended = False
        self._reader = threading.Thread(
            target=self._read_messages, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()
        self._errors = bytearray()
        self._error_copier = threading.Thread(
            target=self._copy_errors, args=(self._process.stderr,), daemon=True
        )
        self._error_copier.start()

    def read_error(self) -> str:
        """The exception that has ended the server, or the last line of its standard error; empty if
        it is still running, or has printed nothing there."""
        if not self.has_ended:
            return ""
        self._error_copier.join(_ERRORS_S)
        text = self._errors.decode(errors="replace").rstrip()
        return find_last_error(text).text or text.rpartition("\n")[2]

    def ask(self, method: str, parameters: Json, limit_s: float) -> Json:
        """The result of a request. NoAnswer: not within ``limit_s``. ServerDied: the process has
        ended. ToolError: the server refuses."""
        number, answer = next(self._numbers), Future[Json]()
        self._requests[number] = answer
        # The process may have ended before the request was registered.
        if self.has_ended:
            self._fail_requests()
        try:
            self.send({"id": number, "method": method, "params": parameters}, limit_s)
            return answer.result(limit_s)
        except FutureTimeoutError:
            raise NoAnswer(f"no answer in {limit_s:g} s") from None
        finally:
            self._requests.pop(number, None)

    @property
    def has_exited(self) -> bool:
        """Whether the process has exited, and not because of a signal."""
        code = self._process.poll()
        return code is not None and code >= 0

    def answers_ping(self, limit_s: float) -> bool:
        """Whether the server answers a ping; an error also counts as an answer."""
        try:
            self.ask("ping", {}, limit_s)
        except (NoAnswer, ServerDied):
            return False
        except ToolError:
            pass
        return True

    def send(self, message: Json, limit_s: float = _PING_S) -> None:
        """Send a message. NoAnswer: the server did not read it within ``limit_s``. ServerDied: the
        process has ended."""
        line = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        if not self._write_lock.acquire(timeout=limit_s):
            raise NoAnswer(f"not read in {limit_s:g} s")
        try:
            self._write(line, time.monotonic() + limit_s)
        except OSError:
            raise ServerDied(_HAS_ENDED) from None
        finally:
            self._write_lock.release()

    def _write(self, line: bytes, deadline_s: float) -> None:
        """Write ``line`` to the server's standard input, which is non-blocking. OSError: the
        process has ended."""
        assert self._process.stdin
        while line:
            try:
                line = line[os.write(self._process.stdin.fileno(), line) :]
            except BlockingIOError:
                left_ms = 1000 * (deadline_s - time.monotonic())
                poll = select.poll()
                poll.register(self._process.stdin, select.POLLOUT)
                if left_ms <= 0 or not poll.poll(left_ms):
                    # The server may have read a part of the line, so that no other line can follow.
                    self._process.kill()
                    raise NoAnswer("the tool's server does not read its input") from None

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        self.has_ended = True
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._reader.join(_END_S)
        self._fail_requests()

    def _read_messages(self, lines: IO[bytes]) -> None:
        while line := lines.readline(_MAX_LINE_BYTES):
            try:
                self._handle(clean_texts(json.loads(line)))
            except (ValueError, TypeError, LookupError, RecursionError, AttributeError, ToolError):
                # Some servers print other text to their standard output. It is ignored.
                continue
        self.has_ended = True
        self._process.kill()
        self._process.wait()
        self._fail_requests()

    def _fail_requests(self) -> None:
        for number in list(self._requests):
            # Another thread may have removed the request.
            answer = self._requests.pop(number, None)
            if answer:
                answer.set_exception(ServerDied(_HAS_ENDED))

    def _copy_errors(self, errors: IO[bytes]) -> None:
        """Copy the server's standard error to that of this process, and store its end."""
        while block := errors.readline(_ERRORS_BYTES):
            # It is written to the log of the role. A full disk must not stop the server.
            with contextlib.suppress(OSError):
                os.write(2, block)
            self._errors += block
            del self._errors[:-_ERRORS_BYTES]

    def _handle(self, message: Json) -> None:
        """Answer a request of the server, or store the server's answer to a request."""
        if "method" in message:
            if "id" in message:
                reply: Json = {"error": {"code": _NO_SUCH_METHOD, "message": "not offered"}}
                if message["method"] == "ping":
                    reply = {"result": {}}
                self.send({"id": message["id"], **reply})
            return
        answer = self._requests.pop(message["id"], None)
        if not answer:
            return
        error, result = message.get("error"), message.get("result")
        if error is not None:
            text = error.get("message") if isinstance(error, dict) else error
            answer.set_exception(ToolError(str(text)))
        elif isinstance(result, dict):
            answer.set_result(result)
        else:
            answer.set_exception(ToolError("the tool's server gave a result that is no object"))


def _read_content(item: Any) -> str | MediaPart:
    """An item of a result's content for the policy: a text or a medium. For any other item, a text
    in brackets describes it.

    ToolError: the item is malformed.
    """
    try:
        match item["type"]:
            case "text":
                return str(item["text"])
            case "image" | "audio" as kind:
                return MediaPart(kind, base64.b64decode(item["data"], validate=True))
            case "resource":
                return _read_resource(item["resource"])
            case "resource_link":
                details = [item.get(name) for name in ("name", "mimeType", "description")]
                shown = ", ".join(str(detail) for detail in details if detail)
                return f"[resource {item['uri']}: {shown}]"
            case kind:
                return f"[{kind}, which cannot be shown]"
    except (LookupError, TypeError, ValueError) as error:
        raise ToolError(f"the tool's server gave a malformed part of a result: {error}") from error


def _read_resource(resource: Mapping[str, Any]) -> str | MediaPart:
    uri, kind = resource["uri"], str(resource.get("mimeType") or "no type")
    if "text" in resource:
        return f"[resource {uri}]\n{resource['text']}"
    content = base64.b64decode(resource["blob"], validate=True)
    medium = _MEDIA.get(kind.partition("/")[0])
    if medium:
        return MediaPart(medium, content)
    return f"[resource {uri}: {len(content)} bytes of {kind}, which cannot be shown]"
