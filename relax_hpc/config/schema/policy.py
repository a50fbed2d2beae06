"""Settings of the trained model and of its data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from relax_hpc.base.settings import bounded
from relax_hpc.config.schema.multimodal import MultimodalConfig


@dataclass(kw_only=True, slots=True)
class TinyModelConfig:
    """Shape of a small Qwen3 model that is created offline with its tokenizer: dense, a mixture of
    experts, or with a vision tower."""

    hidden_size: int = bounded(64, 8)
    """Width of the model. It must be a multiple of num_attention_heads' groups."""
    num_layers: int = bounded(2, 1)
    """Number of layers."""
    num_attention_heads: int = bounded(2, 1)
    """Number of attention heads."""
    num_key_value_heads: int = bounded(1, 1)
    """Number of key and value heads."""
    head_dim: int = bounded(32, 8)
    """Width of a head."""
    intermediate_size: int = bounded(192, 8)
    """Width of a feed-forward layer."""
    num_experts: int = bounded(0, 0)
    """Number of experts of every layer, instead of its feed-forward part. With 0 the model is
    dense."""
    num_experts_per_tok: int = bounded(2, 1)
    """Number of experts that each token uses."""
    moe_intermediate_size: int = bounded(64, 8)
    """Width of an expert."""
    vision_layers: int = bounded(0, 0)
    """Number of layers of the vision tower, which is as wide as the model. With 0 the model takes
    only text."""
    audio_layers: int = bounded(0, 0)
    """Number of layers of the audio tower of a model with experts and a vision tower: a
    Qwen3-Omni."""
    tie_word_embeddings: bool = True
    """Whether the output layer uses the weights of the embedding."""
    chat: bool = False
    """Whether the tokenizer supports chats with tools in Qwen3's format: turns, `<tool_call>`, the
    characters of JSON, and a chat template."""
    words: list[str] = field(default_factory=list)
    """Texts that are one token each in the tokenizer, in addition to characters. Example: names of
    tools."""


RoutingReplay = Literal["off", "record", "on"]


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The trained policy, and the frozen models of the run."""

    path: str = ""
    """Hugging Face directory (config.json, tokenizer.json, *.safetensors), such as
    `weights/<version>/model` of another run. If it is empty, the run creates `tiny`."""
    reference_path: str = ""
    """Hugging Face directory of the reference. If it is empty, the reference is the policy before
    its first step."""
    teacher_path: str = ""
    """Hugging Face directory of the teacher, for an algorithm with a teacher. It may have any size
    and must have the policy's tokenizer."""
    critic_path: str = ""
    """Hugging Face directory of the critic's first weights. It may have any size and must have the
    policy's tokenizer. If it is empty, the critic starts from the policy's first weights."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters in training and inference. If it is not set, `device: cuda` uses
    bfloat16."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the models. Every rank of a `cuda` group uses the device of its local rank. A run
    on `cpu` whose groups request GPUs is refused."""
    routing_replay: RoutingReplay = "off"
    """Use of the experts that the engine chose for each token of a mixture of experts (rollout
    routing replay, arXiv 2510.11370). `on`: they are stored with the tokens, and actor_fwd and the
    actor compute with the same experts; log-probabilities are then nearer to the engine's.
    `record`: they are stored and only compared. `off`: they are not stored."""
    min_equal_routes: float = bounded(0.5, 0.0, 1.0)
    """Smallest share of the routes of about 16 tokens that must equal the routes that the trainer
    would choose. A sample with a smaller share is dropped with the reason `other_routes` and
    generated again: its routes are shifted, or belong to other tokens."""
    long_row_attention: Literal["packed", "by_row"] = "packed"
    """Attention of packs whose rows have 2,048 tokens or more on average, on Hopper GPUs in half
    precision with heads of 128 elements. `packed`: one call for all rows. `by_row`: cuDNN computes
    each row. On an H200 that took half the time for one row of 16,384 tokens; but its gradients,
    and the time for rows of new lengths, for each of which cuDNN makes a plan, were not measured on
    a GPU."""
    tower_attention: Literal["by_frame", "packed"] = "by_frame"
    """Attention of media encoders on GPUs in half precision. `by_frame`: a call for each image,
    frame or window. `packed`: one call for all of them, which was not measured on a GPU."""
    frozen_towers: list[Literal["visual", "audio"]] = field(default_factory=list)
    """Media encoders of the model whose weights do not change. They have no gradients and no
    optimizer states."""
    ignore_keys: list[str] = field(default_factory=list)
    """Keys of config.json to ignore, such as `rope_scaling.factor`. An unknown key is refused,
    because the engine may use it in a computation that the trainer does not have. List it here if
    you know that it does not matter."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Prompts from files or from a task; see `relax_hpc.data.prompts`.

    A row of a jsonl or parquet file is {"id", "prompt", "messages" or "token_ids", "answer", ...}.
    A path may also name a folder of such files, or a folder that `datasets` has saved, see
    `relax_hpc.data.row_files`. Files, and the media files that they name, must not change while a
    run uses them. For rows of sft and dpo see `relax_hpc.data.examples`.
    """

    task: str = ""
    """Import path of the task, `package.module:Class`, see `relax_hpc.tasks`. Its prompts are
    written to files in the run directory. `relax_hpc.examples.tasks` has small tasks, such as
    `relax_hpc.examples.tasks.sort_digits:SortDigits`. If it is empty, `train` and `eval` name
    files."""
    digits: int = bounded(4, 1, 6)
    """Number of digits of a prompt of the example task `SortDigits`, or of a number of
    `Arithmetic`."""
    train: str = ""
    """File of training prompts, jsonl or parquet, or a folder of such files. `FOLDER#SPLIT` is one
    split of a folder with several."""
    train_sets: dict[str, str] = field(default_factory=dict)
    """File or folder of each training set by its name, for several sets instead of `train`."""
    train_weights: dict[str, float] = field(default_factory=dict)
    """Weight of each training set by its name: its share of the prompts relative to the other sets.
    Each set then has its own passes. If it is empty, all rows together are one set."""
    eval: dict[str, str] = field(default_factory=dict)
    """File or folder of each evaluation set by its name."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column of the files for each field of a row: `prompt: question` reads the field `prompt` from
    the column `question`. `reward_model.ground_truth` names a value inside an object."""
    ignore_keys: list[str] = field(default_factory=list)
    """Columns of rows, and keys of messages, to ignore. Other columns and keys that neither the
    chat template nor this program reads are refused."""
    order_by: str = ""
    """Column of numbers, such as a difficulty, that orders the training rows, smallest first. Rows
    with equal numbers are shuffled if `shuffle` is true. If it is empty, rows are not ordered."""
    multimodal_keys: dict[str, str] = field(default_factory=dict)
    """Column of the rows for each kind of medium: `image`, `video` or `audio`. It contains one
    medium or a list: paths relative to the file, file or data URIs, or bytes. The prompt has a
    placeholder for each medium: `<image>`, `<video>` or `<audio>` in its text, or a part of a
    message. A kind that is not named uses `images` or `image`, `videos` or `video`, `audios` or
    `audio`. An empty name means that no column has media of that kind."""
    multimodal: MultimodalConfig = field(default_factory=MultimodalConfig)
    shuffle: bool = True
    """Visit prompts in an order that is drawn from the run's seed, a different one for each pass
    over the data."""
    special_tokens: list[Literal["prompt"]] = field(default_factory=list)
    """Columns in which the name of a special token, such as `<|im_end|>`, means that token, as in
    prompts that a chat template has created. In all other columns it is ordinary text."""
    chat_template: str = ""
    """Template that turns chat messages into prompts: `model`, the template in the model's folder,
    or a Jinja file. A prompt that is text is then a message of the user. The template also shows
    the tools of the environment, or of a row's column `tools` (a list of signatures). If it is
    empty, prompts are used as text without change."""
    system: str = ""
    """System message that is added to each prompt without one. If it is empty, none is added."""
    enable_thinking: bool | None = None
    """Variable of the chat template. With some templates the model answers immediately if it is
    false. With null it is not passed, and the template decides, as in transformers."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `reasoning_effort: high`."""
    template_date: str = ""
    """Date that a chat template reads (`strftime_now`), as YYYY-MM-DD. If it is empty, it is the
    day on which the run first started, also after a resume."""
    max_prompt_tokens: int = bounded(1024, 1)
    """Maximum number of tokens of a prompt. Longer prompts are quarantined, counted and skipped, or
    truncated."""
    truncate: Literal["", "left"] = ""
    """Treatment of prompts that are too long. `left`: only the last tokens are kept. If it is
    empty, such prompts are skipped."""
    max_row_tokens: int = bounded(4096, 1)
    """Maximum number of tokens of a training sequence from a file (`algorithm.name` sft or dpo),
    prompt and response together. Rows with longer sequences are quarantined, counted and
    skipped."""
    max_bad_share: float = bounded(0.05, 0.0, 1.0)
    """Stop at the start if a larger share of the lines is broken, empty or too long."""


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """Supervised steps on demonstrations before RL, so that sampled rewards contain a signal."""

    steps: int = bounded(0, 0)
    """Number of steps of the warm start. With 0 there is no warm start. It needs data.task."""
    batch_size: int = bounded(64, 1)
    """Number of demonstrations in a step."""
    lr: float = bounded(2e-3, 0.0)
    """Learning rate."""
    noise: float = bounded(0.7, 0.0, 1.0)
    """Share of demonstrations whose answer belongs to another prompt."""
