"""Tools of servers that speak the Model Context Protocol by their standard input and output, each a
process of its own.

A server is started at its first call, in each process of environments, whose episodes share it. If
it dies or hangs, it is started again and the request is sent again, twice at most; then the episode
fails. A server hangs if it does not answer a ping either.
https://modelcontextprotocol.io/specification, revision 2025-06-18.

The official package (mcp 2.3.0, which the locks' anyio, pydantic and starlette allow) does not
replace
this client, because its `stdio_client`
- collects a line of a server without a limit; here a message has at most 64 MiB (`_MOST_LINE`);
- starts the server in a session of its own, so that a server that hangs outlives the kill of the
  process group of its environments;
- logs a message that is no JSON-RPC with its foreign text and a traceback.
With a transport of ours it would save some twenty lines of JSON-RPC, for eight more packages in the
lock.
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
from concurrent.futures import TimeoutError as Late
from typing import IO, Any

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.last_error import find_last_error
from relax_hpc.environments.base import EnvironmentFault, MediaPart, Observation
from relax_hpc.environments.plain_values import clean_texts
from relax_hpc.environments.tool_calls import ToolError
from relax_hpc.environments.tools.base import Tool
from relax_hpc.net.workers.process import ATTEMPTS

REVISION = "2025-06-18"
_MOST_LINE = 1 << 26
"""Bytes of a message, which is a line, at most."""
_ERRORS_BYTES, _ERRORS_S = 1 << 14, 1.0
"""Bytes of standard error that are kept, and seconds for its end after that of the server."""
_MOST_PAGES = 1000
"""Pages of a list of tools at most; a server could send pages without end."""
_START_S = 60.0
"""Seconds for a server to start, which may be read from a shared filesystem."""
_PING_S = 5.0
"""Seconds for the answer to a ping."""
_END_S = 5.0
"""Seconds for the output of a killed server to end. A process that it has started may keep it
open."""
_NO_SUCH_METHOD = -32601
_INHERITED = re.compile(
    "HOME|LOGNAME|PATH|SHELL|TERM|USER|TMPDIR|TZ|LANG|LC_.*|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX"
    "|(?i:https?_proxy|all_proxy|no_proxy)|SSL_CERT_(FILE|DIR)"
)
"""Environment variables that a server gets: those of the protocol's own SDKs, and those by which
programs of a site are found. Others may be secrets of the user."""
_HAS_ENDED = "the tool's server has ended"
Json = dict[str, Any]


class ServerDied(ToolError):
    """The server's process has ended."""


class ServerBroken(ServerDied):
    """The server's process has exited while it started, and no signal has killed it."""


class NoAnswer(ToolError):
    """The server has not answered in time."""


class ServerHung(ToolError):
    """The server has answered neither a request nor a ping."""


class McpTool(Tool):
    """One tool of a server, which checks arguments by itself."""

    def __init__(self, name: str, server: Server) -> None:
        self.name, self._server = name, server

    def called(self, arguments: Mapping[str, Any]) -> Observation:
        """Answer of the server. ToolError: it says that the call failed, or takes too long for it.
        EnvironmentFault: as `Server.ask`."""
        result = self._server.ask("tools/call", {"name": self.name, "arguments": dict(arguments)})
        pieces = [_read_content(item) for item in result.get("content") or []]
        if not pieces and result.get("structuredContent") is not None:
            pieces = [json.dumps(result["structuredContent"], ensure_ascii=False)]
        text = "\n".join(piece for piece in pieces if isinstance(piece, str))
        if result.get("isError"):
            raise ToolError(text or f"{self.name} has failed")
        return Observation(text, tuple(piece for piece in pieces if isinstance(piece, MediaPart)))

    def close(self) -> None:
        """End the server, with all its tools. A process of environments ends it with itself."""
        self._server.close()

    @property
    def signature(self) -> Json:
        """The tool as the server describes it. ConfigError: it does not, or cannot be started.
        RelaxError: it has died."""
        try:
            return self._described()
        except ToolError as error:
            raise ConfigError(f"environment.options.tools.mcp: {self.name}: {error}") from error
        except EnvironmentFault as fault:
            kind = ConfigError if isinstance(fault.__cause__, ServerBroken) else RelaxError
            raise kind(f"environment.options.tools.mcp: {self.name}: {fault.__cause__}") from fault

    def _described(self) -> Json:
        for tool in self._server.tools():
            if tool.get("name") == self.name:
                about = {
                    "description": tool.get("description", ""),
                    "parameters": tool.get("inputSchema", {}),
                }
                return {"type": "function", "function": {"name": self.name, **about}}
        raise ToolError(f"the server has no tool {self.name}")


def mcp_tools(servers: Mapping[str, Mapping[str, Any]]) -> list[McpTool]:
    """Tools of servers by their names: `{command: [...], tools: [...], env: {...}, inherit: [...],
    timeout_s: 30}`, of which ``tools`` are those that the policy may call. ConfigError: that is not
    how a server is described."""
    return [
        McpTool(tool, server)
        for name, about in servers.items()
        for tool, server in _of(name, about)
    ]


def _of(name: str, about: Mapping[str, Any]) -> list[tuple[str, Server]]:
    try:
        tools, server = (
            list(about["tools"]),
            Server(**{key: about[key] for key in about if key != "tools"}),
        )
    except (KeyError, TypeError) as error:
        allowed = (
            "command (a list), tools (a list of names), env, inherit (a list of variables), "
            "timeout_s"
        )
        raise ConfigError(
            f"environment.options.tools.mcp.servers.{name}: {error}; allowed: {allowed}"
        ) from error
    return [(tool, server) for tool in tools]


class Server:
    """A server, asked by any number of threads at a time."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        inherit: Sequence[str] = (),
    ) -> None:
        """``env``: variables of its environment; ``inherit``: names of those that it has from this
        process, beyond the usual ones."""
        if isinstance(inherit, str):
            raise TypeError(f"inherit: found {inherit!r}, allowed: a list of names")
        self._command, self._timeout_s = list(command), float(timeout_s)
        names = {name for name in os.environ if name in inherit or _INHERITED.fullmatch(name)}
        self._env = {name: os.environ[name] for name in sorted(names)} | dict(env or {})
        self._turn = threading.Lock()
        self._connection: Connection | None = None

    def ask(self, method: str, parameters: Json) -> Json:
        """The result of a request. ToolError: the server refuses it, or is slow. EnvironmentFault:
        the server has died, or hung, each time that the request was sent."""
        for _ in range(ATTEMPTS):
            try:
                return self._ask_once(method, parameters)
            except (ServerDied, ServerHung) as error:
                failure = error
        reason = "environment_timeout" if isinstance(failure, ServerHung) else "environment_died"
        raise EnvironmentFault(reason, f"{failure}, {ATTEMPTS} times") from failure

    def _ask_once(self, method: str, parameters: Json) -> Json:
        """The result of a request. ToolError: as `ask`. ServerDied, ServerHung: its process has
        ended."""
        connection = self._connected()
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
        """Descriptions of all its tools. ToolError: it gives none. EnvironmentFault: as `ask`."""
        tools, cursor = [], Json()
        for _ in range(_MOST_PAGES):
            page = self.ask("tools/list", cursor)
            tools += page.get("tools", [])
            if not page.get("nextCursor"):
                return tools
            cursor = {"cursor": page["nextCursor"]}
        raise ToolError(f"the tool's server lists its tools on more than {_MOST_PAGES} pages")

    def close(self) -> None:
        """End its process; the next call starts another."""
        with self._turn:
            if self._connection:
                self._connection.close()

    def _connected(self) -> Connection:
        with self._turn:
            if self._connection is None or self._connection.has_ended:
                self._connection = Connection(self._command, self._env)
                client = {"name": "relax_hpc", "version": "1"}
                about = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": client}
                try:
                    self._connection.ask("initialize", about, max(_START_S, self._timeout_s))
                    self._connection.tell({"method": "notifications/initialized"})
                except (NoAnswer, ServerDied) as error:
                    self._connection.close()
                    text = self._connection.read_error() or str(error)
                    kind = ServerBroken if self._connection.has_exited else ServerDied
                    raise kind(f"the tool's server cannot be started: {text}") from error
                except ToolError:
                    # It refuses. The next request must not go to a server that is not initialized.
                    self._connection.close()
                    raise
            return self._connection


class Connection:
    """A server's process."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """ToolError: there is no such program."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            # In the process group of this one, with which it is ended.
            self._process = subprocess.Popen(command, env=dict(env), **pipes)
        except OSError as error:
            raise ToolError(f"the tool's server cannot be started: {error}") from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        os.set_blocking(self._process.stdin.fileno(), False)
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Json]] = {}
        self._writing = threading.Lock()
        self.has_ended = False
        self._reading = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        )
        self._reading.start()
        self._errors = bytearray()
        self._copying = threading.Thread(
            target=self._copy_errors, args=(self._process.stderr,), daemon=True
        )
        self._copying.start()

    def read_error(self) -> str:
        """The exception that has ended the server, or the last line that it printed to standard
        error; empty if it still lives, or printed nothing."""
        if not self.has_ended:
            return ""
        self._copying.join(_ERRORS_S)
        text = self._errors.decode(errors="replace").rstrip()
        return find_last_error(text).text or text.rpartition("\n")[2]

    def ask(self, method: str, parameters: Json, limit_s: float) -> Json:
        """The result of a request. NoAnswer: not within ``limit_s``. ServerDied: the process has
        ended. ToolError: the server refuses."""
        number, answer = next(self._numbers), Future[Json]()
        self._asked[number] = answer
        if self.has_ended:
            self._fail_requests()
        try:
            self.tell({"id": number, "method": method, "params": parameters}, limit_s)
            return answer.result(limit_s)
        except Late:
            raise NoAnswer(f"no answer in {limit_s:g} s") from None
        finally:
            self._asked.pop(number, None)

    @property
    def has_exited(self) -> bool:
        """Whether the process has exited, and no signal has killed it."""
        code = self._process.poll()
        return code is not None and code >= 0

    def answers_ping(self, limit_s: float) -> bool:
        """Whether the server answers a ping, be it by an error."""
        try:
            self.ask("ping", {}, limit_s)
        except (NoAnswer, ServerDied):
            return False
        except ToolError:
            pass
        return True

    def tell(self, message: Json, limit_s: float = _PING_S) -> None:
        """Send a message. NoAnswer: the server did not read it in ``limit_s``. ServerDied: the
        process has ended."""
        line = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        if not self._writing.acquire(timeout=limit_s):
            raise NoAnswer(f"not read in {limit_s:g} s")
        try:
            self._write(line, time.monotonic() + limit_s)
        except OSError:
            raise ServerDied(_HAS_ENDED) from None
        finally:
            self._writing.release()

    def _write(self, line: bytes, deadline_s: float) -> None:
        """Write ``line`` to the server's standard input, which does not block. OSError: it has
        ended."""
        assert self._process.stdin
        while line:
            try:
                line = line[os.write(self._process.stdin.fileno(), line) :]
            except BlockingIOError:
                left_ms = 1000 * (deadline_s - time.monotonic())
                poll = select.poll()
                poll.register(self._process.stdin, select.POLLOUT)
                if left_ms <= 0 or not poll.poll(left_ms):
                    # It may have a part of the line, so it cannot be sent another one.
                    self._process.kill()
                    raise NoAnswer("the tool's server does not read its input") from None

    def close(self) -> None:
        """End the process, and wait until it is gone."""
        self.has_ended = True
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._reading.join(_END_S)
        self._fail_requests()

    def _read(self, lines: IO[bytes]) -> None:
        while line := lines.readline(_MOST_LINE):
            try:
                self._heard(clean_texts(json.loads(line)))
            except (ValueError, TypeError, LookupError, RecursionError, AttributeError, ToolError):
                # What is no message is a server's own affair.
                continue
        self.has_ended = True
        self._process.kill()
        self._process.wait()
        self._fail_requests()

    def _fail_requests(self) -> None:
        for number in list(self._asked):
            if answer := self._asked.pop(number, None):
                answer.set_exception(ServerDied(_HAS_ENDED))

    def _copy_errors(self, errors: IO[bytes]) -> None:
        """Copy the server's standard error to that of this process, and keep its end."""
        while block := errors.readline(_ERRORS_BYTES):
            # To the log of the role; a full disk must not stop the server.
            with contextlib.suppress(OSError):
                os.write(2, block)
            self._errors += block
            del self._errors[:-_ERRORS_BYTES]

    def _heard(self, message: Json) -> None:
        if "method" in message:
            if "id" in message:
                known = {"result": {}} if message["method"] == "ping" else None
                refused = {"error": {"code": _NO_SUCH_METHOD, "message": "not offered"}}
                self.tell({"id": message["id"], **(known or refused)})
        elif answer := self._asked.pop(message["id"], None):
            error, result = message.get("error"), message.get("result")
            if error is not None:
                text = error.get("message") if isinstance(error, dict) else error
                answer.set_exception(ToolError(str(text)))
            elif isinstance(result, dict):
                answer.set_result(result)
            else:
                answer.set_exception(ToolError("the tool's server gave a result that is no object"))


def _read_content(item: Any) -> str | MediaPart:
    """An item of a result's content as the policy reads it: a text, or a medium. Any other item is
    named in brackets.

    ToolError: it is malformed.
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
                return (
                    f"[resource {item['uri']}: "
                    f"{', '.join(str(detail) for detail in details if detail)}]"
                )
            case kind:
                return f"[{kind}, which cannot be shown]"
    except (LookupError, TypeError, ValueError) as error:
        raise ToolError(f"the tool's server gave a malformed part of a result: {error}") from error


def _read_resource(resource: Mapping[str, Any]) -> str | MediaPart:
    uri, kind = resource["uri"], str(resource.get("mimeType") or "no type")
    if "text" in resource:
        return f"[resource {uri}]\n{resource['text']}"
    content = base64.b64decode(resource["blob"], validate=True)
    if (medium := kind.partition("/")[0]) in ("image", "audio"):
        return MediaPart(medium, content)
    return f"[resource {uri}: {len(content)} bytes of {kind}, which cannot be shown]"
