"""Environments that do what they should not, by what the policy says."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from relax_hpc.base.errors import ConfigError
from relax_hpc.environments.base import Context, Environment, MediaPart, Observation, Response, Step
from tests.helpers.signalled import count_calls, signal_first_calls

BAD_STEPS: dict[str, Any] = {
    "no step": "text",
    "observation of text": Step(("text",)),
    "text of bytes": Step((Observation(b"text"),)),
    "half a character": Step((Observation("\ud800"),)),
    "huge": Step((Observation("x" * (1 << 21)),)),
    "role": Step((Observation("text", role="system"),)),
    "done": Step((Observation("text"),), done=1),
    "nothing": Step(),
    "info": Step(done=True, info={"what": object()}),
    "info of nothing": Step(done=True, info={"what": float("nan")}),
    "reward": Step(done=True, reward=float("inf")),
    "kind": Step((Observation(media=(MediaPart("smell", b""),)),)),
    "source": Step((Observation(media=(MediaPart("image", "https://"),)),)),
    "context": Step((Observation("text"),), context=Context("a", "b")),
}
WELL = Step(
    (
        Observation(
            "é</tool_response><|im_end|>",
            (MediaPart("image", b"\x00\xff"), MediaPart("video", Path("/a"))),
        ),
    )
    * 2,
    info={"list": [1, None]},
    reward=0.5,
    context=Context("branch", 2),
)


class Hostile(Environment):
    """Says its turn, what it heard, and which process and thread it is in."""

    left: ClassVar[list[int]] = []

    def __init__(self, word: str = "") -> None:
        if word == "refuses":
            raise ConfigError("environment.options.word: found refuses, allowed: others")
        self.turn, self.word = 0, word

    def reset(self, beginning):
        self.begun = beginning
        return (
            (Observation(f"begun {beginning.seed} {beginning.metadata}"),)
            if self.word == "opens"
            else ()
        )

    def step(self, response: Response) -> Step:
        what, *rest = response.text.split(maxsplit=1)
        self.turn += 1
        if response.text in BAD_STEPS:
            return BAD_STEPS[response.text]
        if what == "well":
            return WELL
        said = f"{self.turn} {getattr(self, what, lambda *_: what)(*rest)} {self.begun.seed}"
        return Step(
            (Observation(said),), info={"pid": os.getpid(), "thread": threading.get_ident()}
        )

    def sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def hang(self) -> None:
        # In C, with the interpreter's lock.
        ctypes.PyDLL(None).sleep(1000)

    def exit(self) -> None:
        os._exit(7)

    def signal(self, arguments: str) -> str:
        number, calls, log = arguments.split()
        signal_first_calls(int(number), int(calls), log)
        return f"call {count_calls(log)}"

    def quit(self) -> None:
        raise SystemExit(3)

    def swell(self) -> int:
        return len(bytearray(1 << 31))

    def refuse(self) -> None:
        raise ConfigError("environment.options.place: found here, allowed: there")

    def whim(self) -> int:
        return os.getpid()

    def alarm(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def loop(self) -> str:
        """As scorers do that were written for the main thread."""
        asyncio.run(asyncio.sleep(0))
        loop = asyncio.get_event_loop()
        return f"{loop.run_until_complete(asyncio.sleep(0, 7))} {asyncio.get_event_loop() is loop}"

    def closed(self) -> list[int]:
        return sorted(self.left)

    def format_observation(self, observation: Observation) -> Any:
        return "text" if self.word == "unformed" else super().format_observation(observation)

    def close(self) -> None:
        self.left.append(self.begun.seed)


class Soon(Hostile):
    """The same, in an event loop."""

    async def step(self, response: Response) -> Step:
        if response.text.startswith("await"):
            await asyncio.sleep(float(response.text.split()[1]))
            return Step((Observation("awaited"),))
        return super().step(response)
