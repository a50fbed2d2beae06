"""Rewards that are built in, each beside what it is made of, called without anything around it.

A figure is rewards a second of a core's time: of the role and of all processes that compute for it,
their start left out. What is around `remote` and `code` is the service's and the interpreter's
start, which are in both columns.

    python tools/bench/reward_kinds.py --groups 64 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from figures import Figure, print_figures

from relax_hpc.base.reward_settings import RemoteSettings, RewardSettings
from relax_hpc.rewards import REWARDS, RewardInput
from relax_hpc.rewards.placement import make_rewards

EPISODES, AT_ONCE, LIMIT_S = 8, 16, 300.0
SHARES = {"math": 0.5, "code": 0.1, "remote": 0.5}
THOUGHT = "We add the numbers and divide by the first one, which gives a fraction. " * 20
PROGRAM = "print(sum(map(int, input().split())))"


@dataclass(frozen=True, slots=True)
class Kind:
    """A reward, what it is asked for, and the same without us."""

    sample: Callable[[int, int], RewardInput]
    """By number of the group and of the episode: libraries remember what they have seen."""
    bare: Callable[[int, int], object]
    what: str
    share: float = 1.0
    """Of the groups: slow ones are asked for less often."""


def kinds(url: str) -> dict[str, Kind]:
    """By name."""
    from math_verify import parse, verify

    text, pattern = (
        THOUGHT + r"So it is \boxed{\frac{3}{4}}.",
        re.compile(r".*\\boxed\{.*\}.*", re.DOTALL),
    )
    said = RewardInput("?", "3/4", text, "stop")
    thought = {n: THOUGHT + rf"So it is \boxed{{\frac{{3}}{{{n}}}}}." for n in range(1 << 14)}
    letter = RewardInput("?", "B", THOUGHT + "The answer is (B).", "stop")
    formed = f"<think>{THOUGHT}</think><answer>3/4</answer>"
    form = re.compile(r"<think>.+?</think>\s*<answer>.+?</answer>", re.DOTALL)
    program = RewardInput(
        "?",
        "",
        f"```python\n{PROGRAM}\n```",
        "stop",
        {"tests": [{"input": "1 2 3", "output": "6"}]},
    )
    words = [sys.executable, "-I", "-c", PROGRAM]
    body = json.dumps({"samples": [{"response_text": text}] * EPISODES}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    lower = text.lower
    fixed = {
        "answer_exact": (said, lambda: text == "3/4", "=="),
        "exact": (said, lambda: lower().split() == ["34"], "lower, split"),
        "f1": (said, lambda: {*lower().split()} & {"34"}, "lower, split"),
        "multiple_choice": (
            letter,
            lambda: re.search(r"answer is \((\w)\)", letter.response_text),
            "re.search",
        ),
        "math_answer": (said, lambda: pattern.search(text), "re.search"),
        "dapo": (
            letter,
            lambda: re.search(r"(?i)answer\s*:\s*([^\n]+)", letter.response_text[-300:]),
            "re.search",
        ),
        "format": (
            RewardInput("?", "", formed, "stop"),
            lambda: form.fullmatch(formed),
            "re.fullmatch",
        ),
        "code": (
            program,
            lambda: subprocess.run(words, input=b"1 2 3", capture_output=True),
            "subprocess",
        ),
        "remote": (said, lambda: urllib.request.urlopen(request).read(), "urllib, of a group"),
    }
    found = {
        name: Kind(
            lambda *_, sample=sample: sample,
            lambda *_, bare=bare: bare(),
            what,
            SHARES.get(name, 1.0),
        )
        for name, (sample, bare, what) in fixed.items()
    }
    found["math"] = Kind(
        lambda group, episode: RewardInput(
            "?", f"3/{EPISODES * group}", thought[EPISODES * group + episode], "stop"
        ),
        lambda group, episode: verify(
            parse(f"\\boxed{{3/{EPISODES * group}}}"), parse(thought[EPISODES * group + episode])
        ),
        "math_verify",
        SHARES["math"],
    )
    return found


def spent() -> float:
    """Seconds of cores so far, of this process and of those that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def _given(name: str, kind: Kind, groups: range, settings: RewardSettings) -> None:
    rewards = make_rewards(name, 1, LIMIT_S, settings)
    try:
        await rewards.start()
        for first in groups[::AT_ONCE]:
            some = range(first, min(first + AT_ONCE, groups.stop))
            asked = [[kind.sample(group, episode) for episode in range(EPISODES)] for group in some]
            found = await asyncio.gather(*map(rewards.score, asked))
            assert all(isinstance(scores, list) for scores in found), found
    finally:
        await rewards.close()


def through(name: str, kind: Kind, groups: int, settings: RewardSettings) -> float:
    """Seconds of cores for a reward, as a rollout process has it."""
    took = []
    for count in (1, 1 + groups):
        before = spent()
        asyncio.run(_given(name, kind, range(1, 1 + count), settings))
        took.append(spent() - before)
    return (took[1] - took[0]) / (groups * EPISODES)


def alone(name: str, kind: Kind, groups: int) -> float:
    """Seconds of cores for what it is made of."""
    kind.bare(1, 0)
    # The service answers for a whole group.
    each = range(1 if name == "remote" else EPISODES)
    before = spent()
    for group in range(2, 2 + groups):
        for episode in each:
            kind.bare(group, episode)
    return max(1e-9, spent() - before) / (groups * EPISODES)


class Service(BaseHTTPRequestHandler):
    """Gives every sample a point."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"scores": [1.0] * len(asked["samples"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def measured(groups: int, names: list[str]) -> Iterator[Figure]:
    """Two figures a reward, and their ratio."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    settings = RewardSettings(remote=RemoteSettings(url=url))
    for name, kind in kinds(url).items():
        if names and name not in names:
            continue
        quick = callable(REWARDS[name])
        count = max(2, round(groups * (20 if quick else kind.share)))
        ours, bare = through(name, kind, count, settings), alone(name, kind, count)
        yield Figure(
            f"{name}: {'at once' if quick else 'in a worker'}",
            1 / max(ours, 1e-9),
            "rewards/s and core",
        )
        yield Figure(f"{name}: bare, {kind.what}", 1 / bare, "rewards/s and core")
    server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--groups", type=int, default=256, help=f"prompt groups of {EPISODES} episodes"
    )
    parser.add_argument("--names", nargs="+", default=[], help="of rewards; none: all")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    print_figures(measured(options.groups, options.names), {"groups": options.groups}, options.json)


if __name__ == "__main__":
    main()
