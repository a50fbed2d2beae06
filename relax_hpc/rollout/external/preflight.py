"""Comparison of an external engine with the run: model files, server arguments, log-probabilities.

An update of the weights changes tensors only. A server that was started with another config.json,
tokenizer or template would accept it, and would sample from another policy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.foreign_files import parse_json, read_regular
from relax_hpc.data.tokenizer import MAX_FILE_BYTES
from relax_hpc.rollout.engines.engine import PromptScores

MODEL_MISMATCH, FLAGS_MISSING, NOT_AN_ENGINE = "model_mismatch", "flags_missing", "not_an_engine"
"""Codes of refusals."""
FACTOR = 10.0
"""Largest ratio of the difference of log-probabilities to the run's own parity metric."""
FLOORS = {"float32": 1e-4, "bfloat16": 1e-2}
"""Parity, in nats, that is assumed at least, by type: kernels differ between GPU types."""
_JSON_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"),
    "chat_template.jinja",
)
_TOKENIZER_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template"
_INCIDENTAL = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
)
"""Keys of JSON files that do not change what a model computes. The type is a server argument."""
_MAX_SHOWN_DIFFERENCES, _MAX_SHOWN_CHARS = 3, 60
ModelFiles = dict[str, Any]
"""File name -> its JSON content, or its digest. `describe_model` creates it."""


class JoinRefused(Exception):
    """An external engine may not join. A retry would fail too, until the engine is restarted."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


def describe_model(directory: Path) -> ModelFiles:
    """Content or digest of the small files in a Hugging Face model directory that define what its
    tensors mean. Files that do not exist are left out. OSError, ValueError: one cannot be read."""
    files = ModelFiles()
    for name in _JSON_FILES:
        if (directory / name).exists():
            files[name] = _without_incidental(parse_json(read_regular(directory / name)))
    for name in _TOKENIZER_FILES:
        if (directory / name).exists():
            files[name] = _digest(read_regular(directory / name, MAX_FILE_BYTES))
    if (directory / _TOKENIZER_CONFIG).exists():
        settings = parse_json(read_regular(directory / _TOKENIZER_CONFIG))
        if isinstance(settings, dict) and settings.get(_TEMPLATE):
            files[_TEMPLATE] = _digest(repr(settings[_TEMPLATE]).encode())
    return files


def vocabulary_size(directory: Path) -> int:
    """Number of token ids of the model in a Hugging Face model directory; 0: unknown."""
    try:
        config = parse_json(read_regular(directory / "config.json"))
    except (OSError, ValueError):
        return 0
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int):
            return size
    return 0


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _without_incidental(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {name: item for name, item in value.items() if name not in _INCIDENTAL}
    return {name: _without_incidental(item) for name, item in kept.items()}


def check_files(found: ModelFiles, expected: ModelFiles, directory: str) -> None:
    """JoinRefused unless the files of an engine's model are those of the run's model.
    ``directory``: of the engine, for the message."""
    differences = list(_differences("", found, expected))
    if differences:
        shown = "; ".join(differences[:_MAX_SHOWN_DIFFERENCES])
        if len(differences) > _MAX_SHOWN_DIFFERENCES:
            shown += f"; and {len(differences) - _MAX_SHOWN_DIFFERENCES} more"
        raise JoinRefused(
            MODEL_MISMATCH,
            f"{directory}: {shown}; start the engine from the run's model directory or a copy",
        )


def _differences(path: str, found: Any, expected: Any) -> Iterator[str]:
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        if found != expected:
            yield f"{path}: found {_short(found)}, expected {_short(expected)}"
        return
    for name in sorted(found.keys() | expected.keys()):
        inner = f"{path}: {name}" if path else name
        yield from _differences(inner, found.get(name), expected.get(name))


def _short(value: Any) -> str:
    return "none" if value is None else str(value)[:_MAX_SHOWN_CHARS]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequiredFlags:
    """Arguments of an SGLang server on which the run relies."""

    dtype: str
    max_stream_interval: int
    """Most tokens between two pieces of a stream."""
    forbids_cache: bool
    """Whether the server may not reuse keys and values of earlier requests."""
    returns_routes: bool
    """Whether the server must return the experts of each token."""
    taken_seeds: frozenset[int]
    """Seeds of other engines. Two engines of one seed may draw equal samples."""
    min_context_tokens: int
    """Tokens of the longest row."""


def check_flags(server_info: Mapping[str, Any], required: RequiredFlags) -> None:
    """JoinRefused: the server was started without arguments on which the run relies. It names each
    of them."""
    missing = list(_missing_flags(server_info, required))
    if missing:
        raise JoinRefused(FLAGS_MISSING, f"{'; '.join(missing)}; restart the server with them")


def _missing_flags(info: Mapping[str, Any], required: RequiredFlags) -> Iterator[str]:
    def value(name: str) -> str:
        return f"{name}: found {_short(info.get(name))}"

    if info.get("incremental_streaming_output") is not True:
        yield f"{value('incremental_streaming_output')}, expected true"
    interval = info.get("stream_interval")
    if not (isinstance(interval, int) and 1 <= interval <= required.max_stream_interval):
        yield f"{value('stream_interval')}, expected 1 to {required.max_stream_interval}"
    if required.forbids_cache and info.get("disable_radix_cache") is not True:
        yield f"{value('disable_radix_cache')}, expected true (rollout.partial_rollout: recompute)"
    if required.returns_routes and info.get("enable_return_routed_experts") is not True:
        yield f"{value('enable_return_routed_experts')}, expected true (model.routing_replay)"
    if info.get("dtype") not in (required.dtype, "auto"):
        yield f"{value('dtype')}, expected {required.dtype}"
    seed = info.get("random_seed")
    if isinstance(seed, int) and seed in required.taken_seeds:
        yield f"{value('random_seed')}, which another engine has, expected another number"
    context = info.get("context_length")
    if isinstance(context, int) and context < required.min_context_tokens:
        yield f"{value('context_length')}, expected at least {required.min_context_tokens}"
    if info.get("skip_tokenizer_init"):
        yield f"{value('skip_tokenizer_init')}, expected false"


def compare_scores(found: PromptScores, reference: PromptScores) -> float:
    """Mean absolute difference of two engines' log-probabilities of the same tokens, in nats;
    infinity if a log-probability is not finite."""
    differences = list[float]()
    for found_row, reference_row in zip(found.logprobs, reference.logprobs, strict=True):
        for one, other in zip(found_row, reference_row, strict=True):
            differences.append(abs(one - other))
    mean = math.fsum(differences) / max(1, len(differences))
    return mean if math.isfinite(mean) else math.inf


def check_scores(difference: float, parity: float, dtype: str) -> None:
    """JoinRefused: the engine computes another policy. ``difference``: see `compare_scores`.
    ``parity``: the run's metric parity/logprob_abs_diff, in nats; 0: it has none yet."""
    allowed = FACTOR * max(parity, FLOORS.get(dtype, FLOORS["bfloat16"]))
    if difference > allowed:
        raise JoinRefused(
            MODEL_MISMATCH,
            f"its log-probabilities of fixed prompts differ by {difference:.3g} nats a token, "
            f"allowed {allowed:.3g} ({FACTOR:g} times the parity of the run); it serves another "
            "model, or computes in another precision",
        )


def probe_prompts(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Fixed sequences of tokens for the comparison: the run's own ``prompts``, repeated and cut to
    ``max_tokens``, so that late positions are compared too. Prompts of one token are left out."""
    probes = list[list[int]]()
    for prompt in prompts:
        if len(prompt) > 1:
            repeated = list(prompt) * (1 + max_tokens // len(prompt))
            probes.append(repeated[:max_tokens])
    return probes
