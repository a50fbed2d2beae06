"""Reward of the form of a response, independent of its content."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from relax_hpc.base.errors import ConfigError
from relax_hpc.rewards.final_answer import opened_by_prompt

if TYPE_CHECKING:
    from relax_hpc.base.reward_settings import RewardSettings
    from relax_hpc.rewards import RewardInput

_TAG = re.compile(r"</?[A-Za-z][\w-]*>")


class Format:
    """1 if the whole response matches `reward.format.pattern` and has each tag of the pattern as
    often as the pattern; else 0.

    A thought that the prompt has opened counts as opened by the response.

    >>> from relax_hpc.base.reward_settings import RewardSettings
    >>> from relax_hpc.rewards import RewardInput
    >>> Format(RewardSettings())(RewardInput("?", "4", "<think>2+2</think><answer>4</answer>",
    ...     "stop"))
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
        response = sample.response_text.strip()
        # Many chat templates end the prompt with <think>, so that the response does not contain it.
        texts = (response, opened_by_prompt(sample) + response)
        return float(any(map(self._matches, texts)))

    def _matches(self, text: str) -> bool:
        tags = Counter(tag for tag in _TAG.findall(text) if tag in self._tags)
        return tags == self._tags and self._pattern.fullmatch(text) is not None
