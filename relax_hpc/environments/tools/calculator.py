"""A calculator: Python's arithmetic, within bounds that no expression gets out of."""

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
MOST_CHARACTERS = 1000
MOST_BITS = 4096
"""Bits of a whole number, in between too."""
MOST_DIGITS = 300
"""Digits to which a number is rounded, before or behind the point."""


def _rounded(value: Number, digits: Number = 0) -> Number:
    # To very many digits of a whole number Python counts for ever.
    return round(value, max(-MOST_DIGITS, min(operator.index(digits), MOST_DIGITS)))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"abs": abs, "round": _rounded, "min": min, "max": max},
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
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
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
    """Values of expressions."""

    name = "calculator"
    description = f"Computes the value of an expression of {_ALLOWED}."
    parameters: ClassVar = {
        "expression": Parameter("string", "expression such as (3 + 4) * sqrt(2)")
    }

    def call(self, expression: str) -> str:
        """The value as a text. ToolError: it has none, or is not allowed."""
        return shown(value_of(expression))


def value_of(expression: str) -> Number:
    """The value of ``expression``. ToolError: it has none, or is not allowed.

    >>> value_of("2 ** 10 - sqrt(16) / 4")
    1023.0
    """
    if len(expression) > MOST_CHARACTERS:
        raise ToolError(
            f"expression: found {len(expression)} characters, allowed {MOST_CHARACTERS}"
        )
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError(
            f"expression: cannot be read or has no value: {_why(error)}; allowed: {_ALLOWED}"
        ) from error
    except (ArithmeticError, TypeError) as error:
        raise ToolError(f"expression: has no value: {_why(error)}") from error


def shown(value: Number) -> str:
    """``value`` as a text, a whole number without a point.

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
            return _computed(_BINARY[type(op)], _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _computed(_FUNCTIONS[name], *map(_value, arguments))
    raise ToolError(f"expression: found {ast.unparse(node)[:80]}, allowed: {_ALLOWED}")


def _computed(function: Callable[..., Any], *values: Number) -> Number:
    if function is operator.pow and all(isinstance(value, int) for value in values):
        base, exponent = values
        if abs(int(exponent)) * max(1, int(base).bit_length()) > MOST_BITS:
            raise OverflowError(f"the power has more than {MOST_BITS} bits")
    return _bounded(function(*values))


def _bounded(value: Any) -> Number:
    if isinstance(value, complex) and not cmath.isnan(value):
        raise ArithmeticError("the result is a complex number")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise OverflowError(f"a whole number has more than {MOST_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError(f"the result is {value}")
    return value


def _why(error: Exception) -> str:
    return getattr(error, "msg", "") or str(error) or type(error).__name__
