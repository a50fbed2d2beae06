"""A task with rows, a held-out set and a reward."""

import random

from relax_hpc.rewards import RewardInput
from relax_hpc.tasks import Task


class Reverse(Task):
    """Write a few digits backwards."""

    evaluations = ("longer",)

    def rows(self, split, data):
        rng = random.Random(split)
        is_longer = split == "longer"
        for number in range(20 if is_longer else 200):
            digits = "".join(rng.choices("0123456789", k=5 if is_longer else 3))
            yield {"id": f"{number}", "prompt": f"{digits}?", "answer": digits[::-1]}

    def reward(self, sample: RewardInput) -> dict[str, float]:
        """Share of the digits that are right, and 0.1 for the right length."""
        pairs = zip(sample.response_text, sample.answer, strict=False)
        right = sum(digit == expected for digit, expected in pairs)
        length = float(len(sample.response_text) == len(sample.answer))
        return {"total": right / len(sample.answer) + 0.1 * length, "length": length}
