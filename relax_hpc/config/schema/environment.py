"""Settings of environments for episodes of several turns, and limits of such episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax_hpc.base.settings import bounded

AGENT = "agent"
"""Kind without an environment: an existing agent program plays the episode, by requests to the
run's endpoint."""


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """Environments of episodes of several turns. The context of a row (all its tokens after the
    prompt, observations included) has at most `rollout.max_new_tokens` tokens. A full context ends
    its episode with the reason `length`."""

    kind: str = ""
    """Environment of the episodes: a built-in name of `relax_hpc.environments`, or
    `package.module:Class`. With `agent` an existing program plays each episode by requests to an
    endpoint like OpenAI's. If it is empty, the task's environment is used; most tasks have none."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the constructor of each environment, by name. For `agent`: `command`, the
    program and its arguments; `env`, its additional environment variables; `chat_template`, the
    template of its chats, `model` or a Jinja file; `pid_namespace`, whether each program runs in
    its own PID namespace."""
    max_turns: int = bounded(8, 1)
    """Maximum number of turns of the policy in an episode. Beyond them the episode ends with the
    reason `max_turns`."""
    turn_tokens: int = bounded(0, 0)
    """Maximum number of tokens of a turn. A longer turn is cut, and its episode ends with the
    reason `turn_budget`. With 0 there is no separate limit."""
    sampled_tokens: int = bounded(0, 0)
    """Maximum number of tokens that are sampled in an episode, over all turns. Beyond them the
    episode ends with the reason `sampled_budget`. With 0 there is no separate limit."""
    episode_tokens: int = bounded(0, 0)
    """Maximum number of tokens of all contexts of an episode together, with observations and
    without prompts. Beyond them the episode ends with the reason `episode_budget`. With 0 there is
    no separate limit."""
    max_observation_tokens: int = bounded(4096, 1)
    """Maximum number of tokens of the texts of an observation. A longer observation is cut, with a
    note for the policy, and counted."""
    max_faults: int = bounded(2, 0)
    """Number of times that an episode is played again after its environment failed. Then its prompt
    group fails, with the reason of the last failure."""
    processes: int = bounded(1, 1)
    """Maximum number of environment processes of each process of rollout."""
    per_process: int = bounded(64, 1)
    """Maximum number of environments in one environment process at a time."""
    step_timeout_s: float = bounded(60.0, 0.1)
    """Seconds for one call of an environment: reset, step or close. If a call takes longer, its
    episode ends, and its process gets no further episodes. If the whole process hangs, the other
    episodes in it are played again in another process."""
    memory_mb: int = bounded(4096, 64)
    """Memory limit of an environment process, in megabytes."""
