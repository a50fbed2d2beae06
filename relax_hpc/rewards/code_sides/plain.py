"""Plain data between two processes, as JSON: numbers, text, bytes, lists, tuples, sets, dicts.

A value of a subclass is sent as a value of its base class, without its methods. An object whose
`__eq__` is always true therefore arrives as an ordinary number or text.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_BYTES = 16 << 20
"""Maximum size of a message in either direction."""
_HEAD = struct.Struct("<I")
_SMALL = 1 << 63
"""Larger integers are sent in base 16: Python refuses decimals of more than 4,300 digits."""
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS = {"Counter": Counter, "OrderedDict": OrderedDict, "dict": dict}


class NotPlainError(TypeError):
    """A value is not plain data."""


class Malformed(Exception):
    """A message of the other process has an invalid form."""


def encode(value: Any, encode_object: Callable[[Any], Any]) -> Any:
    """``value`` as JSON data; ``encode_object`` encodes any other object, or raises."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -_SMALL <= number < _SMALL else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, encode_object) for item in list.__iter__(value)]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, encode_object) for item in kind.__iter__(value)]}
    for name, kind in _MAPPINGS.items():
        if isinstance(value, kind):
            pairs = [[key, item] for key, item in kind.items(value)]
            return {name: encode(pairs, encode_object)}
    return _encode_rare(value, encode_object)


def _encode_rare(value: Any, encode_object: Callable[[Any], Any]) -> Any:
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, bytearray):
        return {"bytearray": bytearray.hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Fraction):
        return {"Fraction": [hex(value.numerator), hex(value.denominator)]}
    if isinstance(value, Decimal):
        return {"Decimal": Decimal.__str__(value)}
    if isinstance(value, range):
        return {"range": [hex(value.start), hex(value.stop), hex(value.step)]}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), encode_object)
    return encode_object(value)


def decode(data: Any, decode_object: Callable[[str, Any], Any]) -> Any:
    """The value from which `encode` made ``data``; ``decode_object`` decodes any other object.

    Malformed: ``data`` has another form.
    """
    try:
        return _decode(data, decode_object)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from error


def _decode(data: Any, decode_object: Callable[[str, Any], Any]) -> Any:
    if isinstance(data, list):
        return [_decode(item, decode_object) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](_decode(content, decode_object))
    if name in _MAPPINGS:
        mapping = _MAPPINGS[name]()
        for key, item in content:
            mapping[_decode(key, decode_object)] = _decode(item, decode_object)
        return mapping
    return _decode_rare(name, content, decode_object)


def _decode_rare(name: str, content: Any, decode_object: Callable[[str, Any], Any]) -> Any:
    if name == "int":
        return int(content, 16)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "bytearray":
        return bytearray.fromhex(content)
    if name == "complex":
        return complex(*map(float, content))
    if name == "Fraction":
        return Fraction(*(int(number, 16) for number in content))
    if name == "Decimal":
        return Decimal(str(content))
    if name == "range":
        return range(*(int(number, 16) for number in content))
    return decode_object(name, content)


class Channel:
    """JSON messages to and from the other process, each with its length before it."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd

    def send(self, message: Any) -> None:
        """Send ``message``. ValueError: it is too long."""
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_BYTES:
            raise ValueError(f"{len(body)} bytes, allowed between program and tests: {MAX_BYTES}")
        data = memoryview(_HEAD.pack(len(body)) + body)
        while data:
            data = data[os.write(self._write_fd, data) :]

    def receive(self) -> Any:
        """The next message. EOFError: the other process has ended. Malformed: it is not a
        message."""
        (length,) = _HEAD.unpack(self._read(_HEAD.size))
        if length > MAX_BYTES:
            raise Malformed(f"a message of {length} bytes, allowed: {MAX_BYTES}")
        try:
            # This makes a new NaN each time. The json module would use one object, and lists
            # compare equal if they contain the same object.
            return json.loads(self._read(length), parse_constant=float)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"{type(error).__name__}: {error}") from error

    def _read(self, count: int) -> bytes:
        pieces = []
        while count:
            piece = os.read(self._read_fd, min(count, 1 << 20))
            if not piece:
                raise EOFError
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)
