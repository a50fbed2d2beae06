r"""The final answer of a response: its last `<answer>` or `\boxed`, outside of its thoughts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_LAST_CHARS = 10_000
"""Number of characters at the end of an answer that are read."""
BOX = "\\boxed"
_THOUGHT = (
    r"</?(?:seed:)?(?:think|thinking|thought|reasoning) ?>|\[/?THINK\]|◁/?think▷"
    r"|<\|(?:begin|end)_of_thought\|>"
)
_THOUGHT_TAG = re.compile(_THOUGHT, re.IGNORECASE)
_OPENED_BY_PROMPT = re.compile(rf"(?:{_THOUGHT})\s*\Z", re.IGNORECASE)
_TAG_CHARS = 64
"""Length of the end of a prompt that is searched for a tag and the white space after it."""
_JOINS_BOXES = re.compile(
    r"(?!.*\.\.)[ $.,;/&)(]*+(?:\\(?:text|quad|,|;| )|[{}]|(?:or|and|maybe|perhaps|possibly)\b|[ "
    r"$,])*",
    re.IGNORECASE,
)
"""Text between two boxes that are offered together. Dots are not allowed in it: after a pause the
second box is a correction of the first."""
_ANSWER_OPENS = re.compile(r"<answer>", re.IGNORECASE)
_ANSWER_CLOSES = re.compile(r"</answer>", re.IGNORECASE)


def final_text(sample: RewardInput) -> str:
    """Text of a response without its thoughts.

    A thought without a closing tag extends to the end of the response. The prompt may open the
    thought: many chat templates end with `<think>`.

    >>> from relax_hpc.rewards import RewardInput
    >>> final_text(RewardInput("2+2?<think>", "4", "Is it 5?</think> 4", "stop"))
    ' 4'
    """
    return without_thoughts(sample.response_text, is_open=bool(opened_by_prompt(sample)))


def opened_by_prompt(sample: RewardInput) -> str:
    """Tag at the end of the prompt that opens a thought; empty without one.

    >>> from relax_hpc.rewards import RewardInput
    >>> opened_by_prompt(RewardInput("2+2?<think>\\n", "4", "Is it 5?</think> 4", "stop"))
    '<think>'
    """
    prompt = sample.rows[-1][0] if sample.rows else sample.prompt
    tag = _OPENED_BY_PROMPT.search(prompt[-_TAG_CHARS:])
    return tag[0].strip() if tag and not _closes(tag) else ""


def without_thoughts(text: str, is_open: bool = False) -> str:
    """``text`` without its thoughts; ``is_open``: it begins within one.

    >>> without_thoughts("<think>5?</think>6"), without_thoughts("5?</think>6")
    ('6', '6')
    """
    kept: list[str] = []
    start = 0
    for tag in _THOUGHT_TAG.finditer(text):
        if _closes(tag):
            if not is_open:
                # The thought began before the text, so all of the text up to here is thought.
                kept.clear()
            start, is_open = tag.end(), False
        elif not is_open:
            kept.append(text[start : tag.start()])
            is_open = True
    if not is_open:
        kept.append(text[start:])
    return "".join(kept)


def _closes(tag: re.Match[str]) -> bool:
    return "/" in tag[0] or "end_of" in tag[0]


def answer_text(sample: RewardInput) -> str:
    """Response without its thoughts: the content of its last `<answer>`, or the whole text if it
    has none.

    >>> from relax_hpc.rewards import RewardInput
    >>> answer_text(RewardInput("2+2?", "4", "<think>5?</think>So: <answer>4</answer>", "stop"))
    '4'
    """
    text = final_text(sample)
    *before, last = _ANSWER_OPENS.split(text)
    return _ANSWER_CLOSES.split(last, maxsplit=1)[0] if before else text


def answer_end(sample: RewardInput) -> str:
    """The last _LAST_CHARS characters of `answer_text`, because regular expressions are slow in
    long texts."""
    return answer_text(sample)[-_LAST_CHARS:]


def boxed(text: str) -> str:
    r"""Content of the last `\boxed`; empty without a box, or if the box before it offers another
    answer.

    The content stands between matching braces, or is the word after `\boxed`.

    >>> boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}."), boxed(r"\boxed{1} or \boxed{2}")
    ('\\frac{1}{2}', '')
    """
    before, box, after = text.rpartition(BOX)
    if not box:
        return ""
    content, _ = _split_box(after)
    _, has_earlier, earlier = before.rpartition(BOX)
    earlier_content, between = _split_box(earlier)
    if has_earlier and _JOINS_BOXES.fullmatch(between) and earlier_content != content:
        return ""
    return content


def _split_box(text: str) -> tuple[str, str]:
    """Content of a box, and the text after the box. ``text``: the text after `\\boxed`."""
    text = text.lstrip()
    if not text.startswith("{"):
        content, _, following = text.partition(" ")
        return content, following
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:index], text[index + 1 :]
    return text[1:], ""
