"""Weight versions: (actor incarnation, number), compared in that order, and their two encodings."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER_BITS = 20
MAX_INCARNATION = (1 << (31 - _NUMBER_BITS)) - 1
MAX_NUMBER = (1 << _NUMBER_BITS) - 1
_NAME = re.compile(r"i(\d{6})-v(\d{6,7})")


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """A set of policy weights. ``str()`` is the name of its directory, which engines report.

    >>> str(Version(2, 101))
    'i000002-v000101'
    >>> Version.parse("i000002-v000101") > Version(1, 300)
    True
    """

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"i{self.incarnation:06d}-v{self.number:06d}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Inverse of ``str``; ValueError on anything else."""
        match = _NAME.fullmatch(text)
        if not match:
            raise ValueError(f"not a weight version: {text!r} (expected like i000001-v000123)")
        return cls(int(match[1]), int(match[2]))

    def encode(self) -> int:
        """The int32 that rows carry per token: 11 bits of incarnation, 20 bits of number."""
        if not (0 <= self.incarnation <= MAX_INCARNATION and 0 <= self.number <= MAX_NUMBER):
            raise ValueError(
                f"version {self} does not fit an int32 (incarnation <= {MAX_INCARNATION}, number "
                f"<= {MAX_NUMBER})"
            )
        return (self.incarnation << _NUMBER_BITS) | self.number

    @classmethod
    def decode(cls, code: int) -> Version:
        """Inverse of ``encode``."""
        return cls(int(code) >> _NUMBER_BITS, int(code) & MAX_NUMBER)
