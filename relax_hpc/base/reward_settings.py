"""Settings of the built-in rewards: the section `reward` of a configuration.

Reward workers receive only this section.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from relax_hpc.base.settings import bounded

T = TypeVar("T")
MATH_LIMIT_S = 5.0
"""Seconds for Math-Verify to judge one response, or to parse a reference answer, at most."""
MATH_GROUP_LIMIT_S = 30.0
"""Seconds for all responses of a prompt group. Each may use an equal share of the remaining
time."""


@dataclass(kw_only=True, slots=True)
class ByRowSettings:
    """Reward `by_row`: a column of a prompt's line names its reward."""

    column: str = "reward"
    """Column of the prompt's line whose value is a key of `rewards`."""
    rewards: dict[str, str] = field(default_factory=dict)
    """Value of the column -> name of the reward. A prompt with any other value fails as
    `reward_exception`."""


@dataclass(kw_only=True, slots=True)
class FormatSettings:
    """Reward `format`."""

    pattern: str = r"<think>.+?</think>\s*<answer>.+?</answer>"
    """Python regular expression that the whole response must match; `.` also matches a new line. A
    tag such as `<think>` may occur in a response as often as in the expression. A tag at the end of
    the prompt that opens a thought counts as part of the response."""


@dataclass(kw_only=True, slots=True)
class CodeSettings:
    """Reward `code`: limits of a program that the policy has written."""

    timeout_s: float = bounded(5.0, 0.1)
    """Seconds of wall time for all tests of a response together."""
    memory_mb: int = bounded(1024, 64)
    """Megabytes of address space of each process of the program. All its processes together may use
    this much memory, plus twice disk_mb."""
    disk_mb: int = bounded(64, 1)
    """Megabytes of all files that the program writes, which are in memory, and of its output in
    each test."""
    processes: int = bounded(16, 1)
    """Number of processes and threads of the program at a time."""
    same_process: bool = False
    """Run tests written in Python in the process of the program, after the program. A program can
    then forge their result, and a policy that learns this gets rewards for wrong programs. Only for
    tests that need more from the program than plain data."""
    share: bool = False
    """The reward is the share of the tests that pass. False: it is 1 if all tests pass, else 0, and
    the first failure ends the tests."""
    python: str = ""
    """Python interpreter that runs the program; empty: the one of the role, with its packages."""
    image: str = ""
    """Apptainer image in which the program runs, without network and without the user's folders.
    Empty: it runs in namespaces that the role creates."""
    apptainer: str = "apptainer"
    """Program that starts a container: a name on PATH, such as `singularity`, or a path."""
    weak: bool = False
    """Allow nodes without user namespaces and network namespaces. A program there can read the
    user's files and use the network, and its child processes may outlive it. False: such a node is
    refused."""


@dataclass(kw_only=True, slots=True)
class ServiceSettings:
    """Settings of an HTTP service."""

    url: str = ""
    """URL to which requests are posted."""
    timeout_s: float = bounded(20.0, 0.1)
    """Seconds for one request."""
    retries: int = bounded(3, 0)
    """Times that a request is repeated after no answer, or status 408, 425, 429 or 5xx. The pauses
    are 0.5 s, 1 s, 2 s ...; `rollout.reward_timeout_s` bounds the sum of all attempts."""
    in_flight: int = bounded(64, 1)
    """Concurrent requests of a process of the role; further requests wait."""
    token_file: str = ""
    """File with the token that every request sends as `Authorization: Bearer ...`; empty: no
    token."""


@dataclass(kw_only=True, slots=True)
class RemoteSettings(ServiceSettings):
    """Reward `remote`: a service that computes rewards.

    It receives prompt groups, {"samples": [{"prompt", "answer", "response_text", "finish_reason",
    "metadata", "rows", "turns", "environment"}, ...]}, and answers {"scores": [...]}, one number or
    mapping for each sample, as a reward returns it.
    """


@dataclass(kw_only=True, slots=True)
class JudgeSettings(ServiceSettings):
    """Reward `judge`: a model that scores responses, with an API like OpenAI's."""

    url: str = ""
    """URL of chat completions, such as `http://node:30000/v1/chat/completions` of
    `sglang.launch_server`. Empty: requests go to the servers of a group with role genrm."""
    endpoints: str = ""
    """Folder with the addresses of the servers of role genrm: `rendezvous/genrm` of another run,
    whose servers then receive the requests. Empty: the folder of this run's group."""
    away_s: float = bounded(0.0, 0.0)
    """Seconds for which a prompt group waits while no server of role genrm is available. No other
    timeout counts them. Then it fails as `reward_away`. 0: as long as the run waits for a group,
    `liveness.longest_wait_s`."""
    model: str = "default"
    """Name of the model in requests."""
    question: str = (
        "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse to be "
        "judged:\n{response}\n\n"
        "Is the response right? Give a last line `Score: 1` if it is, or `Score: 0`."
    )
    """Question to the judge. `{prompt}`, `{answer}` and `{response}` are replaced by their
    values."""
    score: str = r"(?i)score\s*:\s*\**\s*(-?\d+(?:\.\d+)?)(?![.,]?\d)(?!\s*(?:-|to|or)\s*-?\d)"
    """Regular expression whose first group is the score. The last match in the judge's answer
    counts, outside of thoughts. If an answer has no score or was cut off, the judge has failed, and
    the prompt group is generated again."""
    scale: float = 1.0
    """Factor by which a score becomes the reward."""
    max_new_tokens: int = bounded(1024, 1)
    """Tokens of the judge's answer, at most."""
    temperature: float = bounded(0.0, 0.0)


@dataclass(kw_only=True, slots=True)
class RewardSettings:
    """Settings of the built-in rewards, which `rollout.reward` and `eval.reward` name."""

    weighted: dict[str, float] = field(default_factory=dict)
    """Reward `weighted`: name of a reward -> its weight in the sum. The value of each is a
    component."""
    by_row: ByRowSettings = field(default_factory=ByRowSettings)
    format: FormatSettings = field(default_factory=FormatSettings)
    code: CodeSettings = field(default_factory=CodeSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)


def rebuild_settings(kind: type[T], tree: Mapping[str, Any]) -> T:
    """The dataclass ``kind`` from ``tree``, which `dataclasses.asdict` returned.

    >>> rebuild_settings(RewardSettings, dataclasses.asdict(RewardSettings())) == RewardSettings()
    True
    """
    hints = get_type_hints(kind)
    values = {
        name: rebuild_settings(hints[name], value)
        if dataclasses.is_dataclass(hints[name])
        else value
        for name, value in tree.items()
    }
    return kind(**values)
