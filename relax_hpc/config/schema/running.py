"""Settings of the queue, weights, checkpoints, evaluation, samples and liveness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from relax_hpc.base.settings import bounded

Durability = Literal["commit", "flush", "none"]
Mode = Literal["auto", "required", "off"]


@dataclass(kw_only=True, slots=True)
class PlanesConfig:
    """Transports by which rows pass between processes in memory. The first one that both processes
    have is used, otherwise the file of the shard.

    `auto`: use it if it works. `required`: refuse to start without it. `off`: never use it.
    """

    shm: Mode = "auto"
    """Shared memory within a node, without a copy."""
    rdma: Mode = "auto"
    """RDMA between nodes, over InfiniBand cards, if package nixl-cu12 is installed. `required`: it
    is also used on nodes without a card, between processes that cannot share memory."""
    tcp: Mode = "auto"
    """TCP, on every network."""


@dataclass(kw_only=True, slots=True)
class QueueConfig:
    """The TransferQueue."""

    durability: Durability = "commit"
    """Guarantee for an accepted write, for rows and journal. `commit`: it is on disk and survives a
    power loss of all nodes. `flush`: it is written to the operating system and survives the death
    of any process, and of any node except the writer's. `none`: as `flush` for rows, but the
    journal may be up to one second late. It survives the death of any process except the
    controller; after a death of the controller every group restarts from the last checkpoint, with
    the journal as it was written."""
    wait_timeout_s: float = bounded(600.0, 1.0)
    """Timeout of every wait for rows, tickets or versions. When it expires, the group ends with
    exit
    75. The timeout runs only while all groups run and none of them is working, see
    `liveness.longest_wait_s`."""
    keep_steps: int = bounded(2, 0)
    """Number of steps before the last checkpoint for which shards are kept. Older shards are
    deleted."""
    max_bytes: int = bounded(64 << 30, 1)
    """Maximum size in bytes of rows that wait for training. At this limit only rows that the next
    step needs are generated."""
    max_rows: int = bounded(1_000_000, 1)
    """Maximum number of rows that are being generated or wait for training, limited in the same
    way."""
    planes: PlanesConfig = field(default_factory=PlanesConfig)
    memory_bytes: int = bounded(4 << 30, 0)
    """Bytes of memory of each process for rows that other processes may still read. Further rows
    are only on disk."""
    max_medium_bytes: int = bounded(256 << 20, 1)
    """Maximum size in bytes of one image, video or sound of a prompt. A prompt with a larger one
    fails with the reason `media_too_large`."""
    max_group_media_bytes: int = bounded(1 << 30, 1)
    """Maximum size in bytes of all media of a prompt group."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    """Transfer of new weights from the actor to roles that generate and score: by `queue.planes`,
    otherwise by files."""

    publish_every: int = bounded(1, 1)
    """Number of versions from one published version to the next, at most `max_staleness` + 1. The
    last version is always published. If rows come from files, no process reads versions: the first
    and the last one, and those of `keep_every`, are published."""
    publish_lag: int = bounded(64, 0)
    """Largest number of versions that an engine may be behind the newest version and still get new
    prompts. This delays prompts; `max_staleness` alone limits how stale samples are."""
    file_every: int = bounded(1, 0)
    """Versions whose number is a multiple of this setting are written to disk, during training, as
    Hugging Face directories in `weights/`, without a sync. If a newer one is due before the write
    begins, the older one is skipped. Other versions exist only in the actor's memory and are lost
    with it. With 0 only the last version is written. The last version is always written and
    synced. If rows come from files, the default is 0."""
    keep_every: int = bounded(0, 0)
    """Versions whose number is a multiple of this setting are always written, synced, and never
    deleted. With 0 there are no such versions."""
    anchor_every: int = bounded(0, 0)
    """Number of versions from one anchor to the next. Versions after an anchor are also published
    as differences to it, so that readers on other nodes that have the anchor read less. It is
    useful if little changes in a step, as in bfloat16 with small learning rates. It costs every
    rank and every node one more copy of the weights in memory. With 0 there are no anchors."""
    slabs: int = bounded(0, 0)
    """Number of versions that the actor keeps in memory; each rank keeps its part. With 0 it is
    `max_staleness` + 2, so that no version is overwritten while an engine needs it. With fewer, at
    least 2, a slow engine has to load the next version instead."""
    read_timeout_s: float = bounded(120.0, 0.1)
    """Seconds for one record of a version to arrive, and for retries of a version that cannot be
    read."""
    write_timeout_s: float = bounded(3600.0, 1.0)
    """Seconds for writing the files of a version, during training. A slower write ends the
    actor."""
    chunk_bytes: int = bounded(32 << 20, 4096)
    """Bytes of a record. While one record is verified, the next one is read. A single tensor is
    never divided."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints of the actor: when they are written, and which are kept."""

    every: int = bounded(50, 1)
    """Number of steps between checkpoints. The last step always has a checkpoint."""
    every_s: float = bounded(600.0, 0.0)
    """Seconds since the last checkpoint after which one is written at the end of the step, even if
    fewer than `checkpoint.every` steps are done. With 0 only steps count."""
    keep_last: int = bounded(2, 1)
    """Number of newest checkpoints that are kept."""
    keep_every: int = bounded(0, 0)
    """Checkpoints of steps that are a multiple of this setting are never deleted. With 0 only the
    newest checkpoints are kept."""
    timeout_s: float = bounded(3600.0, 1.0)
    """Seconds for writing a checkpoint, during training. A slower write ends the actor."""
    max_failures: int = bounded(4, 1)
    """Number of consecutive checkpoints that cannot be written, for causes other than a full disk,
    after which the run stops with exit 93. On a full disk the write is retried until there is room
    or the next checkpoint is due."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Evaluation by the rollout engines. For sft and dpo the actor scores held-out rows."""

    every: int = bounded(20, 0)
    """Number of versions from one evaluation to the next. Version 0 and the last version are always
    evaluated. With 0 there is no evaluation."""
    samples: int = bounded(200, 1)
    """Number of prompts, or rows, of each set."""
    reward: str = ""
    """Reward of evaluation, with the same names as rollout.reward. Its mean over a set is reported
    as eval/<set>/<name of the function>. If it is empty, the training reward is used and reported
    as eval/<set>/reward."""

    responses: int = bounded(1, 1)
    """Number of responses to each prompt. The reward of the prompt is their mean. More than one
    response needs a temperature."""
    temperature: float = bounded(0.0, 0.0)
    """Sampling temperature. With 0 the most likely token is taken."""
    top_p: float = bounded(1.0, 0.0, 1.0)
    """Top-p of evaluation, as rollout.top_p."""
    top_k: int = bounded(0, 0)
    """Top-k of evaluation, as rollout.top_k."""
    min_p: float = bounded(0.0, 0.0, 1.0)
    """Min-p of evaluation, as rollout.min_p."""
    max_new_tokens: int = bounded(0, 0)
    """Maximum number of tokens of a response. With 0 it is rollout.max_new_tokens."""
    pass_at: list[int] = field(default_factory=list)
    """Values k for which eval/<set>/pass@k is reported: the probability that at least one of k
    responses is right. The estimate from all `responses` is unbiased (M. Chen et al., arXiv
    2107.03374, section 2.1)."""
    pass_reward: float = 1.0
    """Smallest reward of a response that counts as right."""

    @property
    def metric(self) -> str:
        """Name of the metric of a set: its mean reward."""
        return self.reward.rpartition(":")[2] or "reward"


@dataclass(kw_only=True, slots=True)
class SamplesConfig:
    """Texts of episodes that are kept for people to read. `relax-hpc samples RUN` shows them."""

    per_step: int = bounded(16, 0)
    """Number of episodes of each step that are kept: as many whole prompt groups as contain this
    number. With 0 none are kept."""
    evaluations: bool = True
    """Whether all episodes of evaluations are kept, too."""
    max_bytes: int = bounded(1 << 30, 0)
    """Maximum size in bytes of a run's samples, compressed. Steps share them evenly, so that the
    last steps have some, too. Evaluations may use the remaining bytes."""
    max_text_chars: int = bounded(32_768, 16)
    """Maximum number of characters of a prompt or a response. The middle of a longer text is left
    out. The turns of a response share the characters."""
    tensorboard_every: int = bounded(10, 0)
    """Number of steps after which TensorBoard's Text tab shows a few episodes again. With 0 it
    shows none."""


@dataclass(kw_only=True, slots=True)
class MetricsConfig:
    """Experiment trackers, in addition to metrics.jsonl and TensorBoard, and samples of
    resources."""

    trackers: list[str] = field(default_factory=list)
    """`wandb`, `trackio`, `mlflow`, or import paths, `package.module:Class`, of classes derived
    from `relax_hpc.base.metrics.trackers.Tracker`. Each receives every line of metrics.jsonl, in
    its own process on the node of the hub. If one fails, this is reported once, and the run
    continues without it. `relax-hpc track` does the same outside of the run, and repeats what
    failed."""
    tracker_timeout_s: float = bounded(60.0, 0.1)
    """Seconds for one call of a tracker, such as the report of one step. A tracker that takes
    longer has failed."""
    resources_s: float = bounded(15.0, 0.0)
    """Seconds between two samples of CPU time, memory, threads, descriptors and GPUs of every
    process. With 0 none are taken."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Traces of a few steps by the profilers of torch and SGLang, which https://ui.perfetto.dev
    shows. They are in `<run>/profiles`."""

    steps: str = ""
    """Steps to profile: `5`, or `5-7`. If it is empty, nothing is profiled. Steps 0 and 1 are
    slower than later ones."""
    roles: list[str] = field(default_factory=lambda: ["actor"])
    """Roles to profile: actor, critic, actor_fwd, reference, teacher, and rollout for its SGLang
    engines."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks of each role to profile; of rollout, numbers of its engines."""
    stacks: bool = False
    """Whether traces have the Python stack of each operation. They are several times as large."""
    shapes: bool = False
    """Whether traces have the shapes of the tensors of each operation."""
    engine_batches: int = bounded(200, 1)
    """Maximum number of forward passes in the trace of an engine. A step can have thousands of
    them."""


@dataclass(kw_only=True, slots=True)
class EventsConfig:
    """Bounds of the events that `site.on_event` receives. RUN/notifications.jsonl has them too."""

    hold_s: float = bounded(30.0, 0.0)
    """Seconds for which a condition must be true before its event is reported. Losses that are not
    finite, and the end of the run, are reported immediately."""
    clear_s: float = bounded(120.0, 0.0)
    """Seconds for which the condition of a reported event must be false before it is reported as
    resolved."""
    waiting_s: float = bounded(600.0, 1.0)
    """Seconds for which other groups wait for a group, or the hub does not answer, before event
    `waiting`."""
    unsaved_s: float = bounded(1800.0, 1.0)
    """Seconds of work that no checkpoint has, because checkpoints fail, before event
    `unsaved_work`."""
    no_progress_s: float = bounded(0.0, 0.0)
    """Seconds without a trained step, waits excluded, before event `no_progress`. With 0 it is ten
    times the median of the last steps, at least 600 s, and before the first steps
    `liveness.hang_s`."""
    goodput_share: float = bounded(0.5, 0.0, 1.0)
    """Share of the usual trained tokens per second, over the last 5 steps, below which event
    `falling_goodput` is reported. It is resolved at 0.2 above the share. The usual value is the
    median of the last 200 steps. With 0 it is never reported."""
    command_s: float = bounded(30.0, 0.1)
    """Seconds for one call of `site.on_event`. A command that takes longer is killed. Each event is
    tried three times."""


@dataclass(kw_only=True, slots=True)
class LivenessConfig:
    """Timeouts and restarts."""

    beat_s: float = bounded(0.5, 0.05)
    """Seconds between two heartbeats of a process."""
    lease_s: float = bounded(30.0, 1.0)
    """Seconds without heartbeats after which a group is considered dead."""
    start_timeout_s: float = bounded(600.0, 1.0)
    """Seconds between the start of a role and its first heartbeat. Its ranks must have connected to
    each other after three quarters of this time."""
    hang_s: float = bounded(1800.0, 1.0)
    """Seconds at one piece of work, without waits, after which a role is considered dead although
    it sends heartbeats."""
    collective_timeout_s: float = bounded(0.0, 0.0)
    """Seconds after which a collective fails that some ranks of a group have not entered. The
    waiting ranks end, on GPUs by SIGABRT from NCCL's watchdog, a rank is reported as lost, and the
    group restarts. The value must exceed the difference between ranks in their first step, in
    which kernels are compiled. With 0 it is `queue.wait_timeout_s` + 60."""
    start_ahead_s: float = bounded(60.0, 0.0)
    """Seconds after which processes of the next incarnation are started in advance for a group that
    computes a model (actor, actor_fwd, reference). They import their libraries, at low priority,
    and wait, so that the group works again seconds earlier after a failure. They hold no weights
    and no GPU. On CPUs each rank takes 0.2 GB of host memory; they are killed first if memory runs
    out. With 0 none are started; use it if a node has no such memory to spare."""
    max_restarts: int = bounded(5, 0)
    """Number of restarts of one group without new samples, steps or checkpoints after which the run
    stops with exit 93."""
    longest_wait_s: float = bounded(0.0, 0.0)
    """Seconds that a run waits while nothing has failed: a group is pending, loads or is being
    replaced, or a disk is full. Then the run saves its state if possible and ends with 75. With 0
    it waits until its job ends, or 24 h without a job. A job that reaches its time limit is
    continued by the next one (`het`: the successor; `jobs`: the same job, requeued), which waits
    again. A value below the time limit of a job limits the total wait."""
    stop_timeout_s: float = bounded(15.0, 0.1)
    """Seconds between asking a process to end and killing it."""
