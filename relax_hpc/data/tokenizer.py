"""The tokenizer of a Hugging Face directory, without transformers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import parse_json, read_json_object, read_regular
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.data.tokenizer_bounds import problems
from relax_hpc.data.tokenizer_settings import CONFIG, add_tokens, read_settings, without_prefix

_SHOWN, _FEW = 200, 4
"""Characters of a message of the library, and mistakes of a file, that are shown."""
_SAMPLE = "Hello, world! 1 + 1 = 2\n"
"""Text that every tokenizer can process."""


MAX_FILE_BYTES = 512 << 20
"""Bytes of a tokenizer.json at most; the largest published ones have 35 MB."""


class TokenizerError(ValueError):
    """Error of a text, or of tokens, that the tokenizer cannot process."""


@contextlib.contextmanager
def without_panics() -> Iterator[None]:
    """Raise TokenizerError where `tokenizers` panics within the block, or gets a text that is no
    Unicode.

    A panic of Rust is a pyo3_runtime.PanicException (pyo3 0.26), which derives from BaseException:
    it would pass every `except Exception`, and end the process.
    """
    try:
        yield
    except TypeError as error:
        # Half of a surrogate pair has no UTF-8, which the library says by this type.
        raise TokenizerError(
            f"the tokenizer takes no such text: {escape_line(str(error))}"
        ) from error
    except Exception as error:
        # The library raises bare Exceptions.
        if type(error) is not Exception:
            raise
        raise TokenizerError(
            f"the tokenizer has failed: {escape_line(str(error))[:_SHOWN]}"
        ) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(
            f"the tokenizer has failed: {escape_line(str(error))[:_SHOWN]}"
        ) from error


class Tokenizer:
    """tokenizer.json of a Hugging Face directory; made by `load_tokenizer`."""

    def __init__(
        self, backend: Any, bos_id: int | None, add_bos: bool, eos_ids: tuple[int, ...], pad_id: int
    ) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        self._add_bos = add_bos
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        """Tokens that end a response, the tokenizer's own one first."""
        self.pad_id = pad_id
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder().items()
        special = [token.content for number, token in added if token.special or number in eos_ids]
        self.special_names = tuple(sorted(special))
        """Texts of the special tokens, and of added ones that end a response: some tokenizers have
        `<|im_end|>` as a word."""
        self.directory = Path()
        """Directory of the model."""
        self.named: dict[str, str] = {}
        """`bos_token` and its like -> what it looks like."""

    def encode(self, text: str, special: bool = True, special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts around a text, such as BOS.

        What looks like a special token in the text, such as `<|im_end|>`, is text like any other
        unless `special_tokens`: whoever writes a line of data should not end a turn by it, or hold
        the place of an image. TokenizerError: the tokenizer cannot process the text.
        """
        backend = self._reading_special if special_tokens else self._backend
        with without_panics():
            ids = backend.encode(text, add_special_tokens=special).ids
        if special and self._add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_after(self, before: str, text: str, special_tokens: bool = False) -> list[int]:
        """Token ids of ``text`` as it stands behind the text ``before``: without the blank that
        SentencePiece's tokenizers put before a text, except where they put one behind an added
        token too. TokenizerError: the tokenizer cannot process the text."""
        bare, is_everywhere = self._without_prefix
        if not bare or not before:
            return self.encode(text, special=False, special_tokens=special_tokens)
        if is_everywhere and before.endswith(self._added_names):
            return self.encode(text, special=False, special_tokens=special_tokens)
        match = self._added_patterns[special_tokens].search(text)
        end = match.start() if match else len(text)
        with without_panics():
            ids = bare.encode(text[:end], add_special_tokens=False).ids
        # What begins with a token is no beginning of a text.
        return ids + self.encode(text[end:], special=False, special_tokens=special_tokens)

    @functools.cached_property
    def _added_names(self) -> tuple[str, ...]:
        """Texts of all added tokens. Some tokenizers have thousands."""
        return tuple(token.content for token in self._backend.get_added_tokens_decoder().values())

    @functools.cached_property
    def _added_patterns(self) -> dict[bool, re.Pattern[str]]:
        """Expression that finds the texts of added tokens; with the special ones -> True."""
        added = self._backend.get_added_tokens_decoder().values()
        words = [re.escape(token.content) for token in added if not token.special]
        names = [re.escape(name) for name in self._added_names]
        return {False: _any_of(words), True: _any_of(names)}

    @functools.cached_property
    def _without_prefix(self) -> tuple[Any, bool]:
        """A backend that puts no blank before a text, and whether the usual one puts it behind
        added tokens too; None: the usual one puts none."""
        with without_panics():
            changed = without_prefix(json.loads(self._backend.to_str()))
            if changed is None:
                return None, False
            backend = type(self._backend).from_str(json.dumps(changed[0]))
        backend.encode_special_tokens = True
        return backend, changed[1]

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Whether every token of ``other`` has the same id here."""
        mine = self._backend.get_vocab()
        return all(
            mine.get(token) == number for token, number in other._backend.get_vocab().items()
        )

    def at_most(self, text: str) -> int | None:
        """Bound on the tokens of ``text``, at least 1, found without making them; None: there is
        none.

        Merging makes fewer tokens of characters, never more.
        """
        unknown, most, around = self._characters
        return None if unknown.search(text) else most * len(text) + around

    @functools.cached_property
    def _characters(self) -> tuple[re.Pattern[str], int, int]:
        """Pattern of characters that are not plain or have no token, the most tokens of others,
        those around a text."""
        counts = {chr(code): len(self.encode(chr(code), special=False)) for code in range(128)}
        known = "".join(re.escape(character) for character, count in counts.items() if count)
        return (
            re.compile(f"[^{known}]" if known else ""),
            max(counts.values()),
            len(self.encode("")),
        )

    @functools.cached_property
    def key(self) -> str:
        """Key that is the same for tokenizers that make the same tokens."""
        about = f"{self._add_bos} {self.bos_id} {self._backend.to_str()}"
        return hashlib.sha256(about.encode()).hexdigest()

    @functools.cached_property
    def _reading_special(self) -> Any:
        """A second backend: the choice is a state of the whole object, which threads share."""
        with without_panics():
            return type(self._backend).from_str(self._backend.to_str())

    def name_of(self, number: int) -> str:
        """Text of token ``number``, as `<|im_end|>`."""
        return self._backend.id_to_token(number)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens. TokenizerError: the tokenizer cannot process
        them."""
        with without_panics():
            return self._backend.decode(ids, skip_special_tokens=True)


def making(directory: Path) -> str:
    """Advice how to get a tokenizer.json, in whose place Qwen3-Omni is published with vocab.json
    and merges.txt."""
    make = f"AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')"
    return f'python -c "from transformers import AutoTokenizer; {make}" makes it of the other files'


def load_tokenizer(model_dir: Path | str) -> Tokenizer:
    """Tokenizer of a Hugging Face directory, without importing transformers. ConfigError if it is
    not usable."""
    directory = Path(model_dir)
    path = directory / "tokenizer.json"
    backend = load_backend(path)
    try:
        settings = read_settings(directory)
        with without_panics():
            if settings.has_no_prefix and (changed := without_prefix(json.loads(backend.to_str()))):
                backend = type(backend).from_str(json.dumps(changed[0]))
            add_tokens(backend, settings, path)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        # Entries of types that no tokenizer has.
        raise ConfigError(
            f"{directory / CONFIG}: cannot be used: {error!r}; download it again"
        ) from error

    def id_named(name: str) -> int | None:
        text = settings.named.get(name)
        return None if text is None else backend.token_to_id(text)

    paths = [directory / name for name in ("generation_config.json", "config.json")]
    configs = [read_json_object(path, is_optional=True) for path in paths]
    eos_ids = _end_tokens(id_named("eos_token"), configs, directory)
    if not eos_ids:
        raise ConfigError(
            f"{directory}: no end-of-text token; set eos_token_id in generation_config.json"
        )
    pads = [id_named("pad_token"), *(config.get("pad_token_id") for config in configs), eos_ids[0]]
    pad_id = next(number for number in pads if _is_token_id(number))
    tokenizer = Tokenizer(backend, id_named("bos_token"), settings.add_bos, eos_ids, pad_id)
    try:
        tokenizer.decode(tokenizer.encode(_SAMPLE))
    except TokenizerError as error:
        raise ConfigError(f"{path}: {error}, of {_SAMPLE!r}; download it again") from error
    tokenizer.named = settings.named
    tokenizer.directory = directory
    return tokenizer


def load_backend(path: Path) -> Any:
    """The `tokenizers.Tokenizer` in the file ``path``. ConfigError: it is none."""
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        raise ConfigError(
            f"{path}: missing; model.path must name a Hugging Face directory with one: "
            f"{making(path.parent)}"
        )
    try:
        data = read_regular(path, MAX_FILE_BYTES)
        mistakes = list(problems(parse_json(data)))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a tokenizer: {error}; download it again") from error
    if mistakes:
        raise ConfigError(f"{path}: {'; '.join(mistakes[:_FEW])}; download it again")
    try:
        with without_panics():
            backend = Backend.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer: {error}; download it again") from error
    # A file that was saved after training keeps the length that batches were cut or padded to.
    # transformers and SGLang reset both for each call.
    backend.no_truncation()
    backend.no_padding()
    if dropout := getattr(backend.model, "dropout", None):
        raise ConfigError(
            f"{path}: dropout: found {dropout:g}, allowed: null; with it a text has other tokens "
            "each time"
        )
    return backend


def _end_tokens(
    own: int | None, configs: Sequence[Mapping[str, Any]], directory: Path
) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's ``own`` one, then `eos_token_id` of ``configs``.
    ConfigError: one is no token."""
    numbers = [own]
    for config in configs:
        value = config.get("eos_token_id")
        numbers += value if isinstance(value, list) else [value]
    numbers = [number for number in numbers if number is not None]
    if wrong := [number for number in numbers if not _is_token_id(number)]:
        raise ConfigError(
            f"{directory}: eos_token_id: found {str(wrong[0])[:_SHOWN]}, allowed: ids of tokens"
        )
    return tuple(dict.fromkeys(numbers))


def _any_of(expressions: Sequence[str]) -> re.Pattern[str]:
    """Expression that matches each of ``expressions``; nothing, if there are none."""
    return re.compile("|".join(expressions) or "(?!)")


def _is_token_id(number: Any) -> bool:
    """Whether ``number`` may be the id of a token. Some configurations have -1, or a boolean."""
    return type(number) is int and number >= 0
