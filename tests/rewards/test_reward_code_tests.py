"""Tests in Python run in a process that the program cannot reach: honest programs pass, cheats do
not."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.reward_settings import CodeSettings, RewardSettings
from relax_hpc.rewards import RewardInput
from relax_hpc.rewards.code import Code
from relax_hpc.rewards.code_sides.judge import PythonTests
from relax_hpc.rewards.code_sides.plain import Malformed, NotPlainError, decode, encode
from tests.effort import effort
from tests.plain_user import plain_user
from tests.rewards.cheating_programs import ADD, AGAINST_ADD, AGAINST_OTHERS, ENDLESS
from tests.rewards.honest_programs import HONEST

LIMIT_S = 60.0
AT_ONCE = 3


def judged(program: str, tests: str, **settings: Any) -> dict[str, float]:
    code = Code(RewardSettings(code=CodeSettings(**{"timeout_s": LIMIT_S, **settings})))
    return code(response(program, tests))


def response(program: str, tests: str) -> RewardInput:
    return RewardInput("?", "", f"So:\n```python\n{program}\n```\n", "stop", {"tests": tests})


@pytest.fixture(scope="module")
def code() -> Code:
    return Code(RewardSettings(code=CodeSettings(timeout_s=LIMIT_S)))


@pytest.fixture(scope="module")
def totals(code: Code) -> dict[str, float]:
    """Rewards of honest programs, of the same with a failing test, and of cheats, by name."""
    pairs = {f"honest: {name}": pair for name, pair in HONEST.items()}
    # unittest.main() ends the tests, so that nothing behind it runs.
    failing = [name for name in HONEST if name != "unittest"][: effort(3, len(HONEST))]
    for name in failing:
        program, tests = HONEST[name]
        pairs[f"failing: {name}"] = program, f"{tests}\nassert 0"
    pairs |= {f"cheat: {name}": (program, ADD) for name, program in AGAINST_ADD.items()}
    pairs |= {f"cheat: {name}": pair for name, pair in AGAINST_OTHERS.items()}
    pairs["honest: add"] = "def add(a, b): return a + b", ADD
    with ThreadPoolExecutor(AT_ONCE) as pool:
        scores = pool.map(lambda pair: code(response(*pair)), pairs.values())
        return {name: score["total"] for name, score in zip(pairs, scores, strict=True)}


def test_honest_programs_pass_tests_of_all_forms(totals: dict[str, float]) -> None:
    honest = {name: total for name, total in totals.items() if name.startswith("honest")}
    assert [name for name, total in honest.items() if total != 1.0] == []


def test_tests_run_to_their_end(totals: dict[str, float]) -> None:
    failing = {name: total for name, total in totals.items() if name.startswith("failing")}
    assert len(failing) >= 3 and set(failing.values()) == {0.0}


def test_cheats_get_nothing(totals: dict[str, float]) -> None:
    cheats = {name: total for name, total in totals.items() if name.startswith("cheat")}
    assert len(cheats) == len(AGAINST_ADD) + len(AGAINST_OTHERS)
    assert [name for name, total in cheats.items() if total] == []


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_gets_nothing(name: str) -> None:
    assert judged(ENDLESS[name], ADD, timeout_s=0.6)["total"] == 0.0


@pytest.mark.root
def test_a_plain_users_programs_are_judged_alike() -> None:
    if os.getuid():
        pytest.skip("we are one")
    with plain_user() as user:
        done = user.run(user.python, "-m", "tests.rewards.test_reward_code_tests", timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1.0, *[0.0] * effort(2, len(AGAINST_ADD))]


@pytest.mark.parametrize(
    ("tests", "detail"),
    [
        ("assert add(1, 2) ==", "no Python: invalid syntax"),
        (
            "def check(candidate):\n    assert candidate(1, 2) == 3",
            "they use no name that a program could define",
        ),
        ("assert pow(2, 3) == 8", "they use no name that a program could define"),
        ("def test_add():\n    assert add(1, 2) == 4", "they end without using the program"),
        (
            "import sys\nsys.exit(0)\nassert add(1, 2) == 4",
            "they end without using the program",
        ),
        ("from solution import *\nassert add(1, 2) == 3", "line 1: .*No module named 'solution'"),
        ("import sys\nassert add(1, 2) == 3\nsys.argv = [__file__]", "they use __file__"),
        (
            "from unittest.mock import patch\n"
            "with patch('builtins.input', return_value='1'): assert add(1, 2) == 3",
            "they replace builtins.input",
        ),
        (
            "from unittest import mock\n"
            "@mock.patch.object(add, 'x')\ndef test(x): assert add(1, 2) == 3\ntest()",
            "they replace add",
        ),
        ("import asyncio\nassert asyncio.run(add(1, 2)) == 3", "they await the program"),
        ("import io, sys\nsys.stdin = io.StringIO()\nadd(1, 2)", "they replace sys.stdin"),
        ("class Odd: pass\nadd(Odd(), 1)", "an object of Odd; set reward.code.same_process"),
    ],
)
def test_broken_tests_are_an_error(code: Code, tests: str, detail: str) -> None:
    """Whatever the program does."""
    for program in ("def add(a, b): return a + b", "add = lambda *args: 3\ncandidate = 3"):
        with pytest.raises(ValueError, match=f"^tests: .*{detail}"):
            code(response(program, tests))


def test_a_module_that_cannot_be_imported_breaks_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no device')")
    monkeypatch.syspath_prepend(tmp_path)
    tests = PythonTests("\nimport broken_module\nassert add(1, 2) == 3")
    assert tests.problem() == "line 2: RuntimeError: no device"


def test_tests_may_replace_standard_output(code: Code) -> None:
    tests = (
        "import io\nfrom unittest.mock import patch\n"
        "with patch('sys.stdout', new=io.StringIO()) as out:\n    greet()\n"
        "assert out.getvalue() == 'hi\\n'"
    )
    assert code(response("def greet(): print('hi')", tests))["total"] == 1.0
    assert code(response("def greet(): print('no')", tests))["total"] == 0.0


def test_a_comparison_of_objects_is_told(code: Code) -> None:
    vector = (
        "class Vector:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): "
        "return self.x == other.x"
    )
    tests = "assert Vector(1) == Vector(1)"
    assert code(response(vector, tests)) == {"total": 0.0, "passed": 0.0, "objects": 1.0}
    assert code(response(vector, "assert Vector(1).x == 1")) == {
        "total": 1.0,
        "passed": 1.0,
        "objects": 0.0,
    }
    for needs_more in ("Vector(1) < Vector(2)", "Vector(1) + 1", "1 - Vector(1)", "1 in Vector(1)"):
        assert code(response(vector, f"assert {needs_more}"))["objects"] == 1.0
    assert judged(vector, tests, same_process=True)["total"] == 1.0


def test_in_one_process_a_program_can_forge_its_result() -> None:
    """So says the documentation of the setting."""
    forged = (
        "import os\nlast = open('main.py').read().rstrip().splitlines()[-1]\nprint(last[7:-2], "
        "flush=True)\nos._exit(0)"
    )
    assert judged(forged, ADD, same_process=True)["total"] == 1.0
    assert judged("def add(a, b): return a - b", ADD, same_process=True)["total"] == 0.0
    assert judged("import os\nos._exit(0)", ADD, same_process=True)["total"] == 0.0


def test_names_that_a_program_has_to_define() -> None:
    tests = PythonTests(
        "import math\nfrom re import match as found\nx = lambda y: y + outer\n"
        "class A(Base):\n    z = inner\n"
        "def f(given):\n    global made\n"
        "    made = other(given, len(given), math.pi, string.digits, queue(1), queue.x)\n"
        "for i in [called(j) for j in items]: made\nassert f(x) == top"
    )
    assert tests.names == {
        "outer",
        "Base",
        "inner",
        "other",
        "string",
        "queue",
        "called",
        "items",
        "top",
        "made",
    }
    assert tests.modules == {"string"}
    assert tests.top_names >= {"items", "top"} and not tests.top_names & {"outer", "other"}


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
NUMBERS |= st.fractions() | st.decimals(allow_nan=False)
RANGES = st.builds(range, st.integers(), st.integers())
LEAVES = st.none() | st.booleans() | NUMBERS | st.text() | st.binary() | RANGES
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    mappings = st.dictionaries(KEYS, inner, max_size=4)
    sets = st.sets(KEYS, max_size=4) | st.frozensets(KEYS, max_size=4)
    counters = st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter)
    sequences = lists | lists.map(tuple) | lists.map(deque)
    return sequences | mappings | mappings.map(OrderedDict) | sets | counters


NAMES = [
    "tuple",
    "set",
    "dict",
    "Counter",
    "int",
    "bytes",
    "Fraction",
    "Decimal",
    "range",
    "complex",
    "x",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    ),
    max_leaves=10,
)


def refused(*args: Any) -> Any:
    raise NotPlainError


def refuse(name: str, content: Any) -> Any:
    raise Malformed(name)


@settings(max_examples=effort(100, 10_000), deadline=None)
@given(st.recursive(LEAVES, containers, max_leaves=8))
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    copy = decode(json.loads(json.dumps(encode(value, refused)), parse_constant=float), refuse)
    assert repr(copy) == repr(value) or copy == value
    assert type(copy) is type(value)


@settings(max_examples=effort(200, 20_000), deadline=None)
@given(JSON)
def test_anything_that_is_sent_is_plain_or_malformed(data: Any) -> None:
    try:
        value = decode(data, refuse)
    except Malformed:
        return
    numbers = [bool, int, float, complex, Fraction, Decimal]
    assert type(value) in [*numbers, type(None), str, bytes, list, tuple, set, dict, Counter, range]


def test_other_objects_are_not_plain() -> None:
    for value in (object(), len, iter([]), Exception(), type):
        with pytest.raises(NotPlainError):
            encode([value], refused)


CONTAINER = """#!{python}
import json, os, sys
entry = sys.argv[sys.argv.index("image.sif") + 1:]
binds = [word for word in sys.argv if word.startswith("--bind=") and word.endswith(":/box")]
folder = binds[0].split("=")[1][:-5]
print("INFO: a container says this", file=sys.stderr, flush=True)
asked = json.loads(entry[-1]) | {{"folder": folder}}
asked["words"][0] = {python!r}
os.execv({python!r}, [{python!r}, *entry[1:-1], json.dumps(asked)])
"""


def test_both_processes_run_in_containers_where_an_image_is_named(tmp_path: Path) -> None:
    program = tmp_path / "apptainer"
    program.write_text(CONTAINER.format(python=sys.executable))
    program.chmod(0o755)
    settings = {"image": "image.sif", "apptainer": str(program)}
    assert judged("def add(a, b): return a + b", ADD, **settings)["total"] == 1.0
    assert judged("def add(a, b): return a", ADD, **settings)["total"] == 0.0


def main() -> None:
    """Print the rewards of an honest program and of some cheats."""
    code = Code(RewardSettings(code=CodeSettings(timeout_s=LIMIT_S)))
    cheats = list(AGAINST_ADD.values())[: effort(2, len(AGAINST_ADD))]
    programs = ["def add(a, b): return a + b", *cheats]
    print(json.dumps([code(response(program, ADD))["total"] for program in programs]))


if __name__ == "__main__":
    main()
