"""Programs of the policy, run apart from everything else, as the reward `code` runs them."""

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
_SHOWN = 4000
"""Characters of an output that the policy is told: as many of its beginning as of its end."""


class Python(Tool):
    """Runs a program; its options are those of `reward.code`. `timeout_s` is for one program, and
    those that concern tests, `share` and `same_process`, have no effect."""

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
        """Made where programs are run, which is not where a configuration is checked."""
        return Jail(self._settings, KEY)

    def call(self, code: str) -> str:
        """Output of the program, errors in it, and how it ended if not well. ToolError: it was not
        done in time. ConfigError: programs cannot be kept apart on this machine."""
        ran = self._jail.run(code, "", self._settings.timeout_s, with_errors=True)
        output = shortened(ran.output.rstrip("\n"))
        if not ran.in_time:
            raise ToolError(
                f"not done in {self._settings.timeout_s:g} s; it had printed:\n{output}"
            )
        return f"{output}\n(exit code {ran.code})" if ran.code else output or "(it printed nothing)"


def settings_of(options: Mapping[str, Any]) -> CodeSettings:
    """Settings of the jail. ConfigError: an option is not allowed."""
    return CodeSettings(**clean(CodeSettings, options, KEY))


def shortened(text: str, most: int = _SHOWN) -> str:
    """``text``, without its middle where it is longer.

    >>> shortened("0123456789", 4)
    '01\\n(6 characters left out)\\n89'
    """
    half = most // 2
    return (
        text
        if len(text) <= most
        else f"{text[:half]}\n({len(text) - 2 * half} characters left out)\n{text[-half:]}"
    )
