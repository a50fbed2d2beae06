"""Settings of the rewards that are built in: the section `reward` of a configuration, which reward
workers have without the rest of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from relax_hpc.base.settings import bounded

T = TypeVar("T")
MATH_LIMIT_S = 5.0
"""Seconds in which Math-Verify may judge one response, or read a right answer."""
MATH_GROUP_LIMIT_S = 30.0
"""Seconds for all responses of a prompt group; each may use an equal share of the remaining
time."""


@dataclass(kw_only=True, slots=True)
class ByRowSettings:
    """Reward `by_row`: a prompt's own line says which reward it has."""

    column: str = "reward"
    """Column of the prompt's line whose value is a key of `rewards`."""
    rewards: dict[str, str] = field(default_factory=dict)
    """Value of the column -> name of the reward. A prompt with any other value fails as
    `reward_exception`."""


@dataclass(kw_only=True, slots=True)
class FormatSettings:
    """Reward `format`."""

    pattern: str = r"<think>.+?</think>\s*<answer>.+?</answer>"
    """Regular expression of Python's that the whole response has to match; `.` is any character,
    new lines too. A tag of it, such as `<think>`, may stand in a response as often as in the
    expression. A tag at the end of the prompt that opens a thought counts as the response's."""


@dataclass(kw_only=True, slots=True)
class CodeSettings:
    """Reward `code`: what a program that the policy has written may do."""

    timeout_s: float = bounded(5.0, 0.1)
    """Seconds by the clock for all tests of a response together."""
    memory_mb: int = bounded(1024, 64)
    """Megabytes of address space of each of its processes. All of them together may have as much
    memory, and twice disk_mb."""
    disk_mb: int = bounded(64, 1)
    """Megabytes of all files that it writes, which are in memory, and of what it prints to each
    test."""
    processes: int = bounded(16, 1)
    """Processes and threads that it may have at a time."""
    same_process: bool = False
    """Run tests written in Python in the process of the program, after it. A program can forge
    their result there: a policy that finds out gets rewards for nothing. Only for tests that need
    more of the program than plain data."""
    share: bool = False
    """Give the share of the tests that pass. False: 1 if all do, else 0, and the others are not
    run."""
    python: str = ""
    """Interpreter that runs it; empty: the one of the role, with its packages."""
    image: str = ""
    """Apptainer image to run it in, without a network and the user's folders; empty: in namespaces
    of our own."""
    apptainer: str = "apptainer"
    """Program that starts a container: a name on PATH, such as `singularity`, or a path."""
    weak: bool = False
    """Run it where the system gives neither user nor network namespaces: it then reads the user's
    files and reaches the network, and what it starts may outlive it. False: such a node is
    refused."""


@dataclass(kw_only=True, slots=True)
class ServiceSettings:
    """Settings of a service that is asked over HTTP."""

    url: str = ""
    """Address to which requests are posted."""
    timeout_s: float = bounded(20.0, 0.1)
    """Seconds for one request."""
    retries: int = bounded(3, 0)
    """Times that a request is sent again which got no answer, or 408, 425, 429 or 5xx, after 0.5 s,
    then 1 s, 2 s ...; `rollout.reward_timeout_s` bounds all of them."""
    in_flight: int = bounded(64, 1)
    """Requests of a process of the role at a time; the others wait."""
    token_file: str = ""
    """File whose text goes with every request as `Authorization: Bearer ...`; empty: none does."""


@dataclass(kw_only=True, slots=True)
class RemoteSettings(ServiceSettings):
    """Reward `remote`: a service that gives rewards.

    It gets prompt groups, {"samples": [{"prompt", "answer", "response_text", "finish_reason",
    "metadata", "rows", "turns", "environment"}, ...]}, and answers {"scores": [...]}, one number or
    mapping a sample, as of a reward.
    """


@dataclass(kw_only=True, slots=True)
class JudgeSettings(ServiceSettings):
    """Reward `judge`: a model that says how good a response is, behind an address as OpenAI's."""

    url: str = ""
    """Address of chat completions, such as `http://node:30000/v1/chat/completions` of
    `sglang.launch_server`. Empty: the servers of a group with role genrm are asked."""
    endpoints: str = ""
    """Folder in which servers of a role genrm say where they are: `rendezvous/genrm` of another
    run, whose judge is asked then. Empty: that of the run's own group."""
    away_s: float = bounded(0.0, 0.0)
    """Seconds for which a prompt group waits for servers of a role genrm that are not there; no
    other clock counts them. Then it fails as `reward_away`. 0: as long as a group is waited for,
    `liveness.longest_wait_s`."""
    model: str = "default"
    """Name of the model in requests."""
    question: str = (
        "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse to be "
        "judged:\n{response}\n\n"
        "Is the response right? Give a last line `Score: 1` if it is, or `Score: 0`."
    )
    """Question to the judge, with `{prompt}`, `{answer}` and `{response}` filled in."""
    score: str = r"(?i)score\s*:\s*\**\s*(-?\d+(?:\.\d+)?)(?![.,]?\d)(?!\s*(?:-|to|or)\s*-?\d)"
    """Regular expression whose first group is the score; its last match in the judge's answer
    counts, thoughts left out. An answer without a score, or one that was cut off, is the judge's
    failure, and not the response's: the prompt group is drawn again."""
    scale: float = 1.0
    """Factor by which a score becomes the reward."""
    max_new_tokens: int = bounded(1024, 1)
    """Tokens of the judge's answer."""
    temperature: float = bounded(0.0, 0.0)


@dataclass(kw_only=True, slots=True)
class RewardSettings:
    """Rewards that are built in, beside their names in rollout.reward and eval.reward."""

    weighted: dict[str, float] = field(default_factory=dict)
    """Reward `weighted`: name of a reward -> its weight in the sum. What each gives is a
    component."""
    by_row: ByRowSettings = field(default_factory=ByRowSettings)
    format: FormatSettings = field(default_factory=FormatSettings)
    code: CodeSettings = field(default_factory=CodeSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)


def rebuild_settings(kind: type[T], tree: Mapping[str, Any]) -> T:
    """Rebuild the dataclass ``kind`` that `dataclasses.asdict` has made ``tree`` of.

    >>> rebuild_settings(RewardSettings, dataclasses.asdict(RewardSettings())) == RewardSettings()
    True
    """
    hints = get_type_hints(kind)
    return kind(
        **{
            name: rebuild_settings(hints[name], value)
            if dataclasses.is_dataclass(hints[name])
            else value
            for name, value in tree.items()
        }
    )
