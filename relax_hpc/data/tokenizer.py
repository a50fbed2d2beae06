"""The tokenizer of a Hugging Face directory, without transformers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import parse_json, read_json_object, read_regular
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.data.tokenizer_bounds import problems
from relax_hpc.data.tokenizer_settings import CONFIG, add_tokens, read_settings, without_prefix

_MAX_SHOWN_CHARS, _MAX_SHOWN_PROBLEMS = 200, 4
"""Maximum length of a library's message, and number of problems of a file, in an error message."""
_SAMPLE = "Hello, world! 1 + 1 = 2\n"
"""Text that every tokenizer can process."""
MAX_FILE_BYTES = 512 << 20
"""Maximum size of a tokenizer.json; the largest published ones have 35 MB."""


class TokenizerError(ValueError):
    """The tokenizer cannot process a text or tokens."""


@contextlib.contextmanager
def without_panics() -> Iterator[None]:
    """Raise TokenizerError if `tokenizers` panics within the block, or gets an invalid text.

    A panic in Rust is a pyo3_runtime.PanicException (pyo3 0.26), which derives from BaseException:
    no `except Exception` would catch it, and it would end the process.
    """
    try:
        yield
    except TypeError as error:
        # tokenizers 0.22 raises it for half of a surrogate pair, which UTF-8 cannot represent.
        raise TokenizerError(
            f"the tokenizer takes no such text: {escape_line(str(error))}"
        ) from error
    except Exception as error:
        # tokenizers 0.22 raises Exception itself, and no subclass, for its own errors.
        if type(error) is not Exception:
            raise
        raise _failure(error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _failure(error) from error


def _failure(error: BaseException) -> TokenizerError:
    return TokenizerError(f"the tokenizer has failed: {escape_line(str(error))[:_MAX_SHOWN_CHARS]}")


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
        """Tokens that end a response; the tokenizer's `eos_token` comes first."""
        self.pad_id = pad_id
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder().items()
        special = [token.content for number, token in added if token.special or number in eos_ids]
        self.special_names = tuple(sorted(special))
        """Texts of the special tokens, and of added tokens that end a response: in some tokenizers
        `<|im_end|>` is not marked as special."""
        self.directory = Path()
        """Directory of the model."""
        self.named: dict[str, str] = {}
        """Name of a special token, such as `bos_token` -> its text."""

    def encode(self, text: str, special: bool = True, special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; `special` adds the tokens that the tokenizer puts around a text,
        such as BOS.

        A name of a special token in the text, such as `<|im_end|>`, is ordinary text unless
        `special_tokens`. Otherwise a line of a data file could end a turn, or stand for an image.
        TokenizerError: the tokenizer cannot process the text.
        """
        backend = self._reading_special if special_tokens else self._backend
        with without_panics():
            ids = backend.encode(text, add_special_tokens=special).ids
        if special and self._add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_after(self, before: str, text: str, special_tokens: bool = False) -> list[int]:
        """Token ids of ``text`` if it follows the text ``before``.

        SentencePiece tokenizers put a blank before a text. Here it is left out, except after an
        added token if the tokenizer puts a blank there too. TokenizerError: the tokenizer cannot
        process the text.
        """
        bare, is_everywhere = self._without_prefix
        if not bare or not before:
            return self.encode(text, special=False, special_tokens=special_tokens)
        if is_everywhere and before.endswith(self._added_names):
            return self.encode(text, special=False, special_tokens=special_tokens)
        match = self._added_patterns[special_tokens].search(text)
        end = match.start() if match else len(text)
        with without_panics():
            ids = bare.encode(text[:end], add_special_tokens=False).ids
        # From the first added token on, the usual backend puts no blank before the piece.
        return ids + self.encode(text[end:], special=False, special_tokens=special_tokens)

    @functools.cached_property
    def _added_names(self) -> tuple[str, ...]:
        """Texts of all added tokens. Some tokenizers have thousands."""
        return tuple(token.content for token in self._backend.get_added_tokens_decoder().values())

    @functools.cached_property
    def _added_patterns(self) -> dict[bool, re.Pattern[str]]:
        """Whether special tokens are included -> pattern that finds the texts of added tokens."""
        added = self._backend.get_added_tokens_decoder().values()
        ordinary = [re.escape(token.content) for token in added if not token.special]
        names = [re.escape(name) for name in self._added_names]
        return {False: _any_of(ordinary), True: _any_of(names)}

    @functools.cached_property
    def _without_prefix(self) -> tuple[Any, bool]:
        """A backend that puts no blank before a text, and whether the usual backend also puts a
        blank after added tokens; None, False: the usual backend puts no blank."""
        with without_panics():
            changed = without_prefix(json.loads(self._backend.to_str()))
            if changed is None:
                return None, False
            backend = type(self._backend).from_str(json.dumps(changed[0]))
        backend.encode_special_tokens = True
        return backend, changed[1]

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Whether every token of ``other`` has the same id here."""
        ids, other_ids = self._backend.get_vocab(), other._backend.get_vocab()
        return all(ids.get(token) == number for token, number in other_ids.items())

    def max_token_count(self, text: str) -> int | None:
        """Upper bound of the number of tokens of ``text``, at least 1, without tokenizing it; None:
        no bound is known.

        A text never has more tokens than its characters one by one, because a tokenizer merges
        tokens and never splits them.
        """
        unbounded, tokens_per_char, tokens_around = self._character_tokens
        return None if unbounded.search(text) else tokens_per_char * len(text) + tokens_around

    @functools.cached_property
    def _character_tokens(self) -> tuple[re.Pattern[str], int, int]:
        """Pattern of characters that are not ASCII or have no token; maximum number of tokens of
        any other character; number of tokens around a text."""
        counts = {chr(code): len(self.encode(chr(code), special=False)) for code in range(128)}
        bounded = "".join(re.escape(character) for character, count in counts.items() if count)
        pattern = re.compile(f"[^{bounded}]" if bounded else "")
        return pattern, max(counts.values()), len(self.encode(""))

    @functools.cached_property
    def key(self) -> str:
        """Key that is equal for tokenizers that make the same tokens."""
        settings = f"{self._add_bos} {self.bos_id} {self._backend.to_str()}"
        return hashlib.sha256(settings.encode()).hexdigest()

    @functools.cached_property
    def _reading_special(self) -> Any:
        """A second backend, which reads names of special tokens as these tokens. In tokenizers 0.22
        this is a state of the backend, and threads share the first one."""
        with without_panics():
            return type(self._backend).from_str(self._backend.to_str())

    def name_of(self, number: int) -> str:
        """Text of token ``number``, such as `<|im_end|>`."""
        return self._backend.id_to_token(number)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens. TokenizerError: the tokenizer cannot process
        them."""
        with without_panics():
            return self._backend.decode(ids, skip_special_tokens=True)


def tokenizer_advice(directory: Path) -> str:
    """Advice how to make a tokenizer.json. Qwen3-Omni, for one, is published with vocab.json and
    merges.txt instead."""
    make = f"AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')"
    return f'python -c "from transformers import AutoTokenizer; {make}" makes it of the other files'


def load_tokenizer(model_dir: Path | str) -> Tokenizer:
    """Tokenizer of a Hugging Face directory, without importing transformers. ConfigError: it cannot
    be used."""
    directory = Path(model_dir)
    path = directory / "tokenizer.json"
    backend = load_backend(path)
    try:
        settings = read_settings(directory)
        with without_panics():
            if settings.has_no_prefix:
                changed = without_prefix(json.loads(backend.to_str()))
                if changed:
                    backend = type(backend).from_str(json.dumps(changed[0]))
            add_tokens(backend, settings, path)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        # The file may have entries of any type.
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
    pads = [id_named("pad_token"), *(config.get("pad_token_id") for config in configs)]
    pad_id = next((number for number in pads if _is_token_id(number)), eos_ids[0])
    tokenizer = Tokenizer(backend, id_named("bos_token"), settings.add_bos, eos_ids, pad_id)
    try:
        tokenizer.decode(tokenizer.encode(_SAMPLE))
    except TokenizerError as error:
        raise ConfigError(f"{path}: {error}, of {_SAMPLE!r}; download it again") from error
    tokenizer.named = settings.named
    tokenizer.directory = directory
    return tokenizer


def load_backend(path: Path) -> Any:
    """The `tokenizers.Tokenizer` in the file ``path``. ConfigError: it cannot be used."""
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        raise ConfigError(
            f"{path}: missing; model.path must name a Hugging Face directory with one: "
            f"{tokenizer_advice(path.parent)}"
        )
    try:
        data = read_regular(path, MAX_FILE_BYTES)
        file_problems = list(problems(parse_json(data)))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a tokenizer: {error}; download it again") from error
    if file_problems:
        shown = "; ".join(file_problems[:_MAX_SHOWN_PROBLEMS])
        raise ConfigError(f"{path}: {shown}; download it again")
    try:
        with without_panics():
            backend = Backend.from_buffer(data)
    except Exception as error:  # tokenizers 0.22 raises Exception itself
        raise ConfigError(f"{path}: not a tokenizer: {error}; download it again") from error
    # A file that was saved after training may contain the truncation and padding of the training
    # batches. transformers and SGLang reset both in each call.
    backend.no_truncation()
    backend.no_padding()
    dropout = getattr(backend.model, "dropout", None)
    if dropout:
        raise ConfigError(
            f"{path}: dropout: found {dropout:g}, allowed: null; with it a text has other tokens "
            "each time"
        )
    return backend


def _end_tokens(
    eos_id: int | None, configs: Sequence[Mapping[str, Any]], directory: Path
) -> tuple[int, ...]:
    """Tokens that end a response: ``eos_id``, the tokenizer's `eos_token`, then `eos_token_id` of
    ``configs``. ConfigError: a value is not a token id."""
    values: list[Any] = [eos_id]
    for config in configs:
        value = config.get("eos_token_id")
        values += value if isinstance(value, list) else [value]
    numbers: list[int] = []
    for value in values:
        if value is None:
            continue
        if not _is_token_id(value):
            shown = str(value)[:_MAX_SHOWN_CHARS]
            raise ConfigError(f"{directory}: eos_token_id: found {shown}, allowed: ids of tokens")
        numbers.append(value)
    return tuple(dict.fromkeys(numbers))


def _any_of(expressions: Sequence[str]) -> re.Pattern[str]:
    """Pattern that matches each of ``expressions``; if they are empty, it matches nothing."""
    return re.compile("|".join(expressions) or "(?!)")


def _is_token_id(number: Any) -> TypeGuard[int]:
    """Whether ``number`` may be the id of a token. Some configurations have -1, or a boolean."""
    return type(number) is int and number >= 0
