r"""Reader of numbers in text: integers, decimals, fractions and powers of ten, with units.

An expression is read as one number or not at all: `2\sqrt{3}`, `5+3`, `2x+1`, `(3,4)`, `12:30` and
`5 or 6` are not numbers. A sentence is split into words and the gaps between them. A gap contains a
number, an expression, or blanks.
"""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_CHARS = 64
"""Maximum length of a number, because exact arithmetic with thousands of digits is slow."""
_NUMBER = re.compile(
    r"""(?P<sign>[-+]?)\ ?(?:
        (?P<whole>\d+)?\ ?\\frac\ ?(?:\{\ ?(?P<top>[-+]?\d+)\ ?\}|(?P<top_digit>\d))
            \ ?(?:\{\ ?(?P<bottom>\d+)\ ?\}|(?P<bottom_digit>\d))
        |(?:(?P<plain_whole>\d+)\ )?(?P<plain_top>\d+)\ ?/\ ?(?P<plain_bottom>\d+)
        |10\ ?\^\ ?\{?\ ?(?P<power_alone>[-+]?\d{1,3})\ ?\}?
        |(?P<decimal>\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)
            (?:[eE](?P<exponent>[-+]?\d{1,3})
            |\ ?[*x]\ ?10\ ?\^\ ?\{?\ ?(?P<power>[-+]?\d{1,3})\ ?\}?)?
    )""",
    re.VERBOSE,
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_CJK_SCALES = {"\u4e07": 10**4, "\u842c": 10**4, "\u4ebf": 10**8, "\u5104": 10**8}
"""Chinese scale words. A unit may follow them without a blank."""


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EXPRESSION_WORDS = _word_set(
    """or and to not nor pi sqrt root times plus minus over divided multiplied squared cubed
    half halves third thirds quarter quarters factorial mod log ln sin cos tan exp infinity choose
    trillion maybe perhaps possibly either
    \u6216 \u6216\u8005 \u548c \u4e0e \u8207 \u5230 \u81f3 \u4e58 \u52a0 \u51cf \u9664\u4ee5"""
)
"""Words next to a number that show that it belongs to an expression, a range or a choice."""
_JOINING = _word_set("and to")
"""Words that may join a number to another number, or to a word, as in "it fell to 3"."""
_BLOCKING_WORDS = _EXPRESSION_WORDS | _word_set(
    """never neither no cannot isn't between from less fewer more greater under above below"""
)
"""Words before a number that show that the sentence does not state the number as the answer."""
_NEGATIONS = ("\u4e0d\u662f", "\u4e0d\u7b49\u4e8e", "\u4e0d\u4e3a", "\u4e26\u975e", "\u5e76\u975e")
"""Chinese words for "is not"."""
_MULTIPLE = re.compile(
    r"\b(?:twice|thrice|double|triple|(?:square|cube|root|half|third|quarter|percent) of)$",
    re.IGNORECASE,
)
"""Words directly before a number that change its value."""
_BOUND = re.compile(r"\bat (?:least|most)$", re.IGNORECASE)
"""Words directly before a number that make it a bound."""
_UNIT_LETTERS = frozenset("mgshLlVWNJKCFΩΩ")
"""Units of one letter. Any other single letter is a variable."""
_GLUED_UNITS = _UNIT_LETTERS | _word_set(
    """mm cm dm km mg kg lb lbs oz ml mL cl
    hr hrs min sec ms mph kph ft yd mi"""
)
"""Units that may follow the digits without a blank; other letters are variables or ordinals."""
_LETTER = r"[^\W\d_\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209f\u2150-\u218f]"
"""A letter of any script, without superscript and subscript digits and fractions, which are also
word characters."""
_GREEK = re.compile("[\u0370-\u03ff]")
_LETTERS = re.compile(rf"{_LETTER}+")
_UNIT = re.compile(rf" ?[-%°'\" ./]?(?:[- ./°]|{_LETTER})*")
_WORD = re.compile(rf"((?<![\\\w]){_LETTER}(?:{_LETTER}|')+|\b[aAI]\b|[\u4e00-\u9fff])")
"""A word of prose. Any other single letter is a variable. A LaTeX command is not a word."""
_CLAUSE_END = re.compile(r"([;!?—]|[.,:](?= |$)| \((?=[^\W\d_]{2}))")
_ALTERNATIVE = re.compile(
    r"[ ,;.(:]*(?:(?:or|and|but|maybe|perhaps|possibly|alternatively|even|also)\b[ ,:(]*)+"
    r"[-+]?\.?\d|(?:, ?|;)[-+]?\.?\d",
    re.IGNORECASE,
)
"""A second number that is offered directly after a clause with a first one."""
_SECOND_NUMBER = re.compile(
    r" ?(?:[^\W\d]+ ){0,2}(?:(?:or|and|to)\b[^\d]{0,20}|[-+*/^=] ?\.?)\d"
    r"|[^\W\d]{0,4}?(?:\u6216\u8005?|[\u548c\u4e0e\u8207\u3001]) ?\d",
    re.IGNORECASE,
)
"""A second number directly after a first one and its unit, as in "5 dollars or 6 dollars"."""
_NO_LABEL = re.compile(r"[,;<>!≠≤≥]|\b(?:or|and|not)\b", re.IGNORECASE)
"""Text that must not stand before `=`, because the statement is then more than the number after
it."""
_REPEATING = re.compile(
    r"(?<![\d.,])(\d{0,20})\.(\d{0,20})\\(?:overline|bar) ?\{? ?(\d{1,20})(?!\d) ?\}?"
)
"""A decimal with a line above its repeating digits."""
_FULL_WIDTH = tuple(zip("\u3002\uff0c\uff1b\uff1a\uff01\uff1f", ".,;:!?", strict=True))
_TYPESET = (
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<=\d)\\[,;:! ](?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"(\\(?:text|mathrm) ?\{[^{}]*[A-Za-z]\}) ?\^ ?(?:[23](?!\d)|\{-?[123]\})"), r"\1"),
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox) ?\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\^? ?(?:\{\\(?:circ|degree)\}|\\(?:circ|degree)(?![A-Za-z]))"), "°"),
    # The exponent of a unit with at least two letters.
    (re.compile(r"(?<=\d )m[²³]"), "m"),
    (re.compile(r"(?<=[A-Za-z/][A-Za-z]) ?(?:\^ ?(?:[23](?!\d)|\{-?[123]\})|[²³])"), ""),
    (re.compile("\\\\(?:times|cdot)(?![A-Za-z])|[\u00d7\u00b7]"), "*"),
    (re.compile(r"\\approx(?![A-Za-z])|≈"), " "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\[,;:! ()\[\]]|\\(?:left|right|quad|qquad|displaystyle)(?![A-Za-z])"), " "),
    (re.compile(r"(?<![\w*])\*{1,3}(?! )([^*\n]+)(?<! )\*{1,3}(?![\w*])"), r"\1"),
    (re.compile(r"\\?[$€£¥]|\*\*|__|~|`"), " "),
    (re.compile("[\u2212\u2013]"), "-"),
    *((re.compile(sign), f"{mark} ") for sign, mark in _FULL_WIDTH),
    # Emphasis of chat models; a variation selector may follow.
    (re.compile("[\u2705\u2713\u2714\U0001f389]\ufe0f?"), " "),
    (re.compile(r"</?[A-Za-z]\w*/?>|\s+"), " "),
)
"""Pattern of typesetting that does not change a number, and its replacement."""


def read_number(text: str) -> Fraction | None:
    r"""Value of ``text`` if it consists of one number, which may have `x =` before and a unit after
    it; else None.

    >>> price = read_number(r"x = \frac{2469}{2} \text{ dollars}")
    >>> price == read_number(r"\$1,234.50") == Fraction("1234.5")
    True
    >>> read_number(r"2\sqrt{3}"), read_number("3, 4")
    (None, None)
    """
    return _read(_plain(text))


def expand_repeating(text: str) -> str:
    r"""``text`` with repeating decimals as fractions.

    >>> expand_repeating(r"0.1\overline{6}")
    '\\frac{15}{90}'
    """
    return _REPEATING.sub(_repeating_fraction, text)


def _repeating_fraction(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    top = int(whole + fixed + period) - int((whole + fixed) or 0)
    bottom = (10 ** len(period) - 1) * 10 ** len(fixed)
    return rf"\frac{{{top}}}{{{bottom}}}"


def read_statement(text: str) -> Fraction | None:
    """Number in the first clause of ``text``, the text after "the answer is"; None if the clause
    does not state one number.

    >>> read_statement("therefore 18 dollars, for 9 eggs.")
    Fraction(18, 1)
    >>> read_statement("5 or 6"), read_statement("2x + 1")
    (None, None)
    """
    clause, *following = _CLAUSE_END.split(_plain(first_line(text)).lstrip(" :"))
    gaps, tokens = _split(clause)
    index = next((number for number, gap in enumerate(gaps) if _has_digit(gap)), None)
    if index is None or not _BLOCKING_WORDS.isdisjoint(token.lower() for token in tokens[:index]):
        return None
    if _BOUND.search(" ".join(tokens[:index])):
        return None
    if _ALTERNATIVE.match("".join(following)):
        return None
    start = sum(map(len, gaps[: index + 1])) + sum(map(len, tokens[:index]))
    if _SECOND_NUMBER.match(clause, start):
        return None
    return _value_between(gaps, tokens, index)


def last_number(text: str) -> Fraction | None:
    """The last number of ``text``; None if it belongs to an expression, a range or a choice.

    >>> last_number("3 apples and 4 pears make 7 pieces of fruit.")
    Fraction(7, 1)
    >>> last_number("5 or 6"), last_number("16 - 3")
    (None, None)
    """
    line = next((line for line in reversed(text.splitlines()) if _has_digit(line)), "")
    clauses = _CLAUSE_END.split(_plain(line))
    while clauses and not _has_digit(clauses[-1]):
        clauses.pop()
    if not clauses:
        return None
    gaps, tokens = _split(clauses[-1])
    index = max(number for number, gap in enumerate(gaps) if _has_digit(gap))
    value = _value_between(gaps, tokens, index)
    before = tokens[index - 1].lower() if index else ""
    is_joined = before not in _JOINING or _has_digit(gaps[index - 1])
    if before in _EXPRESSION_WORDS and is_joined:
        # In "0.5 or 1/2" both numbers are equal.
        earlier = [gap for gap in gaps[:index] if _has_digit(gap)]
        return value if earlier and _read(earlier[-1]) == value else None
    is_listed = index == 0 and clauses[-2:-1] == [","] and _has_digit(_split(clauses[-3])[0][-1])
    return None if is_listed else value


def first_line(text: str) -> str:
    """First line of ``text`` with words or digits, without lines that only announce the next line
    by a colon."""
    for line in text.splitlines():
        is_announcement = line.rstrip(" *").endswith(":") and not _has_digit(line)
        if re.search(r"\w", line) and not is_announcement:
            return line
    return ""


def has_scale(text: str) -> bool:
    r"""Whether ``text`` has a word that scales a number.

    >>> has_scale(r"8 \text{ million}"), has_scale("8 meters")
    (True, False)
    """
    return any(_scale(letters) != 1 for letters in _LETTERS.findall(_plain(text)))


def has_words(text: str) -> bool:
    """Whether ``text`` has words of prose. Letters of an expression and LaTeX commands do not
    count."""
    return _WORD.search(text) is not None


def _has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))


def _plain(text: str) -> str:
    """``text`` as one line without typesetting."""
    text = expand_repeating(text)
    for pattern, replacement in _TYPESET:
        text = pattern.sub(replacement, text)
    return text.strip()


def _split(text: str) -> tuple[list[str], list[str]]:
    """Gaps before, between and after the words of ``text``, and these words."""
    pieces = _WORD.split(text)
    return pieces[0::2], pieces[1::2]


def _value_between(gaps: list[str], tokens: list[str], index: int) -> Fraction | None:
    """Value of ``gaps[index]``; None if a word next to it shows that it belongs to an expression,
    a range or a choice."""
    gap = gaps[index]
    before = tokens[index - 1] if index else ""
    after = tokens[index] if index < len(tokens) else ""
    value = _read(gap)
    if value is None or after.lower() in _EXPRESSION_WORDS or before.endswith(_NEGATIONS):
        return None
    if _MULTIPLE.search(" ".join(tokens[max(0, index - 2) : index])):
        return None
    if before and before.isascii() and gap[0] not in " (=:":
        return None
    if after and gap[-1] != " " and not _is_glued_unit(after):
        return None
    return value * _scale(after)


def _scale(letters: str) -> int:
    return _CJK_SCALES.get(letters[:1]) or _SCALES.get(letters.lower(), 1)


def _is_glued_unit(letters: str) -> bool:
    # Scripts such as Chinese have no blank between a number and its unit.
    return letters in _GLUED_UNITS or not (letters.isascii() or _is_variable(letters))


def _read(plain: str) -> Fraction | None:
    """Value of a text without typesetting if it consists of one number, see `read_number`."""
    *labels, last = _unwrapped(plain).split("=")
    value = _with_unit(last)
    for label in labels:
        if _NO_LABEL.search(label) or _with_unit(label) not in (None, value):
            return None
    return value


def _unwrapped(plain: str) -> str:
    """``plain`` without a final period, and without brackets around the whole text."""
    plain = plain.strip().removesuffix(".").strip()
    for _ in range(_MAX_CHARS):
        if plain[:1] + plain[-1:] not in ("()", "{}"):
            break
        plain = plain[1:-1].strip()
    return plain


def _with_unit(plain: str) -> Fraction | None:
    """Value of a number that may have a unit after it."""
    plain = _unwrapped(plain)
    match = _NUMBER.match(plain)
    if not match or len(match[0]) > _MAX_CHARS:
        return None
    unit = plain[match.end() :]
    symbols = _LETTERS.findall(unit)
    if not _UNIT.fullmatch(unit) or not _EXPRESSION_WORDS.isdisjoint(map(str.lower, symbols)):
        return None
    if symbols and unit[0] == symbols[0][0] and not _is_glued_unit(symbols[0]):
        return None
    if any(map(_is_variable, symbols)):
        return None
    scale = _scale(symbols[0]) if symbols else 1
    value = _value(match)
    return None if value is None else value * scale


def _is_variable(symbol: str) -> bool:
    is_letter = symbol.isascii() or _GREEK.fullmatch(symbol)
    return len(symbol) == 1 and bool(is_letter) and symbol not in _UNIT_LETTERS


def _value(match: re.Match[str]) -> Fraction | None:
    """Value of a match of `_NUMBER`; None for a fraction over 0."""

    def group(*names: str) -> str:
        return next((match[name] for name in names if match[name]), "")

    sign = -1 if match["sign"] == "-" else 1
    if match["power_alone"]:
        return sign * Fraction(10) ** int(match["power_alone"])
    decimal = group("decimal")
    if decimal:
        power = int(group("exponent", "power") or 0)
        return sign * Fraction(decimal.replace(",", "").rstrip(".")) * Fraction(10) ** power
    bottom = int(group("bottom", "bottom_digit", "plain_bottom"))
    top = int(group("top", "top_digit", "plain_top"))
    whole = int(group("whole", "plain_whole") or 0)
    return sign * (whole + Fraction(top, bottom)) if bottom else None
