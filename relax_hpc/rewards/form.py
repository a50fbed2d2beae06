"""Reward of the form of a response, whatever it says."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from relax_hpc.errors import ConfigError

if TYPE_CHECKING:
    from relax_hpc.reward_settings import RewardSettings
    from relax_hpc.rewards import RewardInput

_TAG = re.compile(r"</?[A-Za-z][\w-]*>")


class Format:
    """1 if the whole response is as `reward.format.pattern` says, with each of its tags as often, else 0.

    >>> from relax_hpc.reward_settings import RewardSettings
    >>> from relax_hpc.rewards import RewardInput
    >>> Format(RewardSettings())(RewardInput("?", "4", "<think>2+2</think><answer>4</answer>", "stop"))
    1.0
    """

    def __init__(self, settings: RewardSettings) -> None:
        text = settings.format.pattern
        try:
            self._pattern = re.compile(text, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"reward.format.pattern: found {text!r}: {error}") from error
        self._tags = Counter(_TAG.findall(text))

    def __call__(self, sample: RewardInput) -> float:
        text = sample.response_text.strip()
        found = Counter(tag for tag in _TAG.findall(text) if tag in self._tags)
        return float(found == self._tags and self._pattern.fullmatch(text) is not None)
