"""The configuration of a run: one slotted dataclass a subject, every field documented under it.

Ranges stand beside the defaults (`bounded`); checks over several fields are in `relax_hpc.checks.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relax_hpc.algorithms import Algorithm, Grpo
from relax_hpc.config.roles import ROLES
from relax_hpc.settings import bounded


@dataclass(kw_only=True, slots=True)
class TinyModelConfig:
    """Shape of a small Qwen3 model that is made offline, with its tokenizer."""

    hidden_size: int = bounded(64, 8)
    """Width; must be a multiple of num_attention_heads' groups."""
    num_layers: int = bounded(2, 1)
    num_attention_heads: int = bounded(2, 1)
    num_key_value_heads: int = bounded(1, 1)
    head_dim: int = bounded(32, 8)
    intermediate_size: int = bounded(192, 8)
    tie_word_embeddings: bool = True


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The policy that is trained, and the frozen reference."""

    path: str = ""
    """Hugging Face directory (config.json, tokenizer.json, *.safetensors). Empty: the run makes `tiny`."""
    reference_path: str = ""
    """Hugging Face directory of the reference; empty: the policy before its first step."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type of training and inference."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where models run. Every rank of a `cuda` group takes the device of its local rank."""
    ignore_keys: list[str] = field(default_factory=list)
    """Keys of config.json to leave out of account, such as `rope_scaling.factor`. One that is not known is refused,
    as the engine may compute something by it that the trainer does not; whoever knows better lists it here."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Prompts. A row of a jsonl or parquet file is {"id", "prompt", "messages" or "token_ids", "answer", ...}; see
    `relax_hpc.data.prompts`. A file must stay as it is while a run uses it."""

    task: str = ""
    """`sort_digits`, a built-in verifiable task whose files are made in the run directory, or one's own as
    `package.module:Class`, see `relax_hpc.tasks`. Empty: `train` and `eval` name files."""
    digits: int = bounded(4, 1, 6)
    """Digits a prompt of `sort_digits` has."""
    train: str = ""
    """File of training prompts, jsonl or parquet."""
    eval: dict[str, str] = field(default_factory=dict)
    """Name of an evaluation set -> file."""
    shuffle: bool = True
    """Visit prompts in an order drawn from the run's seed, anew each incarnation."""
    special_tokens: list[Literal["prompt"]] = field(default_factory=list)
    """Columns in which the name of a special token, such as `<|im_end|>`, means that token, as in prompts that a chat
    template has made. In all others it is text like any other."""
    chat_template: str = ""
    """What makes prompts of chat messages: `model`, the template in the model's folder, or a Jinja file. A prompt that
    is text is then a message of the user's. Empty: prompts are text, as they stand."""
    system: str = ""
    """Message that goes before those of each prompt that begin with none of the system's; empty: none."""
    enable_thinking: bool = True
    """Given to the template, of which some have the model answer at once if it is false."""
    max_prompt_tokens: int = bounded(1024, 1)
    """Longer prompts are quarantined, counted and skipped, or truncated."""
    truncate: Literal["", "left"] = ""
    """What becomes of prompts that are too long. `left`: their last tokens are taken. Empty: they are skipped."""
    max_bad_share: float = bounded(0.05, 0.0, 1.0)
    """Stop at start if a larger share of the lines is broken, empty or over-long."""


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """Supervised steps on demonstrations before RL, so that sampled rewards carry a signal."""

    steps: int = bounded(0, 0)
    """0: none. Needs data.task."""
    batch_size: int = bounded(64, 1)
    lr: float = bounded(2e-3, 0.0)
    noise: float = bounded(0.7, 0.0, 1.0)
    """Share of demonstrations whose answer is another prompt's."""


@dataclass(kw_only=True, slots=True)
class SimulatedConfig:
    """How long the `simulated` engine takes."""

    response_s: float = bounded(0.0, 0.0)
    """Seconds for a response of max_new_tokens, the median over samples; one that ends before takes less."""
    sigma: float = bounded(0.0, 0.0)
    """Of their lognormal distribution. 0: all alike; 1: a long tail."""
    concurrency: int = bounded(64, 1)
    """Responses that an engine draws at a time."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The inference engine of a rollout replica."""

    kind: str = "sglang"
    """`sglang`, `transformers`, `simulated`, or one's own as `package.module:Class`. `transformers` is a small seeded
    engine for tests: slow, reproducible bit for bit. `simulated` has no model and draws tokens evenly: for trying a
    cluster, and for measuring and breaking what is around engines."""
    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)
    flags: dict[str, Any] = field(default_factory=dict)
    """SGLang server arguments by name (`max_total_tokens: 16384`), passed through as they are."""
    port: int = bounded(0, 0, 65535)
    """First port; replica r takes port + r. 0: a free one."""
    start_timeout_s: float = bounded(0.0, 0.0)
    """Between its start and its first answer. 0: five minutes, and a second for every 100 MB of the model's weights."""
    request_timeout_s: float = bounded(120.0, 0.1)
    """A generation request fails when its engine has given no token, of this request or another, for so long; how long
    a whole response takes is not bounded. The time of an update of weights does not count."""
    update_timeout_s: float = bounded(60.0, 0.1)
    """Of an update of weights, beside a second for every 100 MB of them; and of other calls that generate nothing."""
    max_failures: int = bounded(3, 1)
    """Consecutive failures after which the engine is restarted (with its group)."""


PartialRollout = Literal["off", "keep", "recompute"]


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Generation."""

    replicas: int = bounded(1, 1)
    """Engine processes."""
    without: list[str] = field(default_factory=list)
    """Engines of these that do not serve, such as `rollout/3`: group or member, and number, as `status --json` names
    them. `relax-hpc scale RUN --group rollout --without 3` changes it while the run goes on."""
    processes: int = bounded(1, 1)
    """Processes of the role on each node, which divide its replicas among them: one makes rows of no more than some
    thousand samples a second, however fast its engines are."""
    groups_per_request: int = bounded(8, 1)
    """Prompt groups sent to an engine in one HTTP request, at most: those that come at once."""
    requests_in_flight: int = bounded(2, 1)
    """So many times `groups_per_request` prompt groups an engine works on at once, each by itself."""
    max_new_tokens: int = bounded(256, 1)
    stop: list[str] = field(default_factory=list)
    """Texts that end a response; the one that is found belongs to it."""
    temperature: float = bounded(1.0, 0.0)
    top_p: float = bounded(1.0, 0.0, 1.0)
    reward: str = ""
    """Name in `relax_hpc.rewards`, or `package.module:function`, of one sample or of a prompt group. Empty: the task's
    own, of built-in tasks and of files `answer_partial`."""
    reward_timeout_s: float = bounded(60.0, 0.1)
    """Deadline of the rewards of a prompt group; past it, the group fails as `reward_timeout`, and the process that was
    at them is replaced."""
    reward_workers: int = bounded(2, 0)
    """Processes, at most, in which each process of the role has rewards of one's own computed, evaluation's in as many
    others. Rewards that are built in need none. 0: in the role itself, in threads, which nothing can end."""
    max_failed_share: float = bounded(0.5, 0.0, 1.0)
    """Stop (exit 93) when a larger share of the last 64 prompt groups failed, or all of them. Each that fails is
    counted by its reason, and replaced by another prompt under its ticket, however often that takes."""
    episode_timeout_s: float = bounded(600.0, 0.1)
    """Deadline of an episode that a task plays itself, tools and environments, without what its responses take; past it
    the prompt group fails as `episode_timeout`."""
    filter: str = ""
    """Which prompt groups are trained on: name in `relax_hpc.rollout.filters`, such as `rewards_differ`, or
    `package.module:function` of the rewards. The others are dropped as `filtered`, and replaced by other prompts under
    the same tickets. Empty: all."""
    over_sampling: float = bounded(0.0, 0.0, 1.0)
    """For this share of the tickets the next prompt group is drawn beside the first, to be there if the first is
    filtered out or fails. What nobody needs waits in the queue for later tickets; at max_staleness 0 it is aborted and
    dropped as `surplus`, so that spares change how long a step takes and nothing that is trained."""
    max_filtered_share: float = bounded(0.99, 0.0, 1.0)
    """Stop (exit 93) when a larger share of the last 256 prompt groups was filtered out."""
    partial_rollout: PartialRollout = "keep"
    """What new weights do to responses that are being drawn. `keep`: they go on at once, over the keys and values that
    older weights have left; `recompute`: over keys and values of the new ones; `off`: the engine takes new weights when
    all that it is at has ended, so that a response is drawn by one version."""
    save_partial: Literal["off", "samples", "tokens"] = "samples"
    """What of unfinished prompt groups is appended to their logs in the queue, for whoever generates them after a
    restart: nothing, finished `samples`, or the `tokens` of unfinished ones too: the engine goes on with these, if not
    bit for bit as one that was not interrupted. SGLang tells of them every 64 tokens, and no more of a response once
    its weights have changed."""
    save_partial_every_s: float = bounded(10.0, 0.1)
    """Between two segments of an unfinished prompt group; what was made since the last one is lost by a kill, and
    appended when the group is asked to stop."""
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How a training or forward group splits the model. Ranks = tensor * pipeline * context * data."""

    tensor: int = bounded(1, 1)
    pipeline: int = bounded(1, 1)
    context: int = bounded(1, 1)
    """Ranks that share each row, every one with as many of its tokens: for rows that are too long for one. A
    micro-batch is as many times larger."""
    data: int = bounded(1, 1)
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        """Processes of the group."""
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        return f"tensor {self.tensor} * pipeline {self.pipeline} * context {self.context} * data {self.data}"


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """Adam of megatron-core."""

    lr: float = bounded(1e-6, 0.0)
    final_lr_share: float = bounded(1.0, 0.0, 1.0)
    """Learning rate of the last step as a share of the first; linear between."""
    warmup_steps: int = bounded(0, 0)
    beta1: float = bounded(0.9, 0.0, 1.0)
    beta2: float = bounded(0.95, 0.0, 1.0)
    eps: float = bounded(1e-8, 0.0)
    weight_decay: float = bounded(0.0, 0.0)
    clip_grad: float = bounded(1.0, 0.0)
    distributed: bool = False
    """Shard optimizer state over data-parallel ranks."""
    offload: bool = False
    """Adam's moments, 8 bytes a parameter, lie in pinned host memory and pass through the GPU in each step."""


Kernels = Literal["plain", "fused", "te"]


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    """The training group."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    forward: list[Literal["actor_fwd", "reference"]] = field(default_factory=list)
    """Roles that run inside of the actor, in no group: it swaps their weights in and scores each window before it
    trains on it, with its own parallelism and micro-batches. Less hardware, a longer step, and for each of them
    one more copy of the weights in host memory."""
    max_tokens_per_micro_batch: int = bounded(8192, 1)
    """Tokens that a rank takes through one forward and backward pass: rows lie in it one after the other, without
    padding. A longer row is a micro-batch of its own."""
    balance_window: int = bounded(4, 1)
    """Micro-batches of each data-parallel rank whose tokens make a window, of prompt groups in ticket order. Within it
    rows are balanced over the ranks by length and dealt to few micro-batches of equal size: a larger one is balanced
    better and has fewer, a smaller one is trained sooner."""
    kernels: Kernels = "plain"
    """What the layers of the policy are made of, in the forward roles too. `plain`: torch, on every device; `fused`:
    Triton kernels for norms, rotary embedding, gated activation and log-probabilities, and one for Adam, on GPUs; `te`:
    Transformer Engine, which is refused unless a layer of it is as near to float32 as a plain one is."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping them. `full`: all of a layer but its input,
    a third more computation; `selective`: those of its norms and of its feed-forward layer."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further settings of megatron-core's TransformerConfig and DistributedDataParallelConfig by name
    (`recompute_modules: [core_attn]`), passed through as they are; what is decided elsewhere is refused."""
    simulated_step_s: float = bounded(0.0, 0.0)
    """Seconds that a pass over a training batch takes, in which nothing is computed and the weights stay as they are:
    for trying a cluster, and for measuring what is around training. 0: train."""

    @property
    def pack_tokens(self) -> int:
        """Of a micro-batch, over the context ranks that share it."""
        return self.max_tokens_per_micro_batch * self.parallel.context


@dataclass(kw_only=True, slots=True)
class ForwardConfig:
    """The forward-only groups, actor_fwd and reference."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    max_tokens_per_micro_batch: int = bounded(8192, 1)

    @property
    def pack_tokens(self) -> int:
        """Of a micro-batch, over the context ranks that share it."""
        return self.max_tokens_per_micro_batch * self.parallel.context


Durability = Literal["commit", "flush", "none"]
Mode = Literal["auto", "required", "off"]


@dataclass(kw_only=True, slots=True)
class PlanesConfig:
    """Ways in which rows pass between processes in memory, before they are on disk. The first of these that two
    processes have is taken, the file of the shard else.

    `auto`: where it works; `required`: a run without it does not begin; `off`: never.
    """

    shm: Mode = "auto"
    """Within a node, without a copy."""
    rdma: Mode = "auto"
    """Between nodes, by InfiniBand cards, where package nixl-cu12 is installed. `required`: nodes without a card have
    it too, for processes on them that cannot share memory."""
    tcp: Mode = "auto"
    """Wherever there is a network."""


@dataclass(kw_only=True, slots=True)
class QueueConfig:
    """The TransferQueue."""

    durability: Durability = "commit"
    """What accepted means, rows and journal alike. `commit`: on disk; survives a power loss of all nodes. `flush`:
    written to the operating system; survives the death of any process, and of any node but the one that wrote.
    `none`: the same for rows, but the journal may be a second late; survives the death of any process but the
    controller: then every group begins again, from the last checkpoint, with what the journal has."""
    wait_timeout_s: float = bounded(600.0, 1.0)
    """Deadline of every wait for rows, tickets or versions; running past it ends the group with exit 75. Only time
    counts in which all groups are there and none is at work: see liveness.longest_wait_s."""
    keep_steps: int = bounded(2, 0)
    """Shards of steps older than the last checkpoint by more than this are deleted."""
    max_bytes: int = bounded(64 << 30, 1)
    """Bytes of rows that wait for training. At this bound nothing is generated but what the next step still needs."""
    max_rows: int = bounded(1_000_000, 1)
    """Samples in generation or waiting for training, bounded in the same way."""
    planes: PlanesConfig = field(default_factory=PlanesConfig)
    memory_bytes: int = bounded(4 << 30, 0)
    """Of each process, for rows that others may still read; beyond it they are on disk alone."""
    max_medium_bytes: int = bounded(256 << 20, 1)
    """Of one image, video or sound of a prompt; a prompt with a larger one fails as `media_too_large`."""
    max_group_media_bytes: int = bounded(1 << 30, 1)
    """Of all media of a prompt group together."""


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    """How new weights get from the actor to those that generate and score with them: by `queue.planes`, else files."""

    publish_every: int = bounded(1, 1)
    """Versions from one that is published to the next, at most `max_staleness` + 1. The last is always published."""
    publish_lag: int = bounded(64, 0)
    """An engine that serves a version so much older than the newest gets no new prompts before it has a newer one. It
    delays prompts; how stale samples may be is `max_staleness` alone."""
    file_every: int = bounded(1, 0)
    """Versions whose number is a multiple of it are written to disk too, beside training, as Hugging Face directories
    in `weights/`, not synced; those that are superseded by then are passed over. Others are in the actor's memory
    alone, and gone with it. 0: the last version only, which is always written, and synced."""
    keep_every: int = bounded(0, 0)
    """Multiples of it are written in any case, synced, and never deleted. 0: none."""
    anchor_every: int = bounded(0, 0)
    """Versions from one to the next that others are published as differences to, beside the whole ones: readers on
    other nodes that have it read less. Of use where little changes in a step, as in bfloat16 at small learning rates;
    it costs every rank and every node one more copy of the weights in memory. 0: never."""
    slabs: int = bounded(0, 0)
    """Versions that the actor keeps in memory, each rank its part. 0: `max_staleness` + 2, with which no version is
    overwritten while an engine must have it; with fewer, at least 2, a slow one has to take the next."""
    read_timeout_s: float = bounded(120.0, 0.1)
    """For one record of a version to arrive; and for a version that cannot be read, to be tried again."""
    write_timeout_s: float = bounded(3600.0, 1.0)
    """For the files of a version to be written, beside training; what takes longer ends the actor."""
    chunk_bytes: int = bounded(32 << 20, 4096)
    """Of a record: while one is verified, the next one is read. A single tensor is never divided."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When the actor saves, and what stays."""

    every: int = bounded(50, 1)
    """Steps between checkpoints; the last step always has one."""
    keep_last: int = bounded(2, 1)
    keep_every: int = bounded(0, 0)
    """Checkpoints of steps that are multiples of it are never deleted. 0: only the last ones stay."""
    timeout_s: float = bounded(3600.0, 1.0)
    """For one to be written, beside training; what takes longer ends the actor."""
    max_failures: int = bounded(4, 1)
    """Checkpoints in a row that could not be written, for other causes than a full disk, before the run stops with exit
    93. On a full disk it is tried again until there is room, or the next one is due."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Greedy evaluation by the rollout engines."""

    every: int = bounded(20, 0)
    """Versions between evaluations, version 0 and the last included; 0: never."""
    samples: int = bounded(200, 1)
    """Prompts of each set."""
    reward: str = "answer_exact"
    """Reward of evaluation, as rollout.reward; its mean over a set is reported as eval/<set>/<name of the function>.
    Empty: the one that is learned from."""

    @property
    def metric(self) -> str:
        """What the mean over a set is called."""
        return self.reward.rpartition(":")[2] or "reward"


@dataclass(kw_only=True, slots=True)
class SamplesConfig:
    """What the model has written, kept for people: `relax-hpc samples RUN` shows it."""

    per_step: int = bounded(16, 0)
    """Episodes of each step that are kept for good: as many whole prompt groups as hold so many; 0: none."""
    evaluations: bool = True
    """Keep all episodes of evaluations too."""
    max_bytes: int = bounded(1 << 30, 0)
    """Bytes, compressed, that the samples of a run may take. Steps share them evenly, so that the last ones have some
    too; evaluations may use what is left."""
    max_text_chars: int = bounded(32_768, 16)
    """Characters of a prompt or a response; of a longer one its middle is left out."""
    tensorboard_every: int = bounded(10, 0)
    """Steps from one of which TensorBoard's Text tab shows a few episodes to the next; 0: none."""


@dataclass(kw_only=True, slots=True)
class LivenessConfig:
    """Deadlines and restarts."""

    beat_s: float = bounded(0.5, 0.05)
    lease_s: float = bounded(30.0, 1.0)
    """A group without beats for so long is dead."""
    start_timeout_s: float = bounded(600.0, 1.0)
    """Between the start of a role and its first beat. Its ranks must have met after three quarters of it."""
    hang_s: float = bounded(1800.0, 1.0)
    """A role that is at one piece of work for so long, waiting not counted, is dead although it beats."""
    max_restarts: int = bounded(5, 0)
    """Restarts of one group with neither new samples, steps nor checkpoints before the run stops with exit 93."""
    longest_wait_s: float = bounded(0.0, 0.0)
    """How long a run waits for what is nobody's fault: a group that is queued, loads or is being replaced, or room on a
    full disk. Then it saves what it can and ends with 75. 0: as long as its job lasts; 24 h where there is none. A job
    that reaches its limit makes way to the next life of the run (`het`: the successor, `jobs`: itself, queued again),
    which waits anew; less than a job lasts bounds that too."""
    stop_timeout_s: float = bounded(15.0, 0.1)
    """Between asking a process to end and killing it."""


@dataclass(kw_only=True, slots=True)
class ResourcesConfig:
    """What a group asks of Slurm."""

    nodes: int = bounded(1, 1)
    gpus_per_node: int = bounded(0, 0)
    cpus_per_task: int = bounded(1, 1)
    """CPUs of each rank."""
    memory: str = ""
    """Of each node, as sbatch takes it (`64G`); `0`: all; empty: the partition's default."""
    time: str = ""
    """Time limit of the group's own job in the `jobs` layout; empty: slurm.time."""
    options: dict[str, str] = field(default_factory=dict)
    """Further sbatch options by their long names: `{constraint: h100, exclude: "node[1-2]"}`."""


@dataclass(kw_only=True, slots=True)
class GroupConfig:
    """Processes that live and die together."""

    roles: list[Literal[tuple(ROLES)]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Extra environment variables of its processes, such as CUDA_VISIBLE_DEVICES, which places a group on its GPUs."""
    code: str = ""
    """Folder with the package relax_hpc that its processes run, of the run's own protocol; empty: the run's code."""
    interface: str = ""
    """Network interface that its sockets and libraries use; empty: site.interface."""
    on_failure: Literal["restart", "resubmit", "stop_run"] = "restart"
    """`restart`: in its allocation, or in a replacement job if that lost nodes; `resubmit`: always a new job."""
    spares: int = bounded(0, 0)
    """Held spare jobs, submitted up front, for sites whose compute nodes may not call sbatch."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """What a run asks of Slurm as a whole."""

    time: str = "24:00:00"
    """Time limit as sbatch takes it."""
    signal_s: int = bounded(300, 30, 65535)
    """Seconds before the time limit at which the run saves and makes way; Slurm may be a minute early or late."""
    successors: int = bounded(20, 0)
    """Jobs that go on when the run's own ends early; where nodes may not call sbatch, all are queued up front."""
    one_node_hub: bool = False
    """Allow a `het` job whose first component has one node: any node's death anywhere then ends the whole job."""


@dataclass(kw_only=True, slots=True)
class MpiConfig:
    """How the ranks of a group find each other."""

    launcher: Literal["pmix", "pmi2", "mpiexec"] = "pmi2"
    """`srun --mpi` plugin; `mpiexec`: none, where every group has one rank. The local layout needs none either."""
    library: str = "wheel"
    """`wheel`: the mpich wheel beside mpi4py (pairs with pmi2); else the path of a libmpi.so."""


@dataclass(kw_only=True, slots=True)
class ContainerConfig:
    """A container around every role; supervision stays outside of it."""

    runtime: Literal["none", "apptainer", "pyxis"] = "none"
    program: str = "apptainer"
    """What starts a container with runtime `apptainer`: a name on PATH, such as `singularity`, or a path."""
    image: str = ""
    mounts: list[str] = field(default_factory=list)
    """`/path` or `/path:/inside`; the run directory is always mounted."""
    python: str = "python3"
    """Interpreter inside the container."""


@dataclass(kw_only=True, slots=True)
class SiteConfig:
    """Facts of a cluster that are the same for all runs on it."""

    name: str = ""
    partition: str = ""
    hub_partition: str = ""
    """Partition of CPU nodes for the hub; empty: the same as the others'."""
    cpu_nodes: bool = True
    """There are nodes without GPUs, for the hub. False: in a `het` job it rides on the group with the most nodes; in
    `jobs` its own job asks for one GPU, as every job must there."""
    account: str = ""
    qos: str = ""
    gpu_request: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    gpu_type: str = ""
    """As in `gres/gpu:TYPE`."""
    gpu_memory_gib: float = bounded(79.0, 0.0)
    """Of one GPU, as torch finds it: 79 of an H100 or A100 of 80 GB, 39 of one of 40 GB, 139 of an H200. What cannot
    fit by calculation is refused, see `relax-hpc plan`; 0: nothing is."""
    memory_request: Literal["mem", "none"] = "mem"
    """`none`: memory follows from the CPUs, and the site takes no option for it; groups' `memory` is not asked for."""
    options: dict[str, str] = field(default_factory=dict)
    """Further sbatch options of every job by their long names, such as `reservation` or `mail-user`."""
    srun_options: dict[str, str] = field(default_factory=dict)
    """Further srun options of every role by their long names, such as `{cpu-freq: high, mem-bind: local}`. With
    `cpu-bind` Slurm places the ranks on cores; else each takes cores of its own near its GPU. Slurm leaves `hint` out
    of account beside a binding, and every role has one: ask for it in site.options, for the job."""
    setup: list[str] = field(default_factory=list)
    """Lines of bash that every batch script runs first: `module purge`, `source /site/profile`, `ulimit -n 65536`.
    Roles and the standby supervisor inherit variables and limits (NOFILE, MEMLOCK, NPROC, STACK)."""
    modules: list[str] = field(default_factory=list)
    """Environment modules to load."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process, such as NCCL_IB_HCA or UCX_NET_DEVICES."""
    python: str = ""
    """Interpreter on the nodes that has relax_hpc; empty: the one that submits."""
    interface: str = ""
    """Network interface for sockets, gloo and NCCL's bootstrap; empty: that of the host's own name."""
    mpi: MpiConfig = field(default_factory=MpiConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    sbatch_on_nodes: bool = True
    """Compute nodes may call sbatch; false: replacements are held spare jobs, successors are queued up front."""
    local_dir: str = ""
    """Folder on each node's own disk for caches and staging; empty: $TMPDIR or /tmp."""
    stage: list[Literal["model", "environment"]] = field(default_factory=list)
    """What is copied to local_dir once a node instead of being read from the shared filesystem by every process: the
    model, the virtual or conda environment of the interpreter."""


def default_groups() -> dict[str, GroupConfig]:
    """One group a role, advantages beside the queue controller in the hub."""
    return {
        "hub": GroupConfig(roles=["advantages"]),
        "rollout": GroupConfig(roles=["rollout"]),
        "actor": GroupConfig(roles=["actor"]),
    }


def optional_groups() -> dict[str, GroupConfig]:
    """Groups that a run has if a layer speaks of them, or if its algorithm needs what they give."""
    return {name: GroupConfig(roles=[name]) for name in ("actor_fwd", "reference")}


@dataclass(kw_only=True, slots=True)
class Config:
    """A run. Several files compose from left to right; the resolved one lies in the run directory."""

    name: str = "run"
    run_dir: str = ""
    """The run directory, on a filesystem that every node sees. Empty: runs/<name>."""
    layout: Literal["local", "het", "jobs"] = "local"
    """`local`: process trees on this machine; `het`: one heterogeneous Slurm job; `jobs`: one Slurm job a group."""
    seed: int = bounded(0, 0)
    steps: int = bounded(100, 1)
    prompts_per_step: int = bounded(32, 1)
    """Prompt groups a training step takes."""
    samples_per_prompt: int = bounded(8, 2)
    """Episodes of each prompt: attempts at it, whose rewards are compared."""
    max_staleness: int = bounded(0, 0, 64)
    """0: on-policy, the synchronous run; 1: near-on-policy; more: fully asynchronous."""
    colocate: bool = False
    """The actor and the engines share devices, in one group, and take turns: engines give their memory back once a step
    is generated, and the actor begins then; while they have it, its weights and optimizer are in host memory. For
    max_staleness 0."""
    threads: int = bounded(1, 1)
    """CPU threads of each process."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    algorithm: Algorithm = field(default_factory=Grpo)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    actor_fwd: ForwardConfig = field(default_factory=ForwardConfig)
    reference: ForwardConfig = field(default_factory=ForwardConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    site: SiteConfig = field(default_factory=SiteConfig)
    groups: dict[str, GroupConfig] = field(default_factory=default_groups)
