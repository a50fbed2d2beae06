"""The tool `python`: runs programs of the policy in a jail, like the reward `code`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from relax_hpc.base.reward_settings import CodeSettings
from relax_hpc.config.layer_validation import clean
from relax_hpc.environments.tool_calls import ToolError
from relax_hpc.environments.tools.base import Parameter, Tool
from relax_hpc.rewards.jail import Jail

KEY = "environment.options.tools.python"
_MAX_OUTPUT_CHARS = 4000
"""Maximum length of an output for the policy. Of a longer output it gets the beginning and the
end."""


class Python(Tool):
    """Runs a program. The options are those of `reward.code`. `timeout_s` is the limit of one
    program. The options for tests, `share` and `same_process`, have no effect."""

    name = "python"
    description = "Runs a Python program, without files or a network, and tells what it prints."
    parameters: ClassVar = {
        "code": Parameter("string", "the whole program; nothing is kept from one to the next")
    }

    def __init__(self, **options: Any) -> None:
        """ConfigError: an option is not allowed."""
        self._settings = settings_of(options)

    @cached_property
    def _jail(self) -> Jail:
        """Made at the first call: a configuration may be checked on a machine that cannot run
        programs."""
        return Jail(self._settings, KEY)

    def call(self, code: str) -> str:
        """Output and errors of the program, and its exit code if that is not 0. ToolError: it was
        not done in time. ConfigError: programs cannot be isolated on this machine."""
        result = self._jail.run(code, "", self._settings.timeout_s, with_errors=True)
        output = shortened(result.output.rstrip("\n"))
        if not result.in_time:
            raise ToolError(
                f"not done in {self._settings.timeout_s:g} s; it had printed:\n{output}"
            )
        if result.code:
            return f"{output}\n(exit code {result.code})"
        return output or "(it printed nothing)"


def settings_of(options: Mapping[str, Any]) -> CodeSettings:
    """Settings of the jail. ConfigError: an option is invalid."""
    return CodeSettings(**clean(CodeSettings, options, KEY))


def shortened(text: str, max_chars: int = _MAX_OUTPUT_CHARS) -> str:
    """``text``, without its middle if it is longer than ``max_chars``.

    >>> shortened("0123456789", 4)
    '01\\n(6 characters left out)\\n89'
    """
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n({len(text) - 2 * half} characters left out)\n{text[-half:]}"
