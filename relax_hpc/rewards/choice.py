r"""Reward of multiple-choice questions: whether a response chooses the letter of the answer, and no
other letter.

The choice of a response is the first of these that it has: the content of its last `\boxed{...}`;
the letter of its last statement ("answer is B", "answer: B", "#### B", "B is correct", "I choose
B", "答案是B"); its last line, if that is a letter; its first line, if that is a letter or the label
of an option. If it offers several letters there, it has no choice.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING

from relax_hpc.rewards.final_answer import BOX, answer_end, boxed

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

_TYPESET = (
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mathsf|mbox) ?\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\[()\[\],;:! ]|\\q?quad"), " "),
    (re.compile(r"^(?:(?:#{1,3}|[->•→∴]) +)+|\u2705\ufe0f? ?", re.MULTILINE), ""),
    (re.compile(r"\*+|__|[$`\"“”]|(?<!\w)'|'(?!\w)|</?[A-Za-z]{2,}/?>"), ""),
)
"""Typesetting around a letter, and its replacement."""
_FULL_WIDTH = str.maketrans("\uff08\uff09\uff0c\u3001\uff1b", "(),,;")
_SMALL_LETTER = re.compile(
    r"(\b(?:answer|choice|option)\b[^.\n]{0,30}?(?:\bis\b|:|=|\bbe\b)[\s:]*"
    r"(?:(?:the|option|choice|letter|answer) )*[(\[{]?)([a-z])(?=[)\]}]?\.?\s*$|[)\]] )",
    re.IGNORECASE | re.MULTILINE,
)
"""A statement that ends with a small letter."""
_NO_WORD = r"(?![\w'\u2019])"
_LETTER = rf"[(\[{{]?[ ]?(?P<letter>[A-Z]){_NO_WORD}(?: ?[)\]}}])?"
_CHOSEN = re.compile(rf"\s*(?i:(?:option|choice|answer)\b[ :]*)?{_LETTER}")
_STATEMENT = re.compile(
    r"(?i:(?:####|(?<!wrong )(?<!incorrect )\b(?:answer|ans|choice|option)\b[^.\n]{0,30}?"
    r"(?:\bis\b|:|=|\b(?:would|should|must) be\b))[\s:]*+)"
    r"(?P<refuses>(?i:not|neither|either|both|between|one of)\b\s*)?"
    r"(?i:(?:the|option|choice|letter|answer|clearly|definitely"
    r"|therefore|thus|probably|most likely)\b[\s:]*+)*+" + _LETTER
)
_VERDICT = re.compile(
    r"(?:^|[.!?:;]\s+|\b(?i:so|thus|therefore|hence|clearly|I think|I believe)[ ,]+)"
    rf"(?i:(?:the )?(?:option|choice|answer|letter|statement) )?{_LETTER}"
    r" (?i:(?:is|must be|would be)(?: (?:the|clearly|therefore|thus|most|likely))* "
    r"(?:correct|right|best)\b"
    r"(?! (?:only|if|unless|when|for)\b)"
    r"|is the (?:correct |right |best )?(?:answer|choice)\b)",
    re.MULTILINE,
)
"""Statement that an option is right. It begins a sentence: after "if" it would be a condition."""
_CONCLUSION = re.compile(
    r"(?:(?:^|[.!?]\s+)(?i:(?:I (?:think|believe) )?it(?:'s|\u2019s| "
    r"is)|so|thus|therefore|hence)[ ,]+"
    r"|\b(?i:I am|I'm|I\u2019m) going with )(?i:(?:option|choice|answer|letter) )?"
    + _LETTER
    + r"(?=[.!]*\s*$)",
    re.MULTILINE,
)
"""A short sentence that ends with a letter."""
_DECISION = re.compile(
    r"(?:\bI(?:'ll|\u2019ll| will| would|'d)? (?i:choose|pick|select|go with)(?i: "
    r"(?:option|choice|answer|letter))?"
    r"|答案(?:是|为|為)?|选项(?:是|为)|故?[选選](?:择|擇)?)[:\uff1a\s]*" + _LETTER
)
_CHOICES = (_STATEMENT, _VERDICT, _CONCLUSION, _DECISION)
_SECOND_LETTER = re.compile(
    r"[ )\]}(\[{]*(?:(?:[,;/&+|]|[-\u2013](?=[A-Z]))[ (\[{]*"
    r"|(?:or|and|but|maybe|perhaps|possibly|also|even|either|both|as well as|the|letter|option"
    r"|choice)\b"
    # Possessive: a comma may also begin the next repetition, which takes exponential time.
    rf"[ ,:(\[{{]*+)+[A-Z]{_NO_WORD}"
    rf"|[.?!)\]}} ]*(?:(?i:or|maybe|perhaps|possibly|alternatively)\b[ ,:(\[{{]*)+[A-Z]{_NO_WORD}"
)
"""Another letter that is offered directly after the first one."""
_ONLY_LETTERS = re.compile(rf"[\W_]*(?:[A-Z]{_NO_WORD}[\W_]*)+")
_CHANGE_OF_MIND = re.compile(
    r"\b(?i:or|maybe|perhaps|possibly|could|alternatively|actually|wait|instead|but|however|no|not"
    rf"|rather|also|sorry)\b[^.\n]{{0,40}}?{_LETTER}"
)
"""Another letter after a first line that is a letter."""
_ARTICLE_BEHIND = re.compile(
    r" (?!(?:because|since|as|for|due|with|which|is|that|given|based|so|and|or|but|not|rather|from"
    r"|if|when)\b)[a-z]"
)
"""Text after a capital A or I that shows that it is a word of a sentence."""


def multiple_choice(sample: RewardInput) -> float:
    """1 if the response chooses the answer's letter and was not cut off, else 0.

    ValueError: the right answer is not a letter.

    >>> from relax_hpc.rewards import RewardInput
    >>> multiple_choice(RewardInput("?", "B", "A is too small, so the answer is (B).", "stop"))
    1.0
    """
    right = _chosen_in(_plain(sample.answer))
    if not right:
        raise ValueError(f"answer: found {sample.answer[:40]!r}, allowed: a letter from A to Z")
    return float(sample.finish_reason == "stop" and choice_of(answer_end(sample)) == right)


def choice_of(text: str) -> str:
    """The letter that a response chooses; empty if it chooses none, or several.

    >>> choice_of("The answer is C: Paris."), choice_of("The answer is A or B")
    ('C', '')
    >>> choice_of("A dog is an animal.")
    ''
    """
    if BOX in text:
        return _chosen_in(_plain(boxed(text)))
    plain = _plain(text)
    statements = [
        match
        for match in chain(*(pattern.finditer(plain) for pattern in _CHOICES))
        if not _is_article(match)
    ]
    if statements:
        last_statement = max(statements, key=re.Match.start)
        return "" if last_statement.groupdict().get("refuses") else _unless_second(last_statement)
    return _in_lines([line.strip() for line in plain.splitlines() if line.strip()])


def _in_lines(lines: list[str]) -> str:
    """The letter that is the last of ``lines``, or that is the first one or its label."""
    if not lines:
        return ""
    letters = [_chosen_in(line) for line in lines]
    *earlier, last = letters
    # The last line of several may be the last option of a list that the response repeats.
    is_listed = bool(earlier) and bool(earlier[-1]) and earlier[-1] != last
    if last and not is_listed and (not earlier or last == re.sub(r"[\W_]", "", lines[-1])):
        return last
    if any(letters[1:]):
        return ""
    later = {match["letter"] for match in _CHANGE_OF_MIND.finditer("\n".join(lines[1:]))}
    return letters[0] if later <= {letters[0]} else ""


def _plain(text: str) -> str:
    """``text`` without typesetting; a lone small letter becomes a capital."""
    for pattern, replacement in _TYPESET:
        text = pattern.sub(replacement, text)
    text = text.translate(_FULL_WIDTH).strip()
    text = _SMALL_LETTER.sub(lambda match: match[1] + match[2].upper(), text)
    return text.upper() if re.fullmatch(r"\W*[a-z]\W*", text) else text


def _chosen_in(content: str) -> str:
    """The letter that ``content`` consists of, or the label of the option that it repeats; empty if
    it is neither."""
    match = _CHOSEN.match(content)
    if not match:
        return ""
    following = content[match.end() :]
    is_label = match[0][-1] in ")]}" or following[:1] in (".", ":", ")", "]", "}")
    if re.search(r"\w", following) and not is_label:
        return ""
    return _unless_second(match)


def _unless_second(match: re.Match[str]) -> str:
    """The letter of ``match``; empty if the line offers another letter after it."""
    following = match.string[match.end() :].partition("\n")[0]
    if _SECOND_LETTER.match(following) or _ONLY_LETTERS.fullmatch(following):
        return ""
    return match["letter"]


def _is_article(match: re.Match[str]) -> bool:
    """Whether the letter of ``match`` is a word of its sentence, as in "Answer: A dog"."""
    return match["letter"] in "AI" and _ARTICLE_BEHIND.match(match.string, match.end()) is not None
