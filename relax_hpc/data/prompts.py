"""Prompts of a jsonl file, the tokenizer that encodes them, and which prompt a ticket gets."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.errors import ConfigError


class Tokenizer:
    """tokenizer.json of a Hugging Face directory; made by `load_tokenizer`."""

    def __init__(self, backend: Any, bos_id: int | None, add_bos: bool, eos_ids: tuple[int, ...], pad_id: int) -> None:
        self._backend = backend
        self._add_bos = add_bos
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        """Tokens that end a response, the tokenizer's own one first."""
        self.pad_id = pad_id
        self.vocab_size: int = backend.get_vocab_size()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts around a text, such as BOS."""
        ids = self._backend.encode(text, add_special_tokens=special).ids
        if special and self._add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._backend.decode(ids, skip_special_tokens=True)


def load_tokenizer(model_dir: Path | str) -> Tokenizer:
    """Tokenizer of a Hugging Face directory, without importing transformers. ConfigError if it is not usable."""
    from tokenizers import Tokenizer as Backend

    directory = Path(model_dir)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: missing; model.path must name a Hugging Face directory with a tokenizer.json")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer: {error}; download it again") from error
    settings = _read_json(directory / "tokenizer_config.json")
    configs = [_read_json(directory / name) for name in ("generation_config.json", "config.json")]

    def named(key: str) -> int | None:
        token = settings.get(key)
        return backend.token_to_id(token["content"] if isinstance(token, dict) else token) if token else None

    numbered = [config.get("eos_token_id") for config in configs]
    eos = [named("eos_token"), *(i for found in numbered for i in (found if isinstance(found, list) else [found]))]
    eos_ids = tuple(dict.fromkeys(i for i in eos if i is not None))
    if not eos_ids:
        raise ConfigError(f"{directory}: no end-of-text token; set eos_token_id in generation_config.json")
    pads = [named("pad_token"), *(config.get("pad_token_id") for config in configs), eos_ids[0]]
    bos_id = named("bos_token")
    add_bos = bool(settings.get("add_bos_token")) and bos_id is not None
    return Tokenizer(backend, bos_id, add_bos, eos_ids, next(i for i in pads if i is not None))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} if there is no such file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}; download it again") from error


@dataclass(frozen=True, slots=True)
class Prompt:
    """One usable line of a prompt file."""

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """The other fields of the line."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is skipped."""

    line: int
    """Counted from 1."""
    reason: str
    """broken_json | missing_field | wrong_type | duplicate_id | empty_prompt | over_long"""


def load_prompts(
    path: Path | str, tokenizer: Tokenizer, max_tokens: int, max_bad_share: float
) -> tuple[list[Prompt], list[BadLine]]:
    """Prompts of a jsonl file in its order, and the lines that are none. Blank lines do not count.

    A line is {"id", "prompt" (text) or "token_ids", "answer", ...}; the rest becomes metadata.
    ConfigError: no such file, no usable line, or a larger share of bad lines than `max_bad_share`.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; data.train and data.eval name jsonl files"
        ) from error
    prompts: list[Prompt] = []
    bad: list[BadLine] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(line, tokenizer, max_tokens)
        if isinstance(prompt, Prompt) and prompt.prompt_id in seen:
            prompt = "duplicate_id"
        if isinstance(prompt, str):
            bad.append(BadLine(number, prompt))
        else:
            prompts.append(prompt)
            seen.add(prompt.prompt_id)
    _check_share(path, len(prompts), bad, max_bad_share)
    return prompts, bad


def _check_share(path: Path | str, good: int, bad: list[BadLine], max_bad_share: float) -> None:
    total = good + len(bad)
    if total == 0:
        raise ConfigError(f'{path}: no prompts; write one {{"id", "prompt", "answer"}} a line')
    if good == 0 or len(bad) > max_bad_share * total:
        raise ConfigError(
            f"{path}: {len(bad)} of {total} lines are bad, first line {bad[0].line}: {bad[0].reason}; "
            f"allowed share {max_bad_share}; mend the file or raise data.max_bad_share"
        )


def _parse(line: bytes, tokenizer: Tokenizer, max_tokens: int) -> Prompt | str:
    """The prompt in `line`, or the reason why there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "broken_json"
    if not isinstance(record, dict):
        return "broken_json"
    source = "token_ids" if "token_ids" in record else "prompt"
    if not {"id", "answer", source} <= record.keys():
        return "missing_field"
    prompt_id, answer, given = record.pop("id"), record.pop("answer"), record.pop(source)
    if not isinstance(prompt_id, str | int) or not isinstance(answer, str | int | float):
        return "wrong_type"
    if source == "prompt":
        if not isinstance(given, str):
            return "wrong_type"
        text, ids = given, tokenizer.encode(given) if given.strip() else []
    else:
        if not isinstance(given, list) or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in given):
            return "wrong_type"
        text, ids = str(record.pop("prompt", "") or tokenizer.decode(given)), given
    if not ids:
        return "empty_prompt"
    if len(ids) > max_tokens:
        return "over_long"
    return Prompt(str(prompt_id), tuple(ids), text, str(answer), record)


def prompt_at(ticket: int, attempt: int, count: int, seed: int, shuffle: bool) -> int:
    """Index, below `count`, of the prompt that `ticket` gets at its `attempt`: a pure function of its arguments.

    Attempt 0 visits each prompt once an epoch of `count` tickets, in file order or in an order drawn anew from
    `seed` each epoch. Later attempts draw from the other prompts, so a prompt that failed is not tried again.
    """
    epoch, position = divmod(ticket, count)
    first = int(_order(count, seed, epoch)[position]) if shuffle else position
    if attempt == 0 or count == 1:
        return first
    other = _hash(f"{seed}/{ticket}/{attempt}") % (count - 1)
    return other + (other >= first)


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count): indices sorted by SplitMix64 of (seed, epoch, index).

    Not numpy's own generator: its streams may change with its version, and a resumed run must see the same order.
    """
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_hash(f"{seed}/{epoch}"))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)))


def _hash(text: str) -> int:
    """64 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
