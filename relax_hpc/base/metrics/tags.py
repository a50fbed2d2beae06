"""Every metric that a run writes, with its meaning and unit.

docs/metrics.md is generated from this table, and tests compare the table with the metrics of runs.
TensorBoard sorts tags by name. A number before each tag (`01_reward/mean`) therefore puts the most
important groups first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class TagGroup:
    """Tags with the same word before the slash."""

    name: str
    description: str


TAG_GROUPS = (
    TagGroup("reward", "Rewards of the policy"),
    TagGroup("eval", "Held-out prompts"),
    TagGroup(
        "loss",
        "Values of the loss; the mean over the updates of a step, unless the name says otherwise",
    ),
    TagGroup("perf", "Throughput and seconds"),
    TagGroup("episodes", "Episodes of several turns"),
    TagGroup("kl", "Divergence between policies, nats a token"),
    TagGroup("experts", "Distribution of the tokens of a step over experts"),
    TagGroup("algorithm", "Other values of an algorithm"),
    TagGroup("preference", "Pairs of dpo"),
    TagGroup("staleness", "Age of the weights that sampled the tokens, in versions"),
    TagGroup("correction", "Off-policy correction"),
    TagGroup("parity", "Difference between engine and trainer in the same log-probability, nats"),
    TagGroup("r3", "Rollout routing replay: experts that the engine chose"),
    TagGroup("idle", "Share of a role's time in which it waited"),
    TagGroup("weights", "Publication of versions"),
    TagGroup("queue", "Prompt groups and samples in the queue"),
    TagGroup(
        "lengths", "Episodes by the number of tokens that the policy sampled; not in TensorBoard"
    ),
    TagGroup("resources", "Processes and GPUs of each role, at the last sample"),
    TagGroup("trainer", "Last step of trainers other than the actor"),
)
"""Groups of tags, the most important first."""

TAGS = {
    "reward/mean": "mean reward of the episodes that were trained on",
    "reward/mean_generated": "mean reward of all sampled episodes, filtered ones included",
    "reward/std": "standard deviation of the rewards trained on",
    "reward/zero_std_share": "share of the prompt groups whose rewards are all equal (TRL: "
    "frac_reward_zero_std); if rewards are compared within a group, these groups teach nothing",
    "reward/generated": "episodes sampled and rewarded since the last step",
    "reward/component_<name>": "mean of a component of the reward over all sampled episodes",
    "reward/response_tokens": "mean number of tokens that the policy sampled in an episode",
    "reward/stopped_share": "share of the episodes that the policy or the environment ended",
    "episodes/turns": "mean number of turns of the policy in an episode that was trained on",
    "episodes/rows": "mean number of rows of an episode; each context is a row, and so is each "
    "version of a chat that a program changes",
    "episodes/heard_tokens": "mean number of tokens in an episode that did not come from the "
    "policy, between its turns",
    "episodes/ended_<reason>": "share of the episodes by their end: env_done, max_turns, length, "
    "program_failed, a budget",
    "eval/<set>/pass@<k>": "probability that at least one of k responses to a prompt of the set is "
    "right, see eval.pass_at",
    "eval/<set>/loss": "sft and dpo: loss on a set of held-out rows; of sft in nats a token",
    "eval/<set>/accuracy": "dpo: share of held-out pairs whose chosen response gained more "
    "probability than the rejected one",
    "eval/<set>/margin": "dpo: mean margin of held-out pairs",
    "eval/<set>/<reward>": "mean reward of a set, written at the step of the evaluated version",
    "preference/accuracy": "dpo: share of pairs whose margin is above 0",
    "preference/margin": "mean difference of the implicit rewards of a pair, beta log "
    "policy/reference of each",
    "preference/chosen": "mean implicit reward of the chosen responses",
    "preference/rejected": "mean implicit reward of the rejected responses",
    "loss/policy": "clipped surrogate, the part of the loss that learns from rewards; of sft and "
    "dpo their loss",
    "loss/kl": "kl.coefficient times the KL to the reference",
    "loss/entropy": "minus entropy_coefficient times the entropy",
    "loss/divergence": "distill with teacher_top_k: the divergence from the teacher",
    "loss/entropy_nats": "entropy of the policy, nats a token; with kernels `fused`, or if the "
    "algorithm needs it",
    "loss/sampled_entropy_nats": "estimate of the entropy of the policy that sampled the tokens: "
    "mean of minus their log-probability, nats",
    "loss/zero_advantage_share": "share of the trained tokens whose advantage is 0; at 1 rewards "
    "teach nothing",
    "loss/balance": "algorithm.balance_coefficient times the imbalance of experts, summed over "
    "layers",
    "loss/grad_norm": "norm of the gradient before clipping, mean over the updates of the step",
    "loss/grad_norm_max": "largest norm of the updates, if a step has several",
    "loss/clip_fraction": "share of the tokens whose ratio was clipped, mean over the updates of "
    "the step",
    "loss/clip_fraction_max": "largest share of the updates, if a step has several",
    "loss/clip_fraction_drift": "share before the first update: the weights have changed since the "
    "old log-probabilities were computed",
    "loss/ratio": "mean of new / old probability",
    "loss/lr": "learning rate",
    "loss/skipped_updates": "updates of the step that were skipped because their gradient was not "
    "finite",
    "loss/empty_updates": "updates of the step that were skipped because they had no trained token",
    "perf/step_s": "seconds from the first window of a step to its last optimizer step",
    "perf/rollout_tokens_per_s": "sampled tokens per second of generation",
    "perf/train_tokens_per_s": "trained tokens per second of training",
    "perf/cached_share": "share of the tokens in requests to engines whose keys and values were "
    "cached",
    "perf/rollout_tokens": "tokens sampled since the last step, those of failed groups included",
    "perf/trained_tokens": "tokens of the step, prompts included",
    "perf/mfu": "share of the bfloat16 peak of its GPUs that the step used, waiting included; only "
    "for GPUs with a known peak",
    "perf/engine_pause_s": "seconds for which an engine paused to load new weights",
    "perf/unsaved_steps": "steps since the last complete checkpoint",
    "perf/unsaved_checkpoints": "consecutive checkpoints that could not be written",
    "perf/<role>_<kind>_s": "seconds of the role at one kind of work since the last step, summed "
    "over its tasks",
    "kl/reference": "policy to reference",
    "kl/old": "policy to the policy of the old log-probabilities, mean over the updates of the "
    "step",
    "kl/old_max": "largest value of the updates, if a step has several",
    "kl/drift": "value before the first update; 0 if the old log-probabilities are those of the "
    "weights at the begin of the step",
    "kl/rollout": "old log-probabilities to the engine's: staleness and the difference of two "
    "implementations",
    "experts/load_max": "tokens of the busiest expert over the mean of its layer; 1: equal loads",
    "experts/load_entropy": "entropy of the choice of an expert as a share of its maximum, mean "
    "over layers; 1: equal loads",
    "algorithm/dual_clip_fraction": "share of the tokens whose loss ended at clip_cap",
    "algorithm/teacher_kl": "policy to teacher, estimator k1, nats a token",
    "algorithm/teacher_divergence": "divergence from the teacher over its likeliest tokens and the "
    "sum of all other tokens, nats a token",
    "algorithm/teacher_rest": "probability that the teacher gives to all but its likeliest tokens, "
    "mean over tokens",
    "algorithm/second_moment": "m2po: log(policy / rollout)^2 of tokens that can be clipped, over "
    "all tokens",
    "algorithm/<name>": "other values of an algorithm's loss",
    "staleness/mean": "trained version minus the oldest version that sampled a token of the prompt "
    "group, mean",
    "staleness/min": "minimum of a step",
    "staleness/max": "maximum of a step, at most max_staleness",
    "correction/weight": "mean weight of a token",
    "correction/cut_share": "share of the tokens whose ratio was truncated or masked",
    "correction/effective_share": "effective sample size, as a share of the tokens",
    "correction/ratio_min": "minimum ratio old / rollout",
    "correction/ratio_max": "maximum ratio old / rollout",
    "parity/logprob_abs_diff": "mean difference of old and rollout log-probabilities",
    "parity/logprob_max": "maximum difference",
    "parity/ratio_p99": "ratio of old to rollout probability, or its inverse, that one token in "
    "100 exceeds; with mini-batches the largest of theirs",
    "parity/ratio_p999": "the same for one token in 1000",
    "r3/routes_equal": "share of the engine's routes, of a token in a layer, that the trainer also "
    "chose",
    "idle/<role>": "share of the role's time",
    "idle/<role>_for_<peer>": "part of it for which it waited for this role, for a disk or for "
    "another rank",
    "weights/version": "newest published version",
    "weights/publish_lag": "versions between the newest one and the oldest one that a role "
    "generates or scores with",
    "weights/delta_share": "bytes of a difference, as a share of the whole weights",
    "queue/generating": "prompt groups in generation",
    "queue/ready": "prompt groups that wait for training",
    "queue/reissued": "tickets that wait for a new owner",
    "queue/dropped_<reason>": "rows dropped since the begin of the run, by reason; an attempt "
    "without rows counts as one row for each episode",
    "queue/by_<plane>_shards": "shards read since the last step, by the plane that delivered them",
    "queue/by_<plane>_bytes": "bytes of these shards",
    "queue/samples_skipped": "episodes since the last step that should have been stored in "
    "samples/ and were not, for lack of space",
    "lengths/generated_<tokens>": "episodes that ended since the last step, with at most so many "
    "tokens and more than the next smaller number; over: longer than rollout.max_new_tokens; "
    "tokens: sum of their tokens. Filtered and failed ones count too",
    "lengths/trained_<tokens>": "the same of the episodes that were trained on",
    "resources/<role>_cores": "CPU cores that the role's processes use, on all nodes",
    "resources/<role>_memory_bytes": "resident memory of these processes; memory that several of "
    "them share counts for each",
    "resources/<role>_processes": "number of these processes",
    "resources/<role>_threads": "number of their threads",
    "resources/<role>_descriptors": "number of their open files and sockets",
    "resources/<role>_gpu_utilization": "share of the time in which a kernel ran, mean of the "
    "role's GPUs",
    "resources/<role>_gpu_power_w": "power of these GPUs, watts",
    "resources/<role>_gpu_memory_bytes": "used memory of these GPUs, of all processes on them",
    "resources/<role>_gpu_errors": "errors that the driver reported since the start of the "
    "incarnation (XID)",
    "trainer/<role>_<name>": "value of the metric for this role, such as loss_grad_norm or "
    "perf_unsaved_steps",
    "queue/<what>_<reason>": "other failures since the begin of the run: bad lines of prompt "
    "files, errors of engines ...",
}
"""Tag -> its meaning. `<name>` stands for any word. The first matching entry counts."""


@lru_cache(maxsize=4096)
def find_declared_tag(tag: str) -> str:
    """The entry of TAGS that matches ``tag``. Empty: there is none.

    >>> find_declared_tag("perf/actor_train_s"), find_declared_tag("perf/mine")
    ('perf/<role>_<kind>_s', '')
    """
    return next((declared for declared in TAGS if _pattern(declared).fullmatch(tag)), "")


def tensorboard_tag(tag: str) -> str:
    """``tag`` with the number of its group, so that TensorBoard shows the first group first.

    >>> [tensorboard_tag(tag) for tag in ("reward/mean", "perf/actor_train_s", "mine/score")]
    ['01_reward/mean', '14_time/actor_train_s', 'mine/score']
    """
    group, _, name = tag.partition("/")
    shown = _TIME if find_declared_tag(tag) == _SECONDS else _SHOWN_IN.get(tag, group)
    return f"{_NUMBERS[shown]:02d}_{shown}/{name}" if shown in _NUMBERS else tag


_SECONDS, _TIME = "perf/<role>_<kind>_s", "time"
"""Tag of the seconds of each kind of work, and its group in TensorBoard, which stands before idle.
In group perf, these many tags would hide the tags of a run's speed."""
_SHOWN_IN = {"reward/generated": "queue"}
"""Tag -> its group in TensorBoard. In group reward, this count would be the first of all charts."""
_NAMES = [group.name for group in TAG_GROUPS]
_NAMES.insert(_NAMES.index("idle"), _TIME)
_NUMBERS = {name: number for number, name in enumerate(_NAMES, start=1)}


@lru_cache
def _pattern(declared: str) -> re.Pattern[str]:
    escaped = re.sub(r"([.+*?])", r"\\\1", declared)
    return re.compile(re.sub(r"<\w+>", r"[^/]+", escaped))


# Names in release 0.1.
declared = find_declared_tag
in_tensorboard = tensorboard_tag
