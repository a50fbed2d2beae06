"""Settings of the queue, weights, checkpoints, evaluation, samples and liveness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from relax_hpc.base.settings import bounded

Durability = Literal["commit", "flush", "none"]
Mode = Literal["auto", "required", "off"]


@dataclass(kw_only=True, slots=True)
class PlanesConfig:
    """Ways in which rows pass between processes in memory: the first that both have, else the file
    of the shard.

    `auto`: where it works; `required`: a run without it does not begin; `off`: never.
    """

    shm: Mode = "auto"
    """Shared memory within a node, without a copy."""
    rdma: Mode = "auto"
    """RDMA between nodes, by InfiniBand cards, where package nixl-cu12 is installed. `required`:
    nodes without a card have it too, for processes on them that cannot share memory."""
    tcp: Mode = "auto"
    """TCP, wherever there is a network."""


@dataclass(kw_only=True, slots=True)
class QueueConfig:
    """The TransferQueue."""

    durability: Durability = "commit"
    """Guarantee that an accepted write has, of rows and journal alike. `commit`: on disk; survives
    a power loss of all nodes. `flush`: written to the operating system; survives the death of any
    process, and of any node but the one that wrote. `none`: the same for rows, but the journal may
    be a second late; survives the death of any process but the controller: then every group begins
    again, from the last checkpoint, with what the journal has."""
    wait_timeout_s: float = bounded(600.0, 1.0)
    """Deadline of every wait for rows, tickets or versions; running past it ends the group with
    exit 75. Only time counts in which all groups are there and none is at work: see
    liveness.longest_wait_s."""
    keep_steps: int = bounded(2, 0)
    """Shards of steps older than the last checkpoint by more than this are deleted."""
    max_bytes: int = bounded(64 << 30, 1)
    """Bytes of rows that wait for training. At this bound nothing is generated but what the next
    step still needs."""
    max_rows: int = bounded(1_000_000, 1)
    """Samples in generation or waiting for training, bounded in the same way."""
    planes: PlanesConfig = field(default_factory=PlanesConfig)
    memory_bytes: int = bounded(4 << 30, 0)
    """Bytes of memory of each process for rows that others may still read; beyond it they are on
    disk alone."""
    max_medium_bytes: int = bounded(256 << 20, 1)
    """Bytes of one image, video or sound of a prompt; a prompt with a larger one fails as
    `media_too_large`."""
    max_group_media_bytes: int = bounded(1 << 30, 1)
    """Bytes of all media of a prompt group together."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    """Transfer of new weights from the actor to roles that generate and score: by `queue.planes`,
    else files."""

    publish_every: int = bounded(1, 1)
    """Versions from one that is published to the next, at most `max_staleness` + 1. The last is
    always published. Where rows come from files nobody reads versions, and `keep_every` says which
    are published beside the first and last."""
    publish_lag: int = bounded(64, 0)
    """An engine that serves a version so much older than the newest gets no new prompts before it
    has a newer one. It delays prompts; how stale samples may be is `max_staleness` alone."""
    file_every: int = bounded(1, 0)
    """Versions whose number is a multiple of it are written to disk too, beside training, as
    Hugging Face directories in `weights/`, not synced; those that are superseded by then are passed
    over. Others are in the actor's memory alone, and gone with it. 0: the last version only, which
    is always written, and synced; so, unless it is set, where rows come from files."""
    keep_every: int = bounded(0, 0)
    """Versions whose number is a multiple of this are written in any case, synced, and never
    deleted. 0: none."""
    anchor_every: int = bounded(0, 0)
    """Versions from one to the next that others are published as differences to, beside the whole
    ones: readers on other nodes that have it read less. Of use where little changes in a step, as
    in bfloat16 at small learning rates; it costs every rank and every node one more copy of the
    weights in memory. 0: never."""
    slabs: int = bounded(0, 0)
    """Versions that the actor keeps in memory, each rank its part. 0: `max_staleness` + 2, with
    which no version is overwritten while an engine must have it; with fewer, at least 2, a slow one
    has to take the next."""
    read_timeout_s: float = bounded(120.0, 0.1)
    """Seconds for one record of a version to arrive, and for tries to read a version that cannot be
    read."""
    write_timeout_s: float = bounded(3600.0, 1.0)
    """Seconds for the files of a version to be written, beside training; a write that takes longer
    ends the actor."""
    chunk_bytes: int = bounded(32 << 20, 4096)
    """Bytes of a record: while one is verified, the next one is read. A single tensor is never
    divided."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints of the actor: when they are made, and which are kept."""

    every: int = bounded(50, 1)
    """Steps between checkpoints; the last step always has one."""
    every_s: float = bounded(600.0, 0.0)
    """Seconds after which a checkpoint is made at the end of the step, before `checkpoint.every`
    steps are done. 0: only steps count."""
    keep_last: int = bounded(2, 1)
    keep_every: int = bounded(0, 0)
    """Checkpoints of steps that are multiples of it are never deleted. 0: only the last ones
    stay."""
    timeout_s: float = bounded(3600.0, 1.0)
    """Seconds for a checkpoint to be written, beside training; one that takes longer ends the
    actor."""
    max_failures: int = bounded(4, 1)
    """Checkpoints in a row that could not be written, for other causes than a full disk, before the
    run stops with exit
    93. On a full disk it is tried again until there is room, or the next one is due."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Evaluation by the rollout engines; of sft and dpo by the actor, which scores held-out
    rows."""

    every: int = bounded(20, 0)
    """Versions between evaluations, version 0 and the last included; 0: never."""
    samples: int = bounded(200, 1)
    """Prompts, or rows, of each set."""
    reward: str = ""
    """Reward of evaluation, as rollout.reward; its mean over a set is reported as eval/<set>/<name
    of the function>. Empty: the one that is learned from, reported as eval/<set>/reward."""

    responses: int = bounded(1, 1)
    """Responses to each prompt, over which its reward is the mean; more than one need a
    temperature."""
    temperature: float = bounded(0.0, 0.0)
    """Sampling temperature; 0: the most probable token."""
    top_p: float = bounded(1.0, 0.0, 1.0)
    top_k: int = bounded(0, 0)
    min_p: float = bounded(0.0, 0.0, 1.0)
    max_new_tokens: int = bounded(0, 0)
    """Most tokens of a response; 0: rollout.max_new_tokens."""
    pass_at: list[int] = field(default_factory=list)
    """Values k for which eval/<set>/pass@k is reported: the probability that one at least of k
    responses is right, estimated without bias by all `responses` (M. Chen et al., arXiv 2107.03374,
    section 2.1)."""
    pass_reward: float = 1.0
    """Reward from which on a response is right."""

    @property
    def metric(self) -> str:
        """Name of the metric that is the mean over a set."""
        return self.reward.rpartition(":")[2] or "reward"


@dataclass(kw_only=True, slots=True)
class SamplesConfig:
    """Samples of what the model has written, kept for people: `relax-hpc samples RUN` shows it."""

    per_step: int = bounded(16, 0)
    """Episodes of each step that are kept for good: as many whole prompt groups as hold so many; 0:
    none."""
    evaluations: bool = True
    """Keep all episodes of evaluations too."""
    max_bytes: int = bounded(1 << 30, 0)
    """Bytes, compressed, that the samples of a run may take. Steps share them evenly, so that the
    last ones have some too; evaluations may use what is left."""
    max_text_chars: int = bounded(32_768, 16)
    """Characters of a prompt or a response; of a longer one its middle is left out. Turns of one
    share them."""
    tensorboard_every: int = bounded(10, 0)
    """Steps from one of which TensorBoard's Text tab shows a few episodes to the next; 0: none."""


@dataclass(kw_only=True, slots=True)
class MetricsConfig:
    """Experiment trackers, beside metrics.jsonl and TensorBoard."""

    trackers: list[str] = field(default_factory=list)
    """Import paths, `package.module:Class`, of classes derived from
    `relax_hpc.base.metrics.trackers.Tracker`. Each receives every line of metrics.jsonl, in its own
    process on the node of the hub. If one fails, this is reported once, and the run continues
    without it."""
    tracker_timeout_s: float = bounded(60.0, 0.1)
    """Seconds for one call of a tracker, such as the report of one step. A tracker that takes
    longer has failed."""


@dataclass(kw_only=True, slots=True)
class LivenessConfig:
    """Deadlines and restarts."""

    beat_s: float = bounded(0.5, 0.05)
    lease_s: float = bounded(30.0, 1.0)
    """Seconds without beats after which a group is dead."""
    start_timeout_s: float = bounded(600.0, 1.0)
    """Seconds between the start of a role and its first beat. Its ranks must have met after three
    quarters of it."""
    hang_s: float = bounded(1800.0, 1.0)
    """Seconds at one piece of work, waiting not counted, after which a role is dead although it
    beats."""
    start_ahead_s: float = bounded(60.0, 0.0)
    """Seconds after which processes of the next incarnation are started beside a group that
    computes a model (actor, actor_fwd, reference). They import their libraries, at low priority,
    and wait, so that the group is at work again seconds earlier if it ends. They hold no weights
    and no GPU, 0.2 GB of host memory a rank on CPUs, and are the first to go where memory runs out.
    0: never, where a node has no such memory to spare."""
    max_restarts: int = bounded(5, 0)
    """Restarts of one group with neither new samples, steps nor checkpoints before the run stops
    with exit 93."""
    longest_wait_s: float = bounded(0.0, 0.0)
    """Seconds that a run waits for what is nobody's fault: a group that is queued, loads or is
    being replaced, or room on a full disk. Then it saves what it can and ends with 75. 0: as long
    as its job lasts; 24 h where there is none. A job that reaches its limit makes way to the next
    life of the run (`het`: the successor, `jobs`: itself, queued again), which waits anew; less
    than a job lasts bounds that too."""
    stop_timeout_s: float = bounded(15.0, 0.1)
    """Seconds between asking a process to end and killing it."""
