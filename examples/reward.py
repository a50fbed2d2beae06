"""A reward of all responses to a prompt: the right answer in few characters."""

from relax_hpc.rewards import RewardInput


def best_and_short(samples: list[RewardInput]) -> list[dict[str, float]]:
    """1 if the response has the answer, minus 0.01 for each character more than the shortest
    one."""
    shortest = min(len(sample.response_text) for sample in samples)
    scores = []
    for sample in samples:
        right = float(sample.answer in sample.response_text)
        extra = len(sample.response_text) - shortest
        scores.append({"total": right - 0.01 * extra, "right": right, "extra": extra})
    return scores
