"""Options of `environment.kind: agent`: the program that plays episodes."""

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
    """Words of a command; no shell is used. `python` as the first word stands for the interpreter
    of this process."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    chat_template: str = _TEMPLATE
    """Template of its chats, named as in `data.chat_template`. The program gets the text of a
    prompt without a template."""
    pid_namespace: bool = True
    """Whether each program gets a PID namespace, if the kernel allows that. The namespace hides
    other processes, and setuid programs such as `sudo` do not work in it."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> AgentOptions:
        """ConfigError: they name no program."""
        names = [option.name for option in fields(cls)]
        unknown = [name for name in options if name not in names]
        if unknown:
            raise ConfigError(_ALLOWED.format(unknown[0], ", ".join(names)))
        command, env = options.get("command"), options.get("env", {})
        has_words = isinstance(command, list) and all(isinstance(word, str) for word in command)
        if not isinstance(command, list) or not command or not has_words:
            raise ConfigError(
                _ALLOWED.format(
                    f"command {command!r}", "a list of words, as [python, /path/agent.py]"
                )
            )
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise ConfigError(_ALLOWED.format(f"env {env!r}", "texts by name"))
        template = options.get("chat_template", _TEMPLATE)
        if not isinstance(template, str):
            raise ConfigError(
                _ALLOWED.format(f"chat_template {template!r}", "model, or a Jinja file")
            )
        pid_namespace = options.get("pid_namespace", True)
        if not isinstance(pid_namespace, bool):
            raise ConfigError(_ALLOWED.format(f"pid_namespace {pid_namespace!r}", "true, false"))
        words = [sys.executable, *command[1:]] if command[0] == "python" else command
        return cls(tuple(words), env, template, pid_namespace)
