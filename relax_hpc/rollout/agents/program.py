"""The process of an agent program. It reads its task from standard input, gets the endpoint by
environment variables, and sends its result over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from relax_hpc.environments.plain_values import read_plain
from relax_hpc.net.rendezvous.process import clean_environment
from relax_hpc.rollout.agents import launcher

RESULT_FD = "RELAX_RESULT_FD"
"""Environment variable with the number of the descriptor for the result of a program, see
`launcher`."""
_MAX_RESULT_BYTES = 1 << 20
"""Most bytes of a result, and of the stored end of standard output."""
_MAX_ERROR_BYTES = 64 << 10
_BLOCK = 1 << 14
_FREE_BYTES, _PAUSE_S = 1 << 20, 0.02
"""Bytes of output that are read without pause, and seconds of pause after each further block. Only
the program waits then."""
_DRAIN_S = 1.0
"""Seconds to read the end of its output, after all of its processes were killed."""
_END_S = 20.0
"""Seconds for the launcher to kill all processes of a program."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender: `struct ucred` of unix(7)."""


class Program:
    """A running program with all processes that it starts; for one event loop."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        task: Mapping[str, Any],
        memory_bytes: int,
        pid_namespace: bool = True,
        secret: str = "",
    ) -> None:
        """``command``: words; no shell is used. ``variables``: environment variables in addition to
        those of this process. ``task``: its input, sent as one line of JSON. ``memory_bytes``: data
        limit of each of its processes. ``pid_namespace``: whether it gets one, if the kernel allows
        that. ``secret``: text that `***` replaces in its output and its result."""
        self._command, self._variables, self._task = command, variables, task
        self._memory_bytes, self._pid_namespace, self._secret = memory_bytes, pid_namespace, secret
        self._output, self._errors = _Tail(_MAX_RESULT_BYTES), _Tail(_MAX_ERROR_BYTES)
        self._result = _ResultChannel()
        self.no_namespace = ""
        """Reason why it has no PID namespace; empty: it has one."""

    async def run(self) -> int:
        """Run it. Returns its exit code, or minus the number of the signal that ended it. At the
        return all of its processes are dead, also if this call is cancelled.

        OSError: the program does not exist.
        """
        async with contextlib.AsyncExitStack() as ours:
            # The launcher inherits these ends, so they are closed in this process.
            with contextlib.ExitStack() as theirs:
                reports, control, descriptor = await _open_control(theirs)
                ours.callback(control.close)
                output, print_to = await _open_pipe(ours, theirs)
                errors, complain_to = await _open_pipe(ours, theirs)
                descriptors = {"control": descriptor, "result": self._result.open(ours, theirs)}
                process = await self._launch(descriptors, print_to, complain_to)
            reading = [
                asyncio.create_task(self._output.fill(output)),
                asyncio.create_task(self._errors.fill(errors)),
            ]
            try:
                return await self._await_report(process, reports)
            finally:
                # The launcher kills all processes of the program now.
                control.close()
                await _await_end(process)
                self._result.close()
                await asyncio.wait(reading, timeout=_DRAIN_S)
                for task in reading:
                    task.cancel()
                await asyncio.gather(*reading, return_exceptions=True)

    async def _launch(
        self, descriptors: Mapping[str, int], print_to: int, complain_to: int
    ) -> asyncio.subprocess.Process:
        order = {
            **descriptors,
            "words": list(self._command),
            "memory_bytes": self._memory_bytes,
            "pid_namespace": self._pid_namespace,
        }
        # Not a worker of relax_hpc.net.workers: standard input and output belong to the program, so
        # the launcher reports over another descriptor, and it ends with this task.
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launcher.__file__, json.dumps(order)),
            stdin=subprocess.PIPE,
            stdout=print_to,
            stderr=complain_to,
            pass_fds=list(descriptors.values()),
            # A terminal must not send its signals to programs.
            start_new_session=True,
            env={**clean_environment(), **self._variables},
        )

    async def _await_report(
        self, process: asyncio.subprocess.Process, reports: asyncio.StreamReader
    ) -> int:
        """The exit code that the launcher reports. OSError: it reports an error, or ends without a
        report."""
        assert process.stdin
        # OSError: the program has closed its input.
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(self._task).encode() + b"\n")
            process.stdin.close()
        while line := await reports.readline():
            report = json.loads(line)
            if "error" in report:
                raise OSError(report["error"])
            if "ended" in report:
                return report["ended"]
            self.no_namespace = report["no_namespace"]
        raise OSError(f"its launcher has ended without a report: {self.errors!r}")

    @property
    def output(self) -> str:
        """End of its standard output."""
        return self._without_secret(self._output.text)

    @property
    def errors(self) -> str:
        """End of its standard error."""
        return self._without_secret(self._errors.text)

    def _without_secret(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text

    def read_result(self) -> Mapping[str, Any] | None:
        """The program's result, a JSON object; None: it gave none.

        It is read from the descriptor, or, if the program has sent nothing, from the last line of
        standard output. ValueError: the sent result is not an object, or is too long.
        """
        if self.has_sent_result:
            content = self._result.content
            return _read_object(
                content.replace(self._secret.encode(), b"***") if self._secret else content
            )
        text = self.output.strip()
        if "\n" not in text and self._output.is_cut:
            raise ValueError(
                f"the last line of standard output is longer than {_MAX_RESULT_BYTES} bytes"
            )
        try:
            value = read_plain(text.rpartition("\n")[2])
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    @property
    def has_sent_result(self) -> bool:
        """Whether it has sent a result over the descriptor, which other processes cannot use."""
        return bool(self._result.content.strip())

    @property
    def forged(self) -> int:
        """Ignored bytes that other processes than the program have sent as its result."""
        return self._result.forged


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes, self._bytes = kept_bytes, bytearray()
        self.is_cut = False

    async def fill(self, stream: asyncio.StreamReader) -> None:
        """Read the stream to its end."""
        free = _FREE_BYTES
        while block := await stream.read(_BLOCK):
            self._bytes += block
            # Cut only at twice the length, so that the bytes are rarely moved.
            if len(self._bytes) > 2 * self._kept_bytes:
                self.is_cut = True
                del self._bytes[: -self._kept_bytes]
            free -= len(block)
            if free < 0:
                await asyncio.sleep(_PAUSE_S)

    @property
    def text(self) -> str:
        return self._bytes.decode(errors="replace")


class _ResultChannel:
    """Receiving end of the socket pair over which a program sends its result.

    The kernel reports the sender of each message (SO_PASSCRED, unix(7)). Messages of other
    processes are ignored, so that a command that has inherited the descriptor cannot write the
    reward. A socket cannot be opened through /proc/PID/fd, as a pipe can.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._bytes = bytearray()
        self._program = 0
        self.forged = 0

    def open(self, ours: contextlib.AsyncExitStack, theirs: contextlib.ExitStack) -> int:
        """Open it. Returns the descriptor for the program. The stacks close both ends."""
        receiving, sending = socket.socketpair()
        ours.callback(receiving.close)
        theirs.callback(sending.close)
        receiving.setblocking(False)
        receiving.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket = receiving
        self._listen()
        ours.callback(self.close)
        return sending.fileno()

    def close(self) -> None:
        """Read the messages that have arrived, and stop."""
        if self._socket:
            asyncio.get_running_loop().remove_reader(self._socket)
            if self._timer:
                self._timer.cancel()
            while self._receive_block():
                pass
            self._socket = None

    @property
    def content(self) -> bytes:
        """Bytes that the program has sent; only the beginning of a result that is too long."""
        return bytes(self._bytes)

    def _listen(self) -> None:
        if self._socket:
            asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def _receive(self) -> None:
        assert self._socket
        loop = asyncio.get_running_loop()
        if not self._receive_block():
            loop.remove_reader(self._socket)
        elif self.forged > _FREE_BYTES:
            # Slow down a process that floods the channel.
            loop.remove_reader(self._socket)
            self._timer = loop.call_later(_PAUSE_S, self._listen)

    def _receive_block(self) -> bool:
        """Receive one message. Returns whether there may be more."""
        assert self._socket
        # Space for credentials only, so that no descriptors are received.
        ancillary_bytes = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            data, messages, _, _ = self._socket.recvmsg(_BLOCK, ancillary_bytes)
        except (BlockingIOError, ConnectionResetError):
            return False
        if data:
            self._take(data, messages)
        return bool(data)

    def _take(self, data: bytes, messages: Sequence[tuple[int, int, bytes]]) -> None:
        credentials = [
            content
            for level, kind, content in messages
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        sender = _CREDENTIALS.unpack(credentials[0][: _CREDENTIALS.size])[0] if credentials else 0
        # The first byte comes from the launcher's child that becomes the program.
        self._program = self._program or sender
        if sender != self._program:
            self.forged += len(data)
        elif len(self._bytes) <= _MAX_RESULT_BYTES:
            self._bytes += data


async def _open_pipe(
    ours: contextlib.AsyncExitStack, theirs: contextlib.ExitStack
) -> tuple[asyncio.StreamReader, int]:
    """Stream of a pipe, and the descriptor for its writer. The stacks close both ends."""
    reader, writer = os.pipe()
    theirs.callback(os.close, writer)
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb")
    )
    ours.callback(transport.close)
    return stream, writer


async def _open_control(
    theirs: contextlib.ExitStack,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """Reader and writer of the connection to a launcher, and the descriptor of the launcher's end.
    The connection is a socket pair, which other processes cannot open through /proc/PID/fd."""
    receiving, sending = socket.socketpair()
    theirs.callback(sending.close)
    stream, writer = await asyncio.open_connection(sock=receiving)
    return stream, writer, sending.fileno()


def _read_object(content: bytes) -> dict[str, Any]:
    """The JSON object that a program has sent. ValueError: it is not an object, or too long."""
    allowed = f"allowed: one JSON object of at most {_MAX_RESULT_BYTES} bytes"
    if len(content) > _MAX_RESULT_BYTES:
        raise ValueError(f"{RESULT_FD}: found more bytes, {allowed}")
    try:
        value = read_plain(content)
    except ValueError as error:
        raise ValueError(f"{RESULT_FD}: found no JSON ({error}), {allowed}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{RESULT_FD}: found {type(value).__name__}, {allowed}")
    return value


async def _await_end(launcher_process: asyncio.subprocess.Process) -> None:
    """Wait until all processes of a program have ended."""
    try:
        async with asyncio.timeout(_END_S):
            await launcher_process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher_process.pid, signal.SIGKILL)
        await launcher_process.wait()
