"""Every metric that a run writes: what it is, in which unit, and where it stands among the others.

docs/metrics.md is made of this table, and tests compare it with what runs write. TensorBoard sorts
tags by name, so there each has the place of its part before it (`01_reward/mean`): what people look
for first comes first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class TagGroup:
    """Tags with the same word before the slash."""

    name: str
    about: str


TAG_GROUPS = (
    TagGroup("reward", "What the policy gets for what it writes"),
    TagGroup("eval", "Held-out prompts"),
    TagGroup(
        "loss",
        "What the optimizer sees; of several updates in a step the mean, unless the name says "
        "otherwise",
    ),
    TagGroup("perf", "Throughput and seconds"),
    TagGroup("episodes", "Episodes of several turns"),
    TagGroup("kl", "How far policies are from each other, nats a token"),
    TagGroup("experts", "How the tokens of a step were spread over experts"),
    TagGroup("algorithm", "What else an algorithm says of its loss"),
    TagGroup("preference", "What dpo has made of its pairs"),
    TagGroup("staleness", "How old the weights were that drew the tokens, versions"),
    TagGroup("correction", "What off-policy correction does"),
    TagGroup("parity", "How far engine and trainer differ in the same log-probability, nats"),
    TagGroup("r3", "Rollout routing replay: experts that the engine chose"),
    TagGroup("idle", "Share of a role's time in which it waited"),
    TagGroup("weights", "Versions on their way to engines"),
    TagGroup("queue", "Prompt groups and samples on their way"),
    TagGroup("trainer", "What roles that train beside the actor report of their last step"),
)
"""Parts of the tags, in the order in which people look for them."""

TAGS = {
    "reward/mean": "mean reward of the episodes that were trained on",
    "reward/mean_generated": "mean reward of all episodes that were drawn, those that a filter "
    "dropped too",
    "reward/std": "standard deviation of the rewards trained on",
    "reward/zero_std_share": "share of the prompt groups whose rewards are all equal (TRL: "
    "frac_reward_zero_std); if "
    "rewards are compared within a group, these teach nothing",
    "reward/generated": "episodes drawn and given a reward since the last step",
    "reward/component_<name>": "mean of a component that the reward names, over all episodes that "
    "were drawn",
    "reward/response_tokens": "tokens that the policy sampled in an episode, mean",
    "reward/stopped_share": "share of the episodes that the policy ended itself, or their "
    "environment",
    "episodes/turns": "turns of the policy in an episode that was trained on, mean",
    "episodes/rows": "rows of one, mean; several contexts are several rows, and so is a chat that "
    "a program changes",
    "episodes/heard_tokens": "tokens that others said in one between turns, mean",
    "episodes/ended_<reason>": "share of those that ended so: env_done, max_turns, length, "
    "program_failed, a budget",
    "eval/<set>/pass@<k>": "probability that one of k responses to a prompt of the set is right, "
    "see eval.pass_at",
    "eval/<set>/loss": "of sft and dpo: the loss of a set of held-out rows; of sft nats a token",
    "eval/<set>/accuracy": "of dpo: share of held-out pairs whose chosen response gained more than "
    "the rejected one",
    "eval/<set>/margin": "of dpo: mean margin of held-out pairs",
    "eval/<set>/<reward>": "mean reward of a set, written at the version that it is of",
    "preference/accuracy": "of dpo: share of pairs whose margin is above 0",
    "preference/margin": "mean difference of the implicit rewards of a pair, beta log "
    "policy/reference of each",
    "preference/chosen": "mean implicit reward of the chosen responses",
    "preference/rejected": "mean implicit reward of the rejected responses",
    "loss/policy": "the clipped surrogate, the loss's part that learns from rewards; of sft and "
    "dpo their loss",
    "loss/kl": "kl.coefficient times the KL to the reference",
    "loss/entropy": "minus entropy_coefficient times the entropy",
    "loss/divergence": "of distill with teacher_top_k: the divergence from the teacher",
    "loss/entropy_nats": "entropy of the policy, nats a token; with kernels `fused`, or if the "
    "algorithm asks for it",
    "loss/sampled_entropy_nats": "estimate of the entropy of the policy that drew the tokens: mean "
    "of minus their "
    "log-probability, nats",
    "loss/zero_advantage_share": "share of the trained tokens whose advantage is 0; at 1 rewards "
    "teach nothing",
    "loss/balance": "algorithm.balance_coefficient times the imbalance of experts, summed over "
    "layers",
    "loss/grad_norm": "norm of the gradient before clipping, mean over the updates of the step",
    "loss/grad_norm_max": "the largest of the updates, where a step has several",
    "loss/clip_fraction": "share of the tokens whose ratio was clipped, mean over the updates of "
    "the step",
    "loss/clip_fraction_max": "the largest of the updates, where a step has several",
    "loss/clip_fraction_drift": "the same before the first update: weights have moved since the "
    "old log-probabilities",
    "loss/ratio": "mean of new / old probability",
    "loss/lr": "learning rate",
    "loss/skipped_updates": "updates of the step that were left out because their gradient was not "
    "finite",
    "loss/empty_updates": "updates of the step that were left out because no token was trained in "
    "them",
    "perf/step_s": "seconds from a step's first window to its last optimizer step",
    "perf/rollout_tokens_per_s": "tokens drawn a second of generation",
    "perf/train_tokens_per_s": "tokens trained on a second of training",
    "perf/cached_share": "share of the tokens that engines were asked with whose keys and values "
    "they had",
    "perf/rollout_tokens": "tokens drawn since the last step, those of groups that came to "
    "nothing too",
    "perf/trained_tokens": "tokens of the step, prompts included",
    "perf/mfu": "share of its GPUs' bfloat16 peak that the step's training took, waiting included; "
    "where that is known",
    "perf/engine_pause_s": "seconds for which an engine stood still to take new weights",
    "perf/unsaved_steps": "steps since the last checkpoint that is whole",
    "perf/unsaved_checkpoints": "checkpoints in a row that could not be written",
    "perf/<role>_<kind>_s": "seconds of the role at one kind of work since the last step, summed "
    "over its tasks",
    "kl/reference": "policy to reference",
    "kl/old": "policy to the one of the old log-probabilities, mean over the updates of the step",
    "kl/old_max": "the largest of the updates, where a step has several",
    "kl/drift": "the same before the first update; 0 where the old log-probabilities are those of "
    "the step's begin",
    "kl/rollout": "old log-probabilities to the engine's: staleness and two implementations "
    "together",
    "experts/load_max": "tokens of the busiest expert over the mean of its layer's; 1: all have as "
    "many",
    "experts/load_entropy": "entropy of the choice of an expert as a share of its largest, mean "
    "over layers; 1: even",
    "algorithm/dual_clip_fraction": "share of the tokens whose loss ended at clip_cap",
    "algorithm/teacher_kl": "policy to teacher by k1, nats a token",
    "algorithm/teacher_divergence": "from the teacher over its likeliest tokens and the rest, nats "
    "a token",
    "algorithm/teacher_rest": "probability that the teacher gives to all but its likeliest tokens, "
    "mean over tokens",
    "algorithm/second_moment": "of m2po: log(policy / rollout)^2 of tokens that a clip can hold, "
    "over all tokens",
    "algorithm/<name>": "what else an algorithm says of its loss",
    "staleness/mean": "version trained minus the oldest version that drew a token of the prompt "
    "group, mean",
    "staleness/min": "the least of a step",
    "staleness/max": "the most of a step, at most max_staleness",
    "correction/weight": "mean weight of a token",
    "correction/cut_share": "share of the tokens whose ratio was truncated or masked",
    "correction/effective_share": "tokens of the old policy itself that would say as much, as a "
    "share",
    "correction/ratio_min": "least ratio old / rollout",
    "correction/ratio_max": "largest ratio old / rollout",
    "parity/logprob_abs_diff": "mean difference of old and rollout log-probabilities",
    "parity/logprob_max": "the largest",
    "parity/ratio_p99": "ratio of old to rollout probability, or its inverse, that one token in "
    "100 exceeds; with "
    "mini-batches the largest of theirs",
    "parity/ratio_p999": "the same of one in 1000",
    "r3/routes_equal": "share of the engine's routes, of a token in a layer, that are the "
    "trainer's own choice too",
    "idle/<role>": "share of the role's time",
    "idle/<role>_for_<peer>": "the part of it for which it waited for this role, for a disk or for "
    "another rank",
    "weights/version": "newest version that is published",
    "weights/publish_lag": "versions between the newest and the oldest that anybody generates or "
    "scores with",
    "weights/delta_share": "bytes of a difference, as a share of the whole",
    "queue/generating": "prompt groups in generation",
    "queue/ready": "prompt groups that wait for training",
    "queue/reissued": "tickets that wait to be given out again",
    "queue/dropped_<reason>": "rows dropped so far, by reason; an attempt without rows counts for "
    "one an episode",
    "queue/by_<plane>_shards": "shards read since the last step, by the way they came",
    "queue/by_<plane>_bytes": "the same in bytes",
    "queue/samples_skipped": "episodes that were to be kept for people since the last step and "
    "found no room",
    "trainer/<role>_<name>": "the role's own value of the metric, such as loss_grad_norm or "
    "perf_unsaved_steps",
    "queue/<what>_<reason>": "other things that went wrong so far: bad lines of prompt files, "
    "faults of engines ...",
}
"""Tag -> its meaning; `<name>` stands for any word. The first that fits counts."""


@lru_cache(maxsize=4096)
def find_declared_tag(tag: str) -> str:
    """The entry of TAGS that ``tag`` is one of; empty: it is none.

    >>> find_declared_tag("perf/actor_train_s"), find_declared_tag("perf/mine")
    ('perf/<role>_<kind>_s', '')
    """
    return next((known for known in TAGS if _pattern(known).fullmatch(tag)), "")


def tensorboard_tag(tag: str) -> str:
    """``tag`` with the place of its part before it, so that sorting by name shows the first part
    first.

    >>> [tensorboard_tag(tag) for tag in ("reward/mean", "perf/actor_train_s", "mine/score")]
    ['01_reward/mean', '14_time/actor_train_s', 'mine/score']
    """
    part, _, name = tag.partition("/")
    shown = _TIME if find_declared_tag(tag) == _SECONDS else _SHOWN_IN.get(tag, part)
    return f"{_PLACES[shown]:02d}_{shown}/{name}" if shown in _PLACES else tag


_SECONDS, _TIME = "perf/<role>_<kind>_s", "time"
"""Tag of the seconds of each kind of work, and its part in TensorBoard, before idle: among other
tags these many would hide what a run's speed is."""
_SHOWN_IN = {"reward/generated": "queue"}
"""Tag -> its part in TensorBoard. This count would be the first chart of all, before the reward."""
_NAMES = [part.name for part in TAG_GROUPS]
_NAMES.insert(_NAMES.index("idle"), _TIME)
_PLACES = {name: place for place, name in enumerate(_NAMES, start=1)}


@lru_cache
def _pattern(known: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", r"[^/]+", re.sub(r"([.+*?])", r"\\\1", known)))


# Names in release 0.1.
declared = find_declared_tag
in_tensorboard = tensorboard_tag
