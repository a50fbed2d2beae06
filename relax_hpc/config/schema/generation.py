"""Settings of rollout: engines, sampling, rewards and filters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relax_hpc.base.settings import bounded


@dataclass(kw_only=True, slots=True)
class SimulatedConfig:
    """Response times of the `simulated` engine."""

    response_s: float = bounded(0.0, 0.0)
    """Median time in seconds of a response with max_new_tokens tokens. Shorter responses take
    less."""
    sigma: float = bounded(0.0, 0.0)
    """Standard deviation of the logarithm of response times, which are lognormal. With 0 all times
    are equal; with 1 there is a long tail."""
    concurrency: int = bounded(64, 1)
    """Number of responses that an engine generates at a time."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The inference engine of a rollout replica."""

    kind: str = "sglang"
    """Kind of engine: `sglang`, `transformers`, `simulated`, or your own class as
    `package.module:Class`. `transformers` is a small seeded engine for tests; it is slow and
    reproducible bit for bit. `simulated` has no model and samples tokens uniformly. It serves to
    try a cluster, and to measure and test everything except the engine."""
    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Type of the engine's computation. If it is empty, the engine uses `model.dtype`, like the
    trainer."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Arguments of the SGLang server by name (`max_total_tokens: 16384`), passed without change."""
    port: int = bounded(0, 0, 65535)
    """First port: replica r uses port + r. With 0 a free port is chosen."""
    start_timeout_s: float = bounded(0.0, 0.0)
    """Seconds between the engine's start and its first response. With 0 the limit is five minutes
    plus one second for every 100 MB of the model's weights."""
    request_timeout_s: float = bounded(120.0, 0.1)
    """Seconds without a new token, of any request, after which a generation request of the engine
    fails. The duration of a whole response has no limit. The time of a weight update does not
    count."""
    update_timeout_s: float = bounded(60.0, 0.1)
    """Seconds for a weight update, plus one second for every 100 MB of weights. It also limits
    other calls that generate nothing."""
    max_failures: int = bounded(3, 1)
    """Number of consecutive failures after which the engine and its group are restarted."""


@dataclass(kw_only=True, slots=True)
class ExternalConfig:
    """Engines that other programs started, and that join the run."""

    key_file: str = ""
    """File with the API key of SGLang servers that join by their URL. All of them have the same
    key. If it is empty, no key is sent."""
    heartbeat_s: float = bounded(1.0, 0.01)
    """Seconds between two heartbeat requests to an engine."""
    heartbeat_timeout_s: float = bounded(2.0, 0.01)
    """Seconds for the answer to a heartbeat request. After two requests in a row without an answer,
    the engine is lost: other engines continue its work."""
    compare_timeout_s: float = bounded(120.0, 0.1)
    """Seconds for another engine of the run to serve the version of an engine that joins. The
    log-probabilities of the two are then compared."""


@dataclass(kw_only=True, slots=True)
class GenrmConfig:
    """The generative reward model of a group with the role genrm: SGLang servers that the reward
    `judge` uses. Their weights do not change."""

    path: str = ""
    """Hugging Face directory of the model, of any family that SGLang serves."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Type of the computation. If it is empty, `model.dtype` is used."""
    replicas: int = bounded(1, 1)
    """Number of servers on each node of the group. Each question goes to the server with the fewest
    open questions."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Arguments of the SGLang server by name (`tp_size: 8`), passed without change."""
    start_timeout_s: float = bounded(0.0, 0.0)
    """Seconds between a server's start and its first response. With 0 the limit is five minutes
    plus one second for every 100 MB of the model's weights."""


PartialRollout = Literal["off", "keep", "recompute"]


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Rollout: engines generate responses, and rewards are computed."""

    replicas: int = bounded(1, 1)
    """Number of engine processes."""
    without: list[str] = field(default_factory=list)
    """Engines among these replicas that do not run, such as `rollout/3`: the group or elastic
    member, and the number, as in `status --json`. `relax-hpc scale RUN --group rollout --without 3`
    changes it while the run continues."""
    processes: int = bounded(1, 1)
    """Number of processes of the role on each node. They share its replicas. One process handles at
    most some thousand samples per second, however fast its engines are."""
    groups_per_request: int = bounded(8, 1)
    """Maximum number of prompt groups that are sent to an engine in one HTTP request. Only groups
    that are ready at the same time are combined."""
    requests_in_flight: int = bounded(2, 1)
    """Number of requests that an engine processes at the same time: up to this number times
    `groups_per_request` prompt groups, each independent of the others."""
    max_new_tokens: int = bounded(256, 1)
    """Maximum number of tokens of a row after its prompt. In episodes of several turns,
    observations count."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response. The text that was found is part of the response."""
    temperature: float = bounded(1.0, 0.0)
    """Divisor of the logits before a token is sampled."""
    top_p: float = bounded(1.0, 0.0, 1.0)
    """Sample from the most likely tokens whose probabilities sum to this share. Log-probabilities
    are renormalized over the tokens that top_k, top_p and min_p keep. The loss corrects for the
    probability that was cut off (algorithm.correction)."""
    top_k: int = bounded(0, 0)
    """Sample from this number of most likely tokens. 0 means all tokens. SGLang reports
    log-probabilities with top_p or min_p only together with a top_k of 2 to 4096 (its flag
    sampling_mask_max_tokens). Its responses are longer the more tokens are kept."""
    min_p: float = bounded(0.0, 0.0, 1.0)
    """Sample from tokens whose probability is at least this share of the largest probability."""
    reward: str = ""
    """Reward for training: a name in `relax_hpc.rewards`, or `package.module:function` of one
    sample or of a prompt group. `weighted` and `by_row` combine other rewards, see the section
    `reward`. If it is empty, the task's reward is used. It is required for prompts from files, and
    for your own task without a reward."""
    reward_timeout_s: float = bounded(60.0, 0.1)
    """Seconds for the rewards of a prompt group. Beyond them the group fails with the reason
    `reward_timeout`, and the process that computed them is replaced."""
    reward_workers: int = bounded(2, 0)
    """Maximum number of processes in which each process of the role computes your own rewards;
    evaluation uses as many others. Fast built-in rewards need no such process; slow built-in
    rewards have at least one. With 0 your own rewards are computed in threads of the role itself,
    which no timeout can stop."""
    max_failed_share: float = bounded(0.5, 0.0, 1.0)
    """Stop with exit 93 if a larger share of the last 64 prompt groups failed, or if all of them
    failed. A failed group is counted by its reason, and another prompt replaces it under its
    ticket, as often as necessary."""
    episode_timeout_s: float = bounded(600.0, 0.1)
    """Seconds for an episode that a task plays itself or with an environment. The time of its
    responses and the wait for a free environment do not count. Beyond them the prompt group fails
    with the reason `episode_timeout`."""
    filter: str = ""
    """Filter of the prompt groups for training: a name in `relax_hpc.rollout.filters`, such as
    `rewards_differ`, or `package.module:function` of the rewards. Other groups are dropped with the
    reason `filtered`, and other prompts replace them under the same tickets. If it is empty, all
    groups are used."""
    over_sampling: float = bounded(0.0, 0.0, 1.0)
    """Share of the tickets for which a second prompt group is generated, in case the first group is
    filtered out or fails. An unused spare stays in the queue for later tickets. With max_staleness
    0 it is aborted and dropped with the reason `surplus`, so spares change the duration of a step
    and not its training rows."""
    max_filtered_share: float = bounded(0.99, 0.0, 1.0)
    """Stop with exit 93 if a larger share of the last 256 prompt groups was filtered out."""
    partial_rollout: PartialRollout = "keep"
    """Effect of new weights on unfinished responses. `keep`: responses continue with the keys and
    values that older weights computed. `recompute`: keys and values are recomputed with the new
    weights. `off`: the engine loads new weights when all its responses are finished, so that one
    version samples each response."""
    save_partial: Literal["off", "samples", "tokens"] = "samples"
    """Parts of unfinished prompt groups that are stored in their logs in the queue and resumed
    after a restart. `off`: none. `samples`: finished samples, and the finished turns of unfinished
    ones. `tokens`: also the tokens of unfinished turns; the engine continues from them, but not bit
    for bit like an engine that was not interrupted. SGLang reports tokens every 64 tokens, and
    reports no more tokens of a response after its weights have changed."""
    save_partial_every_s: float = bounded(10.0, 0.1)
    """Seconds between two segments of an unfinished prompt group. If the process is killed, tokens
    since the last segment are lost. If the group is asked to stop, they are stored."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    external: ExternalConfig = field(default_factory=ExternalConfig)
