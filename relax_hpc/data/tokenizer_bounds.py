"""Bounds of a tokenizer.json, checked before the Rust library `tokenizers` reads it.

tokenizers 0.22 allocates what such a file asks for. An allocation that fails aborts the process, which no `except`
catches.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

MAX_NUMBER = 1 << 24
"""Largest integer outside of the vocabulary: a length, a count or the id of a token."""
MAX_GROWTH = 1000.0
"""Factor by which all replacements of a normalizer, or of a decoder, may lengthen a text together."""
MAX_STEPS = 1000
"""Steps of a normalizer, pre-tokenizer, post-processor or decoder at most, because each one reads the whole text."""
MAX_ADDED = 1000
"""Characters that all steps of a normalizer, and tokens that all of a post-processor, may put around a text."""
_TRIE_SIZE_BYTES = 4
_MAX_DEPTH = 100


def problems(content: Any) -> Iterator[str]:
    """Fields of a tokenizer.json with values that could exhaust memory, one line each."""
    if not isinstance(content, dict):
        yield "found no JSON object"
        return
    for name, part in content.items():
        if name != "model":
            yield from _large_numbers(part, name)
    for name in ("normalizer", "decoder"):
        steps = list(_steps(content.get(name)))
        yield from (f"{name}: {problem}" for step in steps for problem in _step_problems(step))
        growth = 1.0
        for step in steps:
            growth *= _growth(step)
        if growth > MAX_GROWTH:
            yield f"{name}: replacements lengthen a text {growth:.3g} times, allowed: at most {MAX_GROWTH:g} times"
    for step in _steps(content.get("pre_tokenizer")):
        if step.get("type") == "FixedLength" and step.get("length") == 0:
            yield "pre_tokenizer: FixedLength.length: found 0, allowed: at least 1"
    added_tokens = sum(map(_template_tokens, _steps(content.get("post_processor"))))
    if added_tokens > MAX_ADDED:
        yield f"post_processor: puts {added_tokens} tokens around a text, allowed: at most {MAX_ADDED}"
    added_chars = sum(map(_prepended_chars, _steps(content.get("normalizer"))))
    if added_chars > MAX_ADDED:
        yield f"normalizer: prepends {added_chars} characters to a text, allowed: at most {MAX_ADDED}"
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (count := sum(1 for _ in _steps(content.get(name)))) > MAX_STEPS:
            yield f"{name}: found {count} steps, allowed: at most {MAX_STEPS}"


def _large_numbers(value: Any, place: str, depth: int = 0) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        yield f"{place[:80]}: nested deeper than {_MAX_DEPTH} levels"
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _large_numbers(item, f"{place}.{name}", depth + 1)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _large_numbers(item, f"{place}[{number}]", depth + 1)
    elif type(value) is int and abs(value) > MAX_NUMBER:
        yield f"{place}: found {value}, allowed: at most {MAX_NUMBER}"


def _steps(part: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Steps of a normalizer, pre-tokenizer, post-processor or decoder; those of a `Sequence` one by one."""
    if not isinstance(part, dict) or depth > _MAX_DEPTH:
        return
    yield part
    for inner in ("normalizers", "pretokenizers", "processors", "decoders"):
        entries = part.get(inner)
        for entry in entries if isinstance(entries, list) else ():
            yield from _steps(entry, depth + 1)


def _template_tokens(step: dict[str, Any]) -> int:
    """Tokens that a step `TemplateProcessing` puts around a text, or around two; 0 of another step."""
    specials, templates = step.get("special_tokens"), [step.get("single"), step.get("pair")]
    if not isinstance(specials, dict):
        return 0
    most = 0
    for template in templates:
        count = 0
        for piece in template if isinstance(template, list) else ():
            special = specials.get(str(_entry(_entry(piece, "SpecialToken"), "id")))
            ids = _entry(special, "ids")
            count += len(ids) if isinstance(ids, list) else 0
        most = max(most, count)
    return most


def _prepended_chars(step: dict[str, Any]) -> int:
    prefix = step.get("prepend")
    return len(prefix) if isinstance(prefix, str) else 0


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _step_problems(step: dict[str, Any]) -> Iterator[str]:
    if step.get("type") != "Precompiled" or not isinstance(step.get("precompiled_charsmap"), str):
        return
    try:
        data = base64.b64decode(step["precompiled_charsmap"])
    except binascii.Error as error:
        yield f"precompiled_charsmap: no base64: {error}"
        return
    # The map begins with the size of its trie, which is allocated as it says.
    size = int.from_bytes(data[:_TRIE_SIZE_BYTES], "little")
    if size > len(data) - _TRIE_SIZE_BYTES:
        yield f"precompiled_charsmap: says that its trie has {size} bytes, found {len(data)} in all"


def _growth(step: dict[str, Any]) -> float:
    """Factor by which a step may lengthen a text, at least 1."""
    pattern, replacement = step.get("pattern"), step.get("content")
    if step.get("type") != "Replace" or not isinstance(pattern, dict) or not isinstance(replacement, str):
        return 1.0
    text = pattern.get("String")
    if isinstance(text, str) and text:
        return max(1.0, len(replacement) / len(text))
    # An expression may match each character, or before each.
    return max(1.0, len(replacement) + _matches_nothing(str(pattern.get("Regex", ""))))


def _matches_nothing(pattern: str) -> bool:
    """Whether an expression may match the empty text; true as well if it is not known."""
    try:
        return re.match(pattern, "") is not None
    except (re.error, RecursionError, OverflowError):
        return True
