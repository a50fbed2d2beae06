"""Honest programs, and tests in the forms that data sets of programs have them; all pass."""

from __future__ import annotations

HONEST = {
    "a check of a candidate": (
        """
from typing import List
def below(numbers: List[int], limit: int) -> bool:
    return all(number < limit for number in numbers)
def twice(x):
    return 2 * x
""",
        """
METADATA = {"author": "?"}
def check(candidate):
    assert candidate([1, 2, 3], 5) == True
    assert candidate([], 5) is True and candidate(limit=5, numbers=[9]) is False
    assert twice(4) == 8
def typed(numbers: List[int]) -> None: ...
check(below)
""",
    ),
    "arguments that change": (
        """
def sort(numbers): numbers.sort()
def add_row(rows): rows.append([0]); rows[0][0] = 9
def count(counts, seen, data): counts["k"] = counts.get("k", 0) + 1; seen.add(7); data[0] = 65
def remove_twins(numbers):
    kept = sorted(set(numbers))
    numbers[: len(kept)] = kept
    return len(kept)
def fill(queue, counts): queue.append(2); counts["x"] = 1
""",
        """
from collections import defaultdict, deque
numbers = [3, 1, 2]
assert sort(numbers) is None and numbers == [1, 2, 3]
row = [1]
rows = [row]
add_row(rows)
assert rows == [[9], [0]] and rows[0] is row and row == [9]
counts, seen, data = {}, {1}, bytearray(b"xyz")
count(counts, seen, data)
count(counts=counts, seen=seen, data=data)
assert counts == {"k": 2} and seen == {1, 7} and data == bytearray(b"Ayz")
numbers = [1, 1, 2]
kept = remove_twins(numbers)
assert kept == 2 and numbers[:kept] == [1, 2]
queue, counts = deque([1]), defaultdict(int)
fill(queue, counts)
assert queue == deque([1, 2]) and counts == {"x": 1} and counts["y"] == 0
""",
    ),
    "errors": (
        """
import json
class Broke(Exception):
    pass
class VeryBroke(Broke):
    def __str__(self): return f"lacks {self.args[0]}"
def pay(amount):
    if amount < 0: raise ValueError("negative")
    if amount > 100: raise VeryBroke(amount)
    if amount > 10: raise Broke(amount)
    return amount
def look(values): return values["k"]
def divide(a, b): return a / b
def parse(text): return json.loads(text)
def decoded(data): return data.decode()
def opened(path): return open(path)
""",
        """
import contextlib, json
try: pay(-1)
except ValueError as error: assert str(error) == "negative" and error.args == ("negative",)
else: raise AssertionError
for amount, kind, text in ((20, Broke, "20"), (200, VeryBroke, "lacks 200"), (200, Broke, "lacks 200")):
    try: pay(amount)
    except kind as error: assert str(error) == text and type(error).__name__ in ("Broke", "VeryBroke")
    else: raise AssertionError
try: pay(20)
except VeryBroke: raise AssertionError
except Exception: pass
cases = (look, {}, KeyError), (pay, "a", TypeError), (parse, "{", json.JSONDecodeError)
for function, argument, kind in (*cases, (decoded, b"\\xff", UnicodeDecodeError), (opened, "/no", FileNotFoundError)):
    try: function(argument)
    except kind: pass
    else: raise AssertionError
with contextlib.suppress(ZeroDivisionError): divide(1, 0)
""",
    ),
    "classes": (
        """
import enum
from dataclasses import dataclass
class Stack:
    made = 0
    def __init__(self, items=()): self.items = list(items); Stack.made += 1
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise IndexError("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, index): return self.items[index]
    def __setitem__(self, index, item): self.items[index] = item
    def __delitem__(self, index): del self.items[index]
    def __str__(self): return f"Stack{self.items}"
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear()
    @property
    def top(self): return self.items[-1]
    @classmethod
    def of(cls, *items): return cls(items)
class Sub(Stack): pass
@dataclass
class Point:
    x: int
    y: int = 2
def point(): return Point(1)
class Color(enum.Enum):
    RED = 1
def red(): return Color.RED
class Warm:
    def __init__(self, degrees): self.degrees = degrees
    def __float__(self): return self.degrees + 0.5
    def __int__(self): return self.degrees
class Solution:
    def two(self, numbers, goal):
        return [(i, j) for j in range(len(numbers)) for i in range(j) if numbers[i] + numbers[j] == goal]
""",
        """
stack = Stack()
assert len(stack) == 0 and not stack
assert stack.push(1).push(2) is stack and len(stack) == 2 and stack.top == 2 and stack
assert list(stack) == [1, 2] and stack[0] == 1 and 2 in stack and 9 not in stack and sum(stack) == 3
stack[0] = 5
del stack[1]
assert [item for item in stack] == [5] and str(stack) == f"{stack}" == "Stack[5]" and stack.pop() == 5
try: stack.pop()
except IndexError as error: assert str(error) == "empty"
else: raise AssertionError
assert Stack.of(1, 2).items == [1, 2] and Stack.made == 2 and hasattr(stack, "pop") and not hasattr(stack, "no")
stack.extra = 3
assert stack.extra == 3
assert isinstance(stack, Stack) and not isinstance(stack, Sub) and isinstance(Sub(), Stack) and not isinstance(3, Stack)
with Stack([1]) as context: assert list(context) == [1]
assert list(context) == []
assert point().x == 1 and Point(3, y=4).y == 4
assert red() is Color.RED and red() == Color["RED"] and red().value == 1 and red().name == "RED"
assert float(Warm(3)) == 3.5 and int(Warm(3)) == 3
assert {stack: 1}[stack] == 1 and stack != Stack() and Stack.__name__ == "Stack"
assert Solution().two([1, 2, 3], 5) == [(1, 2)]
""",
    ),
    "values of all kinds": (
        """
import enum
from collections import Counter, defaultdict, namedtuple
class Level(enum.IntEnum):
    HIGH = 3
Pair = namedtuple("Pair", "x y")
def same(value): return value
TABLE = {"a": [1, (2, 3)]}
def kinds(): return [Level.HIGH, Pair(1, 2), defaultdict(list, a=[1]), True, None]
def squares(count):
    for number in range(count): yield number * number
def counted(text): return Counter(text)
def texts(): return map(str, [1, 2])
successor = lambda number: number + 1
""",
        """
import math
values = (0, -1, 2**70, -(3**20000), 0.1, -0.0, float("inf"), "a\\u20ac\\ud800", b"\\0\\xff", (1, [2, {3}]))
values += ({(1, 2): "x", None: 1.5}, frozenset({1}), 2 + 3j, range(2, 9, 3), bytearray(b"x"), True, None, [], {}, set())
for value in values:
    copy = same(value)
    assert copy == value and type(copy) is type(value), (copy, value)
assert math.copysign(1, same(-0.0)) == -1
nan = same(float("nan"))
assert nan != nan and [same(nan)] != [same(nan)]
assert TABLE == {"a": [1, (2, 3)]} and kinds() == [3, (1, 2), {"a": [1]}, True, None]
assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5 and next(squares(0), "none") == "none"
rows = squares(1)
assert next(rows) == 0
try: next(rows)
except StopIteration: pass
else: raise AssertionError
assert counted("aab") == {"a": 2, "b": 1} and counted("aab").most_common(1) == [("a", 2)] and counted("")["z"] == 0
assert list(texts()) == ["1", "2"] and sorted([3, 1], key=successor) == [1, 3] and list(map(successor, [1])) == [2]
""",
    ),
    "functions as arguments": (
        """
import functools
def applied(function, values): return [function(value) for value in values]
def memoized(function):
    known = {}
    @functools.wraps(function)
    def inner(*args):
        if args not in known: known[args] = function(*args)
        return known[args]
    return inner
def compose(f, g): return lambda x: f(g(x))
def same(value): return value
def retry(function, count, kind=Exception):
    for _ in range(count):
        try: return function()
        except kind: pass
    raise RuntimeError("never")
def total(values): return sum(values)
def is_kind(value, kind): return isinstance(value, kind)
""",
        """
assert applied(lambda x: x * 2, [1, 2]) == [2, 4] and applied(str, [1]) == ["1"] and applied(len, ["ab"]) == [2]
calls = []
@memoized
def fibonacci(n):
    calls.append(n)
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
assert fibonacci(10) == 55 and len(calls) == 11
assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11
function = lambda: 1
assert same(function) is function and same(int) is int
tries = []
def flaky():
    tries.append(1)
    if len(tries) < 3: raise ValueError("again")
    return len(tries)
assert retry(flaky, 5) == 3
try: retry(lambda: 1 / 0, 2)
except RuntimeError as error: assert str(error) == "never"
else: raise AssertionError
assert total(iter([1, 2])) == 3 and total(x for x in range(4)) == 6 and total({1: 2}.values()) == 2
assert is_kind(3, int) and not is_kind("3", int) and is_kind([], (list, tuple))
""",
    ),
    "printed text, and a main part": (
        """
def greet(name): print("Hello", name)
print("at the beginning")
if __name__ == "__main__":
    number = int(input())
""",
        """
import contextlib, io
printed = io.StringIO()
with contextlib.redirect_stdout(printed): greet("you")
assert printed.getvalue() == "Hello you\\n"
""",
    ),
    "unittest": (
        "def add(a, b): return a + b",
        """
import unittest
class TestAdd(unittest.TestCase):
    def test_numbers(self): self.assertEqual(add(1, 2), 3)
    def test_rounding(self): self.assertAlmostEqual(add(0.1, 0.2), 0.3)
    def test_text(self):
        with self.assertRaises(TypeError): add(1, "a")
if __name__ == "__main__":
    unittest.main()
""",
    ),
    "names that the program imports": (
        """
import math
from collections import Counter
from fractions import Fraction
from decimal import Decimal
def root(number): return math.sqrt(number)
def counts(text): return Counter(text)
def half(): return [Fraction(1, 2), Decimal("0.50")]
""",
        """
assert math.isclose(root(2) ** 2, 2)
assert counts("aab") == Counter("aab")
assert half() == [Fraction(1, 2), Decimal("0.5")]
""",
    ),
    "numpy": (
        """
import numpy as np
def mean(values): return np.mean(values)
def rows(): return np.arange(3)
def scalars(): return [np.int64(3), np.bool_(True), np.float32(0.5)]
""",
        """
import numpy
assert mean([1, 2, 3]) == 2.0 and scalars() == [3, True, 0.5] and scalars()[1] is True
assert list(rows()) == [0, 1, 2] and len(rows()) == 3
assert np.allclose(rows(), [0, 1, 2]) and not numpy.allclose(rows(), [0, 1, 3])
""",
    ),
    "a function of the standard library": (
        "from operator import add",
        "def test():\n    assert add(2, 3) == 5\ntest()",
    ),
    "a constant alone": ("LIMIT = 7\nPRIMES = [2, 3, 5]", "assert LIMIT == 7 and PRIMES[-1] == 5"),
}
"""Programs and their tests, by the form of the tests."""
