"""Settings of rollout: engines, sampling, rewards, filters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relax_hpc.base.settings import bounded


@dataclass(kw_only=True, slots=True)
class SimulatedConfig:
    """Response times of the `simulated` engine."""

    response_s: float = bounded(0.0, 0.0)
    """Seconds for a response of max_new_tokens, the median over samples; one that ends before takes
    less."""
    sigma: float = bounded(0.0, 0.0)
    """Standard deviation of the logarithm of response times, which are lognormal. 0: all alike; 1:
    a long tail."""
    concurrency: int = bounded(64, 1)
    """Responses that an engine draws at a time."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The inference engine of a rollout replica."""

    kind: str = "sglang"
    """Kind of engine: `sglang`, `transformers`, `simulated`, or one's own as
    `package.module:Class`. `transformers` is a small seeded engine for tests: slow, reproducible
    bit for bit. `simulated` has no model and draws tokens evenly: for trying a cluster, and for
    measuring and breaking what is around engines."""
    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Type in which the engine computes; empty: `model.dtype`, as the trainer does."""
    flags: dict[str, Any] = field(default_factory=dict)
    """SGLang server arguments by name (`max_total_tokens: 16384`), passed through as they are."""
    port: int = bounded(0, 0, 65535)
    """First port; replica r takes port + r. 0: a free one."""
    start_timeout_s: float = bounded(0.0, 0.0)
    """Seconds between the engine's start and its first answer. 0: five minutes, and a second for
    every 100 MB of the model's weights."""
    request_timeout_s: float = bounded(120.0, 0.1)
    """A generation request fails when its engine has given no token, of this request or another,
    for so long; how long a whole response takes is not bounded. The time of an update of weights
    does not count."""
    update_timeout_s: float = bounded(60.0, 0.1)
    """Seconds for an update of weights, plus one for every 100 MB of them; and for other calls that
    generate nothing."""
    max_failures: int = bounded(3, 1)
    """Consecutive failures after which the engine is restarted (with its group)."""


@dataclass(kw_only=True, slots=True)
class GenrmConfig:
    """The generative reward model of a group with role genrm: SGLang servers that reward `judge`
    asks, whose weights stay as they are."""

    path: str = ""
    """Hugging Face directory of the model, of any family that SGLang serves."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Type in which it computes; empty: `model.dtype`."""
    replicas: int = bounded(1, 1)
    """Servers, as many on each node of the group; each question goes to the one that has the
    fewest."""
    flags: dict[str, Any] = field(default_factory=dict)
    """SGLang server arguments by name (`tp_size: 8`), passed through as they are."""
    start_timeout_s: float = bounded(0.0, 0.0)
    """Seconds between a server's start and its first answer. 0: five minutes, and a second for
    every 100 MB of the model's weights."""


PartialRollout = Literal["off", "keep", "recompute"]


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Rollout: generation of responses by engines, and their rewards."""

    replicas: int = bounded(1, 1)
    """Engine processes."""
    without: list[str] = field(default_factory=list)
    """Engines of these that do not serve, such as `rollout/3`: group or member, and number, as
    `status --json` names them. `relax-hpc scale RUN --group rollout --without 3` changes it while
    the run goes on."""
    processes: int = bounded(1, 1)
    """Processes of the role on each node, which divide its replicas among them: one makes rows of
    no more than some thousand samples a second, however fast its engines are."""
    groups_per_request: int = bounded(8, 1)
    """Prompt groups sent to an engine in one HTTP request, at most: those that come at once."""
    requests_in_flight: int = bounded(2, 1)
    """Requests that an engine works on at once: up to this many times `groups_per_request` prompt
    groups, each by itself."""
    max_new_tokens: int = bounded(256, 1)
    """Tokens that a row may have behind its prompt; of several turns all of them, with what is said
    in between."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response; the one that is found belongs to it."""
    temperature: float = bounded(1.0, 0.0)
    """Divisor of the logits before a token is drawn."""
    top_p: float = bounded(1.0, 0.0, 1.0)
    """Draw from the most probable tokens that have this much of the probability together.
    Log-probabilities are renormalised over the tokens that top_k, top_p and min_p keep. The loss
    corrects for the probability that was cut off (algorithm.correction)."""
    top_k: int = bounded(0, 0)
    """Draw from so many tokens, the most probable ones; 0: all. SGLang tells log-probabilities of
    top_p and min_p only beside a top_k of 2 to 4096 (its flag sampling_mask_max_tokens), in longer
    answers the more tokens it leaves."""
    min_p: float = bounded(0.0, 0.0, 1.0)
    """Draw from tokens that are at least this share as probable as the most probable one."""
    reward: str = ""
    """Reward that is learned from: name in `relax_hpc.rewards`, or `package.module:function`, of
    one sample or of a prompt group; `weighted` and `by_row` are made of others, see the section
    `reward`. Empty: the task's own. It must be named for prompts of files, and for a task of your
    own that has no reward."""
    reward_timeout_s: float = bounded(60.0, 0.1)
    """Deadline of the rewards of a prompt group; past it, the group fails as `reward_timeout`, and
    the process that was at them is replaced."""
    reward_workers: int = bounded(2, 0)
    """Processes, at most, in which each process of the role has rewards of one's own computed,
    evaluation's in as many others. Quick rewards that are built in need none, of the others there
    is one at least. 0: one's own in the role itself, in threads, which nothing can end."""
    max_failed_share: float = bounded(0.5, 0.0, 1.0)
    """Stop (exit 93) when a larger share of the last 64 prompt groups failed, or all of them. Each
    that fails is counted by its reason, and replaced by another prompt under its ticket, however
    often that takes."""
    episode_timeout_s: float = bounded(600.0, 0.1)
    """Deadline of an episode that a task plays itself, or against an environment, without what its
    responses take, and without the wait for a place among environments; past it the prompt group
    fails as `episode_timeout`."""
    filter: str = ""
    """Filter of the prompt groups that are trained on: name in `relax_hpc.rollout.filters`, such as
    `rewards_differ`, or `package.module:function` of the rewards. The others are dropped as
    `filtered`, and replaced by other prompts under the same tickets. Empty: all."""
    over_sampling: float = bounded(0.0, 0.0, 1.0)
    """Share of the tickets for which a second prompt group is drawn beside the first, to be there
    if the first is filtered out or fails. A spare that nobody needs waits in the queue for later
    tickets; at max_staleness 0 it is aborted and dropped as `surplus`, so that spares change how
    long a step takes and nothing that is trained."""
    max_filtered_share: float = bounded(0.99, 0.0, 1.0)
    """Stop (exit 93) when a larger share of the last 256 prompt groups was filtered out."""
    partial_rollout: PartialRollout = "keep"
    """Effect of new weights on responses that are being drawn. `keep`: they go on at once, over the
    keys and values that older weights have left; `recompute`: over keys and values of the new ones;
    `off`: the engine takes new weights when all that it is at has ended, so that a response is
    drawn by one version."""
    save_partial: Literal["off", "samples", "tokens"] = "samples"
    """Parts of unfinished prompt groups that are appended to their logs in the queue, to go on with
    after a restart: nothing, finished `samples`, of others turns that are over, or the `tokens` of
    unfinished ones too: the engine goes on with these, if not bit for bit as one that was not
    interrupted. SGLang tells of them every 64 tokens, and no more of a response once its weights
    have changed."""
    save_partial_every_s: float = bounded(10.0, 0.1)
    """Seconds between two segments of an unfinished prompt group; tokens drawn since the last one
    are lost by a kill, and appended when the group is asked to stop."""
    engine: EngineConfig = field(default_factory=EngineConfig)
