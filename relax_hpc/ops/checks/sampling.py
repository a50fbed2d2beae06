"""Checks of how responses are drawn, for training and for evaluations, a line for each mistake."""

from __future__ import annotations

from collections.abc import Iterator

from relax_hpc.config.schema import Config, EvalConfig, RolloutConfig

WHY = "tokens would be learned from with weights that are not those of how they were drawn"


def check_sampling(config: Config) -> Iterator[str]:
    """Check the sampling of `rollout` and `eval`."""
    shape = config.rollout
    for key, least in (("temperature", 0), ("top_p", 0), ("top_k", 1), ("min_p", 1)):
        if (found := getattr(shape, key)) == least:
            yield (
                f"rollout.{key}: found {found}, which leaves one token; equal responses to a "
                "prompt teach nothing"
            )
    if cut := cut_by(shape):
        yield from _cut(config, cut)
    yield from _evaluation(config.eval)


_WHOLE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Values with which tokens are drawn from the whole vocabulary."""


def cut_by(shape: RolloutConfig | EvalConfig) -> str:
    """The first setting by which less than the whole vocabulary is drawn from; empty: there is
    none."""
    return next((key for key, value in _WHOLE.items() if getattr(shape, key) != value), "")


def _cut(config: Config, key: str) -> Iterator[str]:
    """Mistakes of a run that draws from a part of the vocabulary, by the setting ``key``.

    A token's weight is old / rollout, and rollout is the distribution it was drawn from: the part
    that is left. An expectation over the whole policy cannot be estimated from such tokens.
    """
    algorithm, whole = config.algorithm, f"{_WHOLE[key]:g}"
    value = f"rollout.{key}: found {getattr(config.rollout, key)}"
    if algorithm.ratio_to_rollout:
        yield (
            f"{value} with algorithm {algorithm.name}, allowed: {whole}; its ratio is to the "
            "engine's log-probabilities, which are of a part of the vocabulary then"
        )
        return
    if algorithm.kl.coefficient and algorithm.kl.importance:
        yield (
            f"{value} with algorithm.kl.importance, allowed: {whole}, or kl.importance false; "
            "tokens that cannot be drawn have no part in the divergence then"
        )
    if config.rollout.engine.kind == "simulated":
        yield f"{value} with engine simulated, which draws tokens evenly; leave it out"
    if algorithm.correction.kind == "off":
        yield f"{value} with algorithm.correction.kind off, allowed: truncate or mask; {WHY}"
    elif algorithm.correction.level == "sequence":
        yield (
            f"{value} with algorithm.correction.level sequence, allowed: token; a row's weights "
            "multiply, and long responses would have none"
        )
    if "rollout_logprobs" in algorithm.needs:
        yield (
            f"{value} with algorithm {algorithm.name}, whose rewards hold rollout_logprobs as if "
            "of the whole policy"
        )


def _evaluation(settings: EvalConfig) -> Iterator[str]:
    if settings.responses > 1 and not settings.temperature:
        yield (
            f"eval.responses: found {settings.responses} with eval.temperature 0, allowed: 1; "
            "they would be equal, set a temperature"
        )
    for k in settings.pass_at:
        if not 1 <= k <= settings.responses:
            remedy = f"; set eval.responses to {k} or more" if k > settings.responses else ""
            allowed = f"1 to eval.responses, {settings.responses}"
            yield f"eval.pass_at: found {k}, allowed: {allowed}{remedy}"
    if settings.top_p == 0:
        yield (
            "eval.top_p: found 0.0, allowed: more; eval.temperature 0 takes the most probable token"
        )
