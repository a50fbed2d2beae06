"""Settings of a tokenizer outside of tokenizer.json, in other files of a Hugging Face directory,
read like transformers 5.12 reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object

if TYPE_CHECKING:
    from tokenizers import AddedToken

NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Names of special tokens that every tokenizer may have."""
_PREFIX_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
"""Values of `tokenizer_class` for which transformers uses `add_prefix_space`."""
CONFIG = "tokenizer_config.json"


@dataclass(kw_only=True, slots=True)
class TokenizerSettings:
    """Named and added tokens of a tokenizer."""

    named: dict[str, str] = field(default_factory=dict)
    """Name of a special token, such as `bos_token` or `image_token`, and its text. Chat templates
    see these as variables."""
    numbered: dict[int, AddedToken] = field(default_factory=dict)
    """Added tokens with flags, by id, as `added_tokens_decoder` or added_tokens.json has them."""
    special: list[AddedToken] = field(default_factory=list)
    """Special tokens that the settings name without an id."""
    add_bos: bool = False
    """Whether each text begins with `bos_token`."""
    has_no_prefix: bool = False
    """Whether no blank is put before a text, although tokenizer.json has one."""


def read_settings(directory: Path) -> TokenizerSettings:
    """Settings of the tokenizer in ``directory``. ConfigError: a file cannot be read, or has a
    setting that would change tokens and is not supported."""
    config = read_json_object(directory / CONFIG, is_optional=True)
    _refuse_unsupported(config, directory / CONFIG)
    decoder = config.pop("added_tokens_decoder", None)
    if decoder is None:
        # transformers reads these two files only where tokenizer_config.json has no decoder.
        config |= read_json_object(directory / "special_tokens_map.json", is_optional=True)
    if config.get("extra_special_tokens") is None:
        config["extra_special_tokens"] = config.get("additional_special_tokens")
    named = _named_tokens(config)
    if decoder is None:
        numbered = _legacy_tokens(directory / "added_tokens.json", named)
    else:
        numbered = {int(number): _added_token(token) for number, token in decoder.items()}
    extra = config["extra_special_tokens"]
    extra_tokens = [_added_token(token) for token in extra] if isinstance(extra, list) else []
    return TokenizerSettings(
        named={name: token.content for name, token in named.items()},
        numbered=numbered,
        special=[*named.values(), *extra_tokens],
        add_bos=bool(config.get("add_bos_token")) and "bos_token" in named,
        has_no_prefix=config.get("add_prefix_space") is False
        and config.get("tokenizer_class") in _PREFIX_CLASSES,
    )


def without_prefix(state: dict[str, Any]) -> tuple[dict[str, Any], bool] | None:
    """Content of a tokenizer.json that is ``state``, the content of another one (tokenizers 0.22),
    without the blank before a text; and whether ``state`` puts a blank after each added token too,
    not only at the beginning of a text. None: ``state`` puts no blank."""
    changed, is_everywhere = dict(state), False
    normalizer = state["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    kept = [step for step in steps if step.get("type") != "Prepend"]
    if len(kept) < len(steps):
        changed["normalizer"] = {"type": "Sequence", "normalizers": kept}
        is_everywhere = True
    # Only the first step is changed. A later step runs on pieces of the text, so that its blanks do
    # not depend on where the text begins.
    splitter = state["pre_tokenizer"] or {}
    first, *later = splitter.get("pretokenizers") or [splitter]
    bare = first | _NO_PREFIX.get(first.get("type", ""), {})
    if bare != first:
        changed["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [bare, *later]}
        is_everywhere = is_everywhere or first.get("prepend_scheme") != "first"
    return (changed, is_everywhere) if changed != state else None


_NO_PREFIX = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
"""Type of a pre-tokenizer -> the settings with which it puts no blank before a text."""


def add_tokens(backend: Any, settings: TokenizerSettings, path: Path) -> None:
    """Give ``backend``, the `tokenizers.Tokenizer` of the file ``path``, the tokens and flags of
    ``settings`` that it lacks. ConfigError: a token would get another id than the settings name."""
    present = backend.get_added_tokens_decoder().values()
    described = {repr(token) for token in present}
    contents = {token.content for token in (*present, *settings.numbered.values())}
    added = [
        token for _, token in sorted(settings.numbered.items()) if repr(token) not in described
    ]
    # If two names have the same token, the flags of the last name are used.
    added += [token for token in settings.special if token.content not in contents]
    backend.add_tokens(added)
    for number, token in settings.numbered.items():
        backend_id = backend.token_to_id(token.content)
        if backend_id != number:
            raise ConfigError(
                f"{path}: token {token.content!r} has the id {backend_id}, but {number} in "
                f"{CONFIG} or added_tokens.json; download the tokenizer again"
            )


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    """ConfigError: a setting makes transformers produce other tokens than tokenizer.json says."""
    if config.get("split_special_tokens"):
        raise ConfigError(
            f"{path}: split_special_tokens: found true, allowed: false; with true the special "
            "tokens that a chat template writes would be split into characters"
        )


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Special tokens by name: the usual ones, and those of the model such as `image_token`."""
    values = {name: config[name] for name in NAMED if config.get(name)}
    for name, value in config.items():
        if name.endswith("_token") and name not in NAMED and _is_token(value):
            values[name] = value
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(key), Mapping):
            values |= config[key]
    return {name: _added_token(value) for name, value in values.items()}


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)


def _added_token(value: Any) -> AddedToken:
    """A token from its value in JSON: a text, or an object with `content` and flags. ConfigError:
    it is neither."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if not _is_token(value) or not isinstance(value["content"], str):
        raise ConfigError(
            f"{CONFIG}: found {str(value)[:80]!r} as a token, allowed: a text, or an object with "
            "content"
        )
    flags = {
        name: bool(value[name])
        for name in ("single_word", "lstrip", "rstrip", "normalized")
        if name in value
    }
    return AddedToken(value["content"], special=bool(value.get("special", True)), **flags)


def _legacy_tokens(path: Path, named: Mapping[str, AddedToken]) -> dict[int, AddedToken]:
    """Tokens of an added_tokens.json, which older versions of transformers wrote: text -> id."""
    from tokenizers import AddedToken

    special = {token.content for token in named.values()}
    return {
        int(number): AddedToken(text, special=text in special, normalized=text not in special)
        for text, number in read_json_object(path, is_optional=True).items()
    }
