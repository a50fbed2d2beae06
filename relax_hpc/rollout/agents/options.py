"""Options of `environment.kind: agent`: which program plays episodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from relax_hpc.errors import ConfigError

_TEMPLATE = "model"
_ALLOWED = "environment.options: found {}, allowed with environment.kind agent: {}"


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of the program, see `environment.options`."""

    command: tuple[str, ...]
    """Words of a command, not a shell's. `python` as the first is the interpreter that this process runs in."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its own."""
    chat_template: str = _TEMPLATE
    """Template of its chats, as `data.chat_template` names that of prompts, which a program gets as they stand."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> AgentOptions:
        """ConfigError: they name no program."""
        known = [one.name for one in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(_ALLOWED.format(unknown[0], ", ".join(known)))
        command, env = options.get("command"), options.get("env", {})
        if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
            raise ConfigError(_ALLOWED.format(f"command {command!r}", "a list of words, as [python, /path/agent.py]"))
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise ConfigError(_ALLOWED.format(f"env {env!r}", "texts by name"))
        if not isinstance(template := options.get("chat_template", _TEMPLATE), str):
            raise ConfigError(_ALLOWED.format(f"chat_template {template!r}", "model, or a Jinja file"))
        words = [sys.executable, *command[1:]] if command[0] == "python" else command
        return cls(tuple(words), env, template)
