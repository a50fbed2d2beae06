"""Bounds of a tokenizer.json, checked before the Rust library `tokenizers` reads it.

tokenizers 0.22 allocates as much memory as the file asks for. An allocation that fails aborts the
process, which no `except` can catch.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterator
from typing import Any

MAX_NUMBER = 1 << 24
"""Largest integer outside of the vocabulary: a length, a count or the id of a token."""
MAX_GROWTH = 1000.0
"""Factor by which all replacements of a normalizer, or of a decoder, may lengthen a text
together."""
MAX_STEPS = 1000
"""Maximum number of steps of a normalizer, pre-tokenizer, post-processor or decoder. Each step
reads the whole text."""
MAX_ADDED = 1000
"""Maximum number of characters that all steps of a normalizer add around a text, and of tokens that
all steps of a post-processor add."""
_COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""Fields of a tokenizer.json that process each text in steps."""
_TRIE_SIZE_BYTES = 4
_MAX_DEPTH = 100


def problems(content: Any) -> Iterator[str]:
    """Fields of a tokenizer.json with values that could exhaust memory, one line each."""
    if not isinstance(content, dict):
        yield "found no JSON object"
        return
    for name, value in content.items():
        if name != "model":
            yield from _large_numbers(value, name)
    steps = {name: list(_steps(content.get(name))) for name in _COMPONENTS}
    for name in ("normalizer", "decoder"):
        for step in steps[name]:
            yield from (f"{name}: {problem}" for problem in _step_problems(step))
        growth = math.prod(map(_growth, steps[name]))
        if growth > MAX_GROWTH:
            yield (
                f"{name}: replacements lengthen a text {growth:.3g} times, allowed: at most "
                f"{MAX_GROWTH:g} times"
            )
    for step in steps["pre_tokenizer"]:
        if step.get("type") == "FixedLength" and step.get("length") == 0:
            yield "pre_tokenizer: FixedLength.length: found 0, allowed: at least 1"
    added_tokens = sum(map(_template_tokens, steps["post_processor"]))
    if added_tokens > MAX_ADDED:
        yield (
            f"post_processor: puts {added_tokens} tokens around a text, allowed: at most "
            f"{MAX_ADDED}"
        )
    added_chars = sum(map(_prepended_chars, steps["normalizer"]))
    if added_chars > MAX_ADDED:
        yield (
            f"normalizer: prepends {added_chars} characters to a text, allowed: at most {MAX_ADDED}"
        )
    for name in _COMPONENTS:
        if len(steps[name]) > MAX_STEPS:
            yield f"{name}: found {len(steps[name])} steps, allowed: at most {MAX_STEPS}"


def _large_numbers(value: Any, field: str, depth: int = 0) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        yield f"{field[:80]}: nested deeper than {_MAX_DEPTH} levels"
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _large_numbers(item, f"{field}.{name}", depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _large_numbers(item, f"{field}[{index}]", depth + 1)
    elif type(value) is int and abs(value) > MAX_NUMBER:
        yield f"{field}: found {value}, allowed: at most {MAX_NUMBER}"


def _steps(component: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Steps of a normalizer, pre-tokenizer, post-processor or decoder, with the steps of each
    `Sequence` after it."""
    if not isinstance(component, dict) or depth > _MAX_DEPTH:
        return
    yield component
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        for entry in _list(component.get(key)):
            yield from _steps(entry, depth + 1)


def _template_tokens(step: dict[str, Any]) -> int:
    """Number of tokens that a step `TemplateProcessing` puts around a text, or around a pair of
    texts if these are more. 0 for any other step."""
    counts = []
    for template in (step.get("single"), step.get("pair")):
        names = [str(_entry(_entry(piece, "SpecialToken"), "id")) for piece in _list(template)]
        specials = (_entry(step.get("special_tokens"), name) for name in names)
        counts.append(sum(len(_list(_entry(special, "ids"))) for special in specials))
    return max(counts)


def _prepended_chars(step: dict[str, Any]) -> int:
    prefix = step.get("prepend")
    return len(prefix) if isinstance(prefix, str) else 0


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _step_problems(step: dict[str, Any]) -> Iterator[str]:
    if step.get("type") != "Precompiled" or not isinstance(step.get("precompiled_charsmap"), str):
        return
    try:
        data = base64.b64decode(step["precompiled_charsmap"])
    except binascii.Error as error:
        yield f"precompiled_charsmap: no base64: {error}"
        return
    # The map begins with the size of its trie. tokenizers allocates that size without a check.
    size = int.from_bytes(data[:_TRIE_SIZE_BYTES], "little")
    if size > len(data) - _TRIE_SIZE_BYTES:
        yield f"precompiled_charsmap: says that its trie has {size} bytes, found {len(data)} in all"


def _growth(step: dict[str, Any]) -> float:
    """Factor by which a step may lengthen a text, at least 1."""
    pattern, replacement = step.get("pattern"), step.get("content")
    if (
        step.get("type") != "Replace"
        or not isinstance(pattern, dict)
        or not isinstance(replacement, str)
    ):
        return 1.0
    text = pattern.get("String")
    if isinstance(text, str) and text:
        return max(1.0, len(replacement) / len(text))
    # An expression may match each character, or before each.
    return max(1.0, len(replacement) + _matches_nothing(str(pattern.get("Regex", ""))))


def _matches_nothing(pattern: str) -> bool:
    """Whether an expression may match the empty text; also true if Python cannot tell."""
    try:
        return re.match(pattern, "") is not None
    except (re.error, RecursionError, OverflowError):
        return True
