"""Checks of the sampling of responses, for training and for evaluations."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.config.schema import Config, EvalConfig, RolloutConfig


def check_sampling(config: Config) -> Iterator[str]:
    """Check the sampling of `rollout` and `eval`."""
    rollout = config.rollout
    # With these values each token is the most probable one.
    greedy_values = {"temperature": 0, "top_p": 0, "top_k": 1, "min_p": 1}
    for key, greedy_value in greedy_values.items():
        value = getattr(rollout, key)
        if value == greedy_value:
            yield (
                f"rollout.{key}: found {value}, which always samples the most probable token; "
                "equal responses to a prompt give no training signal"
            )
    setting = truncating_setting(rollout)
    if setting:
        yield from _check_truncation(config, setting)
    yield from _check_evaluation(config.eval)


_FULL_VOCABULARY = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Values with which tokens are sampled from the full vocabulary."""


def truncating_setting(settings: RolloutConfig | EvalConfig) -> str:
    """The first setting that excludes a part of the vocabulary from sampling, or an empty text."""
    for key, value in _FULL_VOCABULARY.items():
        if getattr(settings, key) != value:
            return key
    return ""


def _check_truncation(config: Config, key: str) -> Iterator[str]:
    """Check a run that samples from a part of the vocabulary, because of setting ``key``.

    The importance weight of a token is pi_old / pi_rollout, where pi_rollout is the truncated
    distribution. Such tokens cannot estimate an expectation over the full policy.
    """
    algorithm, full = config.algorithm, f"{_FULL_VOCABULARY[key]:g}"
    value = f"rollout.{key}: found {getattr(config.rollout, key)}"
    if algorithm.ratio_to_rollout:
        yield (
            f"{value} with algorithm {algorithm.name}, allowed: {full}; its ratio uses the "
            "engine's log-probabilities, which are of the truncated distribution"
        )
        return
    if algorithm.kl.coefficient and algorithm.kl.importance:
        yield (
            f"{value} with algorithm.kl.importance, allowed: {full}, or kl.importance false; "
            "tokens that are never sampled would be missing in the divergence"
        )
    if config.rollout.engine.kind == "simulated":
        yield f"{value} with engine simulated, which samples tokens uniformly; remove it"
    if algorithm.correction.kind == "off":
        yield (
            f"{value} with algorithm.correction.kind off, allowed: truncate or mask; else the "
            "weights of tokens would not be those of the distribution that sampled them"
        )
    elif algorithm.correction.level == "sequence":
        yield (
            f"{value} with algorithm.correction.level sequence, allowed: token; the product of a "
            "row's weights goes to zero in long responses"
        )
    if "rollout_logprobs" in algorithm.needs:
        yield (
            f"{value} with algorithm {algorithm.name}, allowed: {full}; its rewards use "
            "rollout_logprobs as log-probabilities of the full policy"
        )


def _check_evaluation(settings: EvalConfig) -> Iterator[str]:
    if settings.responses > 1 and not settings.temperature:
        yield (
            f"eval.responses: found {settings.responses} with eval.temperature 0, allowed: 1; "
            "the responses would be equal, set a temperature"
        )
    for k in settings.pass_at:
        if not 1 <= k <= settings.responses:
            remedy = f"; set eval.responses to {k} or more" if k > settings.responses else ""
            allowed = f"1 to eval.responses, {settings.responses}"
            yield f"eval.pass_at: found {k}, allowed: {allowed}{remedy}"
    if settings.top_p == 0:
        yield (
            "eval.top_p: found 0.0, allowed: more; for greedy sampling set eval.temperature to 0"
        )
