"""The process of an agent program: it reads its task from standard input, finds the endpoint in its
environment, and sends its result over a socket."""

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
"""Environment variable with the number of the descriptor that a program may send its result over,
see `launcher`."""
_MAX_RESULT_BYTES = 1 << 20
"""Bytes of a result, and of what a program prints last, that are kept."""
_MAX_ERROR_BYTES = 64 << 10
_BLOCK = 1 << 14
_FREE_BYTES, _PAUSE_S = 1 << 20, 0.02
"""Bytes that a program may print at its own pace, and seconds of pause after each block beyond.
Only the program waits then."""
_DRAIN_S = 1.0
"""Seconds for reading the end of its output, after all of its processes were killed."""
_END_S = 20.0
"""Seconds for the launcher to kill all processes of a program."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender: `struct ucred` of unix(7)."""


class Program:
    """A program while it runs, with all processes that it starts; for one event loop."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        task: Mapping[str, Any],
        memory_bytes: int,
        pid_namespace: bool = True,
        secret: str = "",
    ) -> None:
        """``command``: words, not a shell's; ``variables``: of its environment beyond this
        process's; ``task``: its input, as JSON in one line; ``memory_bytes``: of each of its
        processes; ``pid_namespace``: whether it gets one, where the kernel allows that; ``secret``:
        text that `***` replaces in its output and its result."""
        self._command, self._variables, self._task = command, variables, task
        self._memory_bytes, self._pid_namespace, self._secret = memory_bytes, pid_namespace, secret
        self._output, self._errors = _Tail(_MAX_RESULT_BYTES), _Tail(_MAX_ERROR_BYTES)
        self._result = _ResultChannel()
        self.no_namespace = ""
        """Reason why it has no PID namespace; empty: it has one."""

    async def run(self) -> int:
        """Run it; its exit code, or minus the number of the signal that ended it. All of its
        processes are dead then, also when this is cancelled.

        OSError: there is no such program.
        """
        async with contextlib.AsyncExitStack() as ours:
            # Ends that the launcher has inherited are closed here.
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
        # Not one of relax_hpc.net.workers: the program owns its input and output, so that the
        # launcher reports by a descriptor of its own, and it outlives no more than this one task.
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launcher.__file__, json.dumps(order)),
            stdin=subprocess.PIPE,
            stdout=print_to,
            stderr=complain_to,
            pass_fds=list(descriptors.values()),
            # Signals of a terminal are for the run.
            start_new_session=True,
            env=clean_environment() | self._variables,
        )

    async def _await_report(
        self, process: asyncio.subprocess.Process, reports: asyncio.StreamReader
    ) -> int:
        """The exit code that the launcher reports. OSError: it reports another end."""
        assert process.stdin
        # The program may have closed it.
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
        """The program's result, an object; None: it gave none.

        It comes over the descriptor. A program that sends nothing gives it as the last line of its
        standard output. ValueError: it sent something that is no object, or that is too long.
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
        """Whether it has sent a result over the descriptor, where no other process can."""
        return bool(self._result.content.strip())

    @property
    def forged(self) -> int:
        """Bytes that other processes than the program itself have sent as its result, and that were
        left out."""
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
            # At twice its length, so that the bytes move seldom.
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
    """Receiving end of the socket pair that a program sends its result over.

    The kernel says which process has sent each part (SO_PASSCRED, unix(7)). Parts of other
    processes than the program are left out: a command that has inherited the descriptor cannot
    write the reward. A socket cannot be opened through /proc/PID/fd either, as a pipe can.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._bytes = bytearray()
        self._program = 0
        self.forged = 0

    def open(self, ours: contextlib.AsyncExitStack, theirs: contextlib.ExitStack) -> int:
        """Open it; the descriptor for the program. The stacks close both ends."""
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
        """Take what has come, and nothing more."""
        if self._socket:
            asyncio.get_running_loop().remove_reader(self._socket)
            if self._timer:
                self._timer.cancel()
            while self._receive_block():
                pass
            self._socket = None

    @property
    def content(self) -> bytes:
        """Bytes that the program has sent, of a long result the beginning."""
        return bytes(self._bytes)

    def _listen(self) -> None:
        if self._socket:
            asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._receive_block():
            loop.remove_reader(self._socket)
        elif self.forged > _FREE_BYTES:
            loop.remove_reader(self._socket)
            self._timer = loop.call_later(_PAUSE_S, self._listen)

    def _receive_block(self) -> bool:
        """Take one part of what has come; whether there may be more."""
        assert self._socket
        # Room for the credentials alone: descriptors that somebody sends are not taken.
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            data, messages, _, _ = self._socket.recvmsg(_BLOCK, room)
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
        # The launcher sends a first byte from the process that becomes the program.
        self._program = self._program or sender
        if sender != self._program:
            self.forged += len(data)
        elif len(self._bytes) <= _MAX_RESULT_BYTES:
            self._bytes += data


async def _open_pipe(
    ours: contextlib.AsyncExitStack, theirs: contextlib.ExitStack
) -> tuple[asyncio.StreamReader, int]:
    """Stream of a pipe, and the descriptor that others write to. The stacks close both ends."""
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
    """Both directions of the connection with a launcher, and the launcher's end. It is a socket
    pair: other processes cannot open a socket through /proc/PID/fd."""
    receiving, sending = socket.socketpair()
    theirs.callback(sending.close)
    stream, writer = await asyncio.open_connection(sock=receiving)
    return stream, writer, sending.fileno()


def _read_object(content: bytes) -> dict[str, Any]:
    """The JSON object that a program has sent. ValueError: it is none, or too long."""
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
    """Wait until all processes of a program are gone."""
    try:
        async with asyncio.timeout(_END_S):
            await launcher_process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher_process.pid, signal.SIGKILL)
        await launcher_process.wait()
