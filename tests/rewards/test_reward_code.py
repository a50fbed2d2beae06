"""Programs of policies are kept apart: what they may do, what they may not, and what a response
gets for them."""

from __future__ import annotations

import dataclasses
import json
import stat
import sys
from collections import Counter
from pathlib import Path

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.reward_settings import CodeSettings, RewardSettings
from relax_hpc.rewards import RewardInput, jail
from relax_hpc.rewards.code import Code
from relax_hpc.rewards.jail import Jail
from relax_hpc.rewards.program_text import program_of

CONTAINER = """#!{python}
import json, os, sys
from pathlib import Path
with Path({log!r}).open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
words = sys.argv[sys.argv.index("image.sif") + 1:]
folder = next(word for word in sys.argv if word.startswith("--bind=") and word.endswith(":/box")).split("=")[1][:-5]
asked = json.loads(words[-1]) | {{"folder": folder}}
os.execv({python!r}, [{python!r}, *words[1:-1], json.dumps(asked | {{"words": [{python!r}, *asked["words"][1:]]}})])
"""


def test_apptainer_is_asked_to_keep_it_apart_where_an_image_is_named(tmp_path: Path) -> None:
    program, log = tmp_path / "apptainer", tmp_path / "log"
    program.write_text(CONTAINER.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    settings = CodeSettings(image="image.sif", apptainer=str(program))
    assert Jail(settings).run("print(input())", "inside", 60.0).output == "inside\n"
    words = json.loads(log.read_text().splitlines()[-1])
    assert words[:5] == ["exec", "--containall", "--no-home", "--net", "--network=none"]
    assert words[7:9] == ["image.sif", "python3"]
    with pytest.raises(
        ConfigError, match=r"reward.code.apptainer: found '/no/apptainer', which is no program"
    ):
        Jail(dataclasses.replace(settings, apptainer="/no/apptainer"))
    with pytest.raises(ConfigError, match="a test program ended with exit code 0"):
        Jail(dataclasses.replace(settings, apptainer="/bin/true"))


def response(program: str, tests: object) -> RewardInput:
    return RewardInput("?", "", f"So:\n```python\n{program}\n```\n", "stop", {"tests": tests})


SORTS = [{"input": "3 1 2\n", "output": "1 2 3"}, {"input": "2 1\n", "output": "1 2\n"}]


@pytest.fixture(scope="module")
def code() -> Code:
    return Code(RewardSettings())


@pytest.mark.parametrize(
    ("program", "tests", "total", "passed"),
    [
        ("print(*sorted(input().split()))", SORTS, 1.0, 1.0),
        ("print(*sorted(open('/dev/stdin').read().split()))", SORTS, 1.0, 1.0),
        ("print('1 2 3')", SORTS, 0.0, 0.5),
        ("print(input(", SORTS, 0.0, 0.0),
        ("import os\nprint('1 2 3', flush=True)\nos._exit(1)", SORTS, 0.0, 0.0),
    ],
)
def test_a_response_gets_what_its_program_does(
    code: Code, program: str, tests: object, total: float, passed: float
):
    assert code(response(program, tests)) == {"total": total, "passed": passed}


def test_a_share_of_the_tests_and_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = Code(RewardSettings(code=CodeSettings(share=True, timeout_s=60.0)))
    assert shares(response("print('1 2')", SORTS))["total"] == 0.5
    shares = Code(RewardSettings(code=CodeSettings(share=True, timeout_s=1.0)))
    asked = list[float]()
    real = jail.Jail.run
    monkeypatch.setattr(
        jail.Jail, "run", lambda self, *about: asked.append(about[2]) or real(self, *about)
    )
    assert shares(response("while True: pass", SORTS)) == {"total": 0.0, "passed": 0.0}
    assert len(asked) == 1, "the first test has had all of the time"


def test_a_prompt_without_tests_is_an_error_and_a_response_without_a_program_is_not(
    code: Code,
) -> None:
    for tests in (None, [], "", 3):
        with pytest.raises(ValueError, match="tests: found"):
            code(response("print(1)", tests))
    with pytest.raises(TypeError, match="tests: found an input or output that is no text"):
        code(response("print(1)", [{"input": 1, "output": "1"}]))
    assert code(RewardInput("?", "", "I would sort them.", "stop", {"tests": SORTS})) == {
        "total": 0.0,
        "passed": 0.0,
    }


@pytest.mark.parametrize("key", [{"testtype": "functional"}, {"fn_name": "two_sum"}])
def test_tests_that_call_a_function_are_no_inputs(code: Code, key: dict[str, str]) -> None:
    tests: list[dict[str, object]] = [{"input": "[2, 7]\n9", "output": "[0, 1]", **key}]
    with pytest.raises(ValueError, match=r"^tests: (testtype|fn_name): found"):
        code(response("print([0, 1])", tests))
    plain = [{"input": "2", "output": "2", "testtype": "stdin", "type": "public"}]
    assert code(response("print(input())", [{**plain[0], "fn_name": None}]))["total"] == 1.0


@pytest.mark.parametrize(
    ("before", "behind"), [("<answer>", "</answer>"), ("So:\n<answer> ", "\n")]
)
def test_a_tag_may_stand_in_the_line_of_a_fence(before: str, behind: str) -> None:
    assert program_of(f"{before}```python\nprint(1)\n```{behind}") == "print(1)\n"


def test_a_program_within_a_thought_is_no_answer(code: Code) -> None:
    program = "```python\nprint(*sorted(input().split()))\n```\n"
    for text, total in (
        (f"<think>{program}</think>No.", 0.0),
        (f"<think>Hm.</think>{program}", 1.0),
    ):
        assert code(RewardInput("?", "", text, "stop", {"tests": SORTS}))["total"] == total


@pytest.mark.parametrize("weak", [False, True])
def test_nobody_else_reads_a_program_or_its_tests(
    weak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = Counter[str]()
    real = jail.Jail._command

    def words(self: Jail, folder: str, *arguments: object) -> list[str]:
        for path in (Path(folder), *Path(folder).rglob("*")):
            modes[stat.filemode(path.stat().st_mode)] += 1
        return real(self, folder, *arguments)

    code = Code(RewardSettings(code=CodeSettings(weak=weak)))
    monkeypatch.setattr(jail.Jail, "_command", words)
    assert code(response("def add(a, b): return a + b", "assert add(1, 2) == 3"))["total"] == 1.0
    assert modes.keys() == {"drwx------", "-rw-------"}
