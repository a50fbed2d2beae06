"""Options of `environment.kind: agent`: which program plays episodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from relax_hpc.base.errors import ConfigError

_TEMPLATE = "model"
_ALLOWED = "environment.options: found {}, allowed with environment.kind agent: {}"


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of the program, see `environment.options`."""

    command: tuple[str, ...]
    """Words of a command, not a shell's. `python` as the first is the interpreter that this process
    runs in."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its own."""
    chat_template: str = _TEMPLATE
    """Template of its chats, as `data.chat_template` names that of prompts, which a program gets as
    they stand."""
    pid_namespace: bool = True
    """Whether each program gets a PID namespace, where the kernel allows one. It hides other
    processes, and setuid programs such as `sudo` do not work in it."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> AgentOptions:
        """ConfigError: they name no program."""
        names = [option.name for option in fields(cls)]
        if unknown := [name for name in options if name not in names]:
            raise ConfigError(_ALLOWED.format(unknown[0], ", ".join(names)))
        command, env = options.get("command"), options.get("env", {})
        if (
            not isinstance(command, list)
            or not command
            or not all(isinstance(word, str) for word in command)
        ):
            raise ConfigError(
                _ALLOWED.format(
                    f"command {command!r}", "a list of words, as [python, /path/agent.py]"
                )
            )
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise ConfigError(_ALLOWED.format(f"env {env!r}", "texts by name"))
        if not isinstance(template := options.get("chat_template", _TEMPLATE), str):
            raise ConfigError(
                _ALLOWED.format(f"chat_template {template!r}", "model, or a Jinja file")
            )
        if not isinstance(pid_namespace := options.get("pid_namespace", True), bool):
            raise ConfigError(_ALLOWED.format(f"pid_namespace {pid_namespace!r}", "true, false"))
        words = [sys.executable, *command[1:]] if command[0] == "python" else command
        return cls(tuple(words), env, template, pid_namespace)
