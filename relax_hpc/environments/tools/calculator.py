"""A calculator: Python's arithmetic, with limits on the size of numbers and expressions."""

from __future__ import annotations

import ast
import cmath
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar

from relax_hpc.environments.tool_calls import ToolError
from relax_hpc.environments.tools.base import Parameter, Tool

Number = int | float
MAX_CHARACTERS = 1000
MAX_BITS = 4096
"""Maximum number of bits of an integer, also of intermediate results."""
MAX_DIGITS = 300
"""Maximum number of digits for `round`, before or after the decimal point."""


def _round(value: Number, digits: Any = 0) -> Number:
    # Python computes 10**digits for an integer, which takes very long for many digits.
    return round(value, max(-MAX_DIGITS, min(operator.index(digits), MAX_DIGITS)))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"abs": abs, "round": _round, "min": min, "max": max},
    **{
        name: getattr(math, name)
        for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan")
    },
    **{
        name: getattr(math, name)
        for name in ("asin", "acos", "atan", "floor", "ceil", "gcd", "hypot", "degrees")
    },
    "radians": math.radians,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_ALLOWED = "numbers, + - * / // % **, parentheses, pi, e, " + ", ".join(sorted(_FUNCTIONS))


class Calculator(Tool):
    """Computes the value of an expression."""

    name = "calculator"
    description = f"Computes the value of an expression of {_ALLOWED}."
    parameters: ClassVar = {
        "expression": Parameter("string", "expression such as (3 + 4) * sqrt(2)")
    }

    def call(self, expression: str) -> str:
        """The value as a text. ToolError: the expression has no value, or is not allowed."""
        return shown(value_of(expression))


def value_of(expression: str) -> Number:
    """The value of ``expression``. ToolError: it has no value, or is not allowed.

    >>> value_of("2 ** 10 - sqrt(16) / 4")
    1023.0
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"expression: found {len(expression)} characters, allowed {MAX_CHARACTERS}")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        cause = _error_text(error)
        raise ToolError(
            f"expression: cannot be read or has no value: {cause}; allowed: {_ALLOWED}"
        ) from error
    except (ArithmeticError, TypeError) as error:
        raise ToolError(f"expression: has no value: {_error_text(error)}") from error


def shown(value: Number) -> str:
    """``value`` as a text; a whole number has no decimal point.

    >>> shown(3.0), shown(0.1 + 0.2), shown(10**20)
    ('3', '0.3', '100000000000000000000')
    """
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _apply(_BINARY[type(op)], _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _apply(_FUNCTIONS[name], *map(_value, arguments))
    raise ToolError(f"expression: found {ast.unparse(node)[:80]}, allowed: {_ALLOWED}")


def _apply(function: Callable[..., Any], *values: Number) -> Number:
    if function is operator.pow and all(isinstance(value, int) for value in values):
        # Checked before the power is computed, which could take very long.
        base, exponent = values
        if abs(int(exponent)) * max(1, int(base).bit_length()) > MAX_BITS:
            raise OverflowError(f"the power has more than {MAX_BITS} bits")
    return _bounded(function(*values))


def _bounded(value: Any) -> Number:
    if isinstance(value, complex) and not cmath.isnan(value):
        raise ArithmeticError("the result is a complex number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError(f"a whole number has more than {MAX_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError(f"the result is {value}")
    return value


def _error_text(error: BaseException) -> str:
    return getattr(error, "msg", "") or str(error) or type(error).__name__
