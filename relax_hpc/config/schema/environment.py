"""Settings of environments: what episodes of several turns are played against, and how long they
may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax_hpc.base.settings import bounded

AGENT = "agent"
"""Kind that is no environment: an existing agent program plays the episode, at the run's
endpoint."""


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """Environments of episodes of several turns. A context, all that one row holds behind its
    prompt, has at most `rollout.max_new_tokens`, observations included; one that is full ends its
    episode as `length`."""

    kind: str = ""
    """Environment that episodes are played against: a built-in name of `relax_hpc.environments`, or
    `package.module:Class`; or `agent`: an existing program plays each episode by itself, at an
    endpoint as OpenAI's. Empty: the task's own; most have none."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments that each environment is made with, by name. Of `agent`: `command`, the words of
    one; `env`, its own environment variables; `chat_template`, that of its chats, `model` or a
    Jinja file; `pid_namespace`, whether each program gets one."""
    max_turns: int = bounded(8, 1)
    """Turns of the policy in an episode; past them it ends as `max_turns`."""
    turn_tokens: int = bounded(0, 0)
    """Tokens of a turn; a longer one is cut, and its episode ends as `turn_budget`. 0: no bound of
    its own."""
    sampled_tokens: int = bounded(0, 0)
    """Tokens that are sampled in an episode, all turns together; past them it ends as
    `sampled_budget`. 0: no bound of its own."""
    episode_tokens: int = bounded(0, 0)
    """Tokens of all contexts of an episode together, observations included and prompts not; past
    them it ends as `episode_budget`. 0: no bound of its own."""
    max_observation_tokens: int = bounded(4096, 1)
    """Tokens of the texts of an observation; what goes beyond is cut, with a note for the policy,
    and counted."""
    max_faults: int = bounded(2, 0)
    """Times that an episode is begun again after its environment has failed it; then its prompt
    group fails by the reason of the last fault."""
    processes: int = bounded(1, 1)
    """Processes, at most, in which each process of rollout has its environments."""
    per_process: int = bounded(64, 1)
    """Environments in one of them at a time."""
    step_timeout_s: float = bounded(60.0, 0.1)
    """Seconds for a call of an environment: to begin, a step, to close. Past them its episode ends,
    and its process takes no others; if that hangs as a whole, environments beside it are played
    again in another."""
    memory_mb: int = bounded(4096, 64)
    """Megabytes that a process of environments may take."""
