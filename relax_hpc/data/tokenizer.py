"""The tokenizer of a Hugging Face directory, without transformers."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError


class Tokenizer:
    """tokenizer.json of a Hugging Face directory; made by `load_tokenizer`."""

    def __init__(self, backend: Any, bos_id: int | None, add_bos: bool, eos_ids: tuple[int, ...], pad_id: int) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        self._add_bos = add_bos
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        """Tokens that end a response, the tokenizer's own one first."""
        self.pad_id = pad_id
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder().values()
        self.special_names = tuple(sorted(token.content for token in added if token.special))
        """Texts of the special tokens."""
        self.directory = Path()
        """Directory of the model."""
        self.named: dict[str, str] = {}
        """`bos_token` and its like -> what it looks like."""

    def encode(self, text: str, special: bool = True, special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts around a text, such as BOS.

        What looks like a special token in the text, such as `<|im_end|>`, is text like any other unless
        `special_tokens`: whoever writes a line of data should not end a turn by it, or hold the place of an image.
        """
        backend = self._reading_special if special_tokens else self._backend
        ids = backend.encode(text, add_special_tokens=special).ids
        if special and self._add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Whether every token of ``other`` has the same id here."""
        mine = self._backend.get_vocab()
        return all(mine.get(token) == number for token, number in other._backend.get_vocab().items())

    def at_most(self, text: str) -> int | None:
        """Bound on the tokens of ``text``, at least 1, found without making them; None: there is none.

        Merging makes fewer tokens of characters, never more.
        """
        unknown, most, around = self._characters
        return None if unknown.search(text) else most * len(text) + around

    @functools.cached_property
    def _characters(self) -> tuple[re.Pattern[str], int, int]:
        """Pattern of characters that are not plain or have no token, the most tokens of others, those around a text."""
        counts = {chr(code): len(self.encode(chr(code), special=False)) for code in range(128)}
        known = "".join(re.escape(character) for character, count in counts.items() if count)
        return re.compile(f"[^{known}]" if known else ""), max(counts.values()), len(self.encode(""))

    @functools.cached_property
    def key(self) -> str:
        """Key that is the same for tokenizers that make the same tokens."""
        about = f"{self._add_bos} {self.bos_id} {self._backend.to_str()}"
        return hashlib.sha256(about.encode()).hexdigest()

    @functools.cached_property
    def _reading_special(self) -> Any:
        """A second backend: the choice is a state of the whole object, which threads share."""
        return type(self._backend).from_str(self._backend.to_str())

    def name_of(self, number: int) -> str:
        """Text of token ``number``, as `<|im_end|>`."""
        return self._backend.id_to_token(number)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._backend.decode(ids, skip_special_tokens=True)


def making(directory: Path) -> str:
    """Advice how to get a tokenizer.json, in whose place Qwen3-Omni is published with vocab.json and merges.txt."""
    make = f"AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')"
    return f'python -c "from transformers import AutoTokenizer; {make}" makes it of the other files'


def load_tokenizer(model_dir: Path | str) -> Tokenizer:
    """Tokenizer of a Hugging Face directory, without importing transformers. ConfigError if it is not usable."""
    from tokenizers import Tokenizer as Backend

    directory = Path(model_dir)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{path}: missing; model.path must name a Hugging Face directory with one: {making(directory)}"
        )
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
    found = Tokenizer(backend, bos_id, add_bos, eos_ids, next(i for i in pads if i is not None))
    texts = {key: settings.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    found.named = {key: token["content"] if isinstance(token, dict) else token for key, token in texts.items() if token}
    found.directory = directory
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} if there is no such file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}; download it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: no JSON object; download it again")
    return found
