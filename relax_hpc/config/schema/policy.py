"""Settings of the model that is trained, and of its data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relax_hpc.base.settings import bounded
from relax_hpc.config.schema.multimodal import MultimodalConfig


@dataclass(kw_only=True, slots=True)
class TinyModelConfig:
    """Shape of a small Qwen3 model, dense, a mixture of experts, or one that sees, that is made
    offline, with its tokenizer."""

    hidden_size: int = bounded(64, 8)
    """Width; must be a multiple of num_attention_heads' groups."""
    num_layers: int = bounded(2, 1)
    num_attention_heads: int = bounded(2, 1)
    num_key_value_heads: int = bounded(1, 1)
    head_dim: int = bounded(32, 8)
    intermediate_size: int = bounded(192, 8)
    num_experts: int = bounded(0, 0)
    """Experts of every layer, in place of its feed-forward part; 0: a dense model."""
    num_experts_per_tok: int = bounded(2, 1)
    moe_intermediate_size: int = bounded(64, 8)
    """Width of an expert."""
    vision_layers: int = bounded(0, 0)
    """Layers of the tower by which a model sees images and videos, as wide as it is itself; 0: it
    takes text alone."""
    audio_layers: int = bounded(0, 0)
    """Layers of the tower by which a model of experts that sees hears, too: a Qwen3-Omni."""
    tie_word_embeddings: bool = True
    chat: bool = False
    """Whether its tokenizer has what chats with tools take, in Qwen3's form: turns, `<tool_call>`,
    JSON's characters, and a chat template."""
    words: list[str] = field(default_factory=list)
    """Texts that its tokenizer has one token each for, beside characters: such as names of
    tools."""


RoutingReplay = Literal["off", "record", "on"]


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The policy that is trained, and what is frozen beside it."""

    path: str = ""
    """Hugging Face directory (config.json, tokenizer.json, *.safetensors), such as
    `weights/<version>/model` of another run. Empty: the run makes `tiny`."""
    reference_path: str = ""
    """Hugging Face directory of the reference; empty: the policy before its first step."""
    teacher_path: str = ""
    """Hugging Face directory of the teacher, of any size, with the policy's tokenizer; of an
    algorithm that has one."""
    critic_path: str = ""
    """Hugging Face directory from whose weights a critic begins, of any size, with the policy's
    tokenizer; empty: the policy's first weights."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type of training and inference. Unless it is set, bfloat16 with device `cuda`."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device on which models run. Every rank of a `cuda` group takes the device of its local rank.
    A run on `cpu` whose groups ask for GPUs is refused."""
    routing_replay: RoutingReplay = "off"
    """Use of the engine's choice of experts for each token of a mixture of experts (rollout routing
    replay, arXiv 2510.11370). `on`: it comes with the tokens, and actor_fwd and the actor compute
    with the same experts, whose log-probabilities are nearer to the engine's then; `record`: it
    comes, and is compared alone; `off`."""
    min_equal_routes: float = bounded(0.5, 0.0, 1.0)
    """Share of the routes of some 16 tokens that must be those which the trainer itself would take.
    A sample with less is dropped as `other_routes` and made again: its routes are shifted, or of
    other tokens."""
    frozen_towers: list[Literal["visual", "audio"]] = field(default_factory=list)
    """Encoders of media, of a model that has some, whose weights stay as they are: they have no
    gradients and no optimizer states."""
    ignore_keys: list[str] = field(default_factory=list)
    """Keys of config.json to leave out of account, such as `rope_scaling.factor`. One that is not
    known is refused, as the engine may compute something by it that the trainer does not; whoever
    knows better lists it here."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Prompts, of files or of a task; see `relax_hpc.data.prompts`.

    A row of a jsonl or parquet file is {"id", "prompt", "messages" or "token_ids", "answer", ...};
    a folder of such files, or one that `datasets` has saved, may be named in place of one, see
    `relax_hpc.data.row_files`. Files must stay as they are while a run uses them, and so must the
    files of media that they name. What rows of sft and dpo are: `relax_hpc.data.examples`.
    """

    task: str = ""
    """Import path of the task, `package.module:Class`, see `relax_hpc.tasks`. The files of its
    prompts are written to the run directory. `relax_hpc.examples.tasks` has small ones, such as
    `relax_hpc.examples.tasks.sort_digits:SortDigits`. Empty: `train` and `eval` name files."""
    digits: int = bounded(4, 1, 6)
    """Digits of a prompt of the example task `SortDigits`, or of a number of `Arithmetic`."""
    train: str = ""
    """File of training prompts, jsonl or parquet, or a folder of them; `FOLDER#SPLIT` is a split of
    one that has several."""
    train_sets: dict[str, str] = field(default_factory=dict)
    """Name of a training set -> file, or folder, of several sets in place of `train`."""
    train_weights: dict[str, float] = field(default_factory=dict)
    """Name of a training set -> its share of the prompts, relative to the others. Each set is then
    visited in passes of its own. Empty: all rows together are one set."""
    eval: dict[str, str] = field(default_factory=dict)
    """Name of an evaluation set -> file, or folder."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field of a row, such as `prompt` or `answer` -> column that has it in the files, such as
    `question`. `reward_model.ground_truth` names a value within an object."""
    ignore_keys: list[str] = field(default_factory=list)
    """Columns of rows, and keys of messages, to leave out of account. Those that the chat template
    and this program do not read are refused unless they are listed here."""
    order_by: str = ""
    """Column of numbers by which training rows are visited, the smallest first, such as a
    difficulty. Rows with the same number are shuffled if `shuffle` is true. Empty: no order."""
    multimodal_keys: dict[str, str] = field(default_factory=dict)
    """Kind of medium, `image`, `video` or `audio` -> column of the rows that names a prompt's: one,
    or a list, of paths relative to the file, file or data URIs, or bytes. A prompt has a place for
    each, `<image>`, `<video>` or `<audio>` in its text, or a part of a message. One that is not
    named: `images` or `image`, `videos` or `video`, `audios` or `audio`. Empty: no column names
    media of that kind."""
    multimodal: MultimodalConfig = field(default_factory=MultimodalConfig)
    shuffle: bool = True
    """Visit prompts in an order drawn from the run's seed, another one for each pass over the
    data."""
    special_tokens: list[Literal["prompt"]] = field(default_factory=list)
    """Columns in which the name of a special token, such as `<|im_end|>`, means that token, as in
    prompts that a chat template has made. In all others it is text like any other."""
    chat_template: str = ""
    """Template that turns chat messages into prompts: `model`, the template in the model's folder,
    or a Jinja file. A prompt that is text is then a message of the user's; the tools of the
    environment, or of a row's column `tools`, a list of signatures, are shown as the template shows
    tools. Empty: prompts are text, as they stand."""
    system: str = ""
    """Message that goes before those of each prompt that begin with none of the system's; empty:
    none."""
    enable_thinking: bool | None = None
    """Variable given to the chat template: with some, the model answers at once if it is false.
    Null: it is not given, so that the template decides, as in transformers."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables given to the chat template, such as `reasoning_effort: high`."""
    template_date: str = ""
    """Date that a chat template reads (`strftime_now`), as YYYY-MM-DD. Empty: the day on which the
    run begins, also for a run that is resumed later."""
    max_prompt_tokens: int = bounded(1024, 1)
    """Most tokens of a prompt. Longer ones are quarantined, counted and skipped, or truncated."""
    truncate: Literal["", "left"] = ""
    """Treatment of prompts that are too long. `left`: their last tokens are taken. Empty: they are
    skipped."""
    max_row_tokens: int = bounded(4096, 1)
    """Most tokens of a sequence that is learned from as it is (`algorithm.name` sft or dpo), prompt
    and response. Rows with longer ones are quarantined, counted and skipped."""
    max_bad_share: float = bounded(0.05, 0.0, 1.0)
    """Stop at start if a larger share of the lines is broken, empty or over-long."""


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """Supervised steps on demonstrations before RL, so that sampled rewards carry a signal."""

    steps: int = bounded(0, 0)
    """Steps of the warm start; 0: none. Needs data.task."""
    batch_size: int = bounded(64, 1)
    lr: float = bounded(2e-3, 0.0)
    noise: float = bounded(0.7, 0.0, 1.0)
    """Share of demonstrations whose answer is another prompt's."""
