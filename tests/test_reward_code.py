"""Programs of policies are kept apart: what they may do, what they may not, and what a response gets for them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.reward_settings import CodeSettings, RewardSettings
from relax_hpc.rewards import RewardInput, jail
from relax_hpc.rewards.code import Code
from relax_hpc.rewards.jail import Jail
from tests.hostile_programs import SETTINGS
from tests.plain_user import plain_user

WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""Root who may nothing, as in many containers: there are no namespaces."""


@pytest.fixture(scope="module", params=["ourselves", "a plain user"])
def ran(request: pytest.FixtureRequest) -> Iterator[dict[str, dict]]:
    """What became of each program, by whom it was started."""
    if request.param == "a plain user" and os.getuid():
        pytest.skip("we are one")
    before = {process.pid for process in psutil.process_iter()}
    words = "-m", "tests.hostile_programs"
    if request.param == "ourselves":
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, umask=0o077)
    else:
        with plain_user() as user:
            done = user.run(user.python, *words, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    left = [process for process in psutil.process_iter(["cmdline", "pid"]) if process.pid not in before]
    found["left"] = {"programs": [one.info for one in left if "main.py" in (one.info["cmdline"] or ())]}
    yield found


def test_what_never_ends_is_ended_with_all_that_it_has_started(ran: dict) -> None:
    assert not ran["endless"]["in_time"] and not ran["sleeps"]["in_time"]
    assert ran["left"]["programs"] == []


def test_processes_memory_and_files_have_their_limits(ran: dict) -> None:
    assert 1 <= int(ran["forks"]["output"]) <= SETTINGS.processes
    assert ran["memory"]["code"] != 0 and ran["memory"]["output"] == ""
    assert ran["one file"]["code"] != 0 and "written" not in ran["one file"]["output"]
    assert 0 < int(ran["many files"]["output"]) <= SETTINGS.disk_mb
    assert ran["prints"]["code"] != 0 and ran["prints"]["in_time"]


def test_there_is_no_network_and_nobody_elses_file_or_process(ran: dict) -> None:
    assert ran["network"]["code"] != 0 or ran["network"]["output"] == "False [(1, 'lo')]\n"
    folders, *refused = ran["looks around"]["output"].splitlines()
    assert not {"home", "root", "proc", "sys", "var", "run"}.intersection(folders.split("'"))
    assert refused == ["30", "30"] and "['main.py']" in folders
    assert ran["kills"]["output"] == "alone\n"
    assert ran["becomes root"]["output"] == "True -1 False\n"
    assert ran["speaks"]["output"] == "stressed\n"


def test_where_nothing_can_be_kept_apart_it_is_refused_unless_asked_for() -> None:
    program = """if True:
        from relax_hpc.reward_settings import CodeSettings
        from relax_hpc.rewards.jail import Jail
        try:
            Jail(CodeSettings())
        except Exception as error:
            print(error)
        print(Jail(CodeSettings(weak=True)).run("print(6 * 7)", "", 60).output)
    """
    words = [*([] if os.getuid() == 0 else ["unshare", "-Ur"]), *WITHOUT_RIGHTS, sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-2:] == ["42", ""], done.stderr
    assert "reward.code: no program can be kept apart on" in done.stdout
    assert "Operation not permitted: unshare; the site has to allow" in done.stdout
    assert "or set reward.code.image, or reward.code.weak: true" in done.stdout


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


@pytest.mark.parametrize("below", ["/tmp", "/dev/shm"])
def test_an_interpreter_may_lie_where_programs_have_folders_of_their_own(below: str) -> None:
    with tempfile.TemporaryDirectory(dir=below) as folder:
        Path(folder).chmod(0o755)
        venv.create(folder, symlinks=True)
        own = dataclasses.replace(SETTINGS, python=f"{folder}/bin/python")
        prints = "import sys; open('/tmp/a', 'w').close(); print(sys.prefix, open('/dev/null').read())"
        assert Jail(own).run(prints, "", 60.0).output.split() == [folder]


def test_apptainer_is_asked_to_keep_it_apart_where_an_image_is_named(tmp_path: Path) -> None:
    program, log = tmp_path / "apptainer", tmp_path / "log"
    program.write_text(CONTAINER.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    settings = CodeSettings(image="image.sif", apptainer=str(program))
    assert Jail(settings).run("print(input())", "inside", 60.0).output == "inside\n"
    words = json.loads(log.read_text().splitlines()[-1])
    assert words[:5] == ["exec", "--containall", "--no-home", "--net", "--network=none"]
    assert words[7:9] == ["image.sif", "python3"]
    with pytest.raises(ConfigError, match=r"reward.code.apptainer: found '/no/apptainer', which is no program"):
        Jail(dataclasses.replace(settings, apptainer="/no/apptainer"))
    with pytest.raises(ConfigError, match="a program that prints was ended by code 0"):
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
        ("print('1 2 3')", SORTS, 0.0, 0.5),
        ("print(input(", SORTS, 0.0, 0.0),
        ("import os\nprint('1 2 3', flush=True)\nos._exit(1)", SORTS, 0.0, 0.0),
    ],
)
def test_a_response_gets_what_its_program_does(code: Code, program: str, tests: object, total: float, passed: float):
    assert code(response(program, tests)) == {"total": total, "passed": passed}


def test_a_share_of_the_tests_and_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = Code(RewardSettings(code=CodeSettings(share=True, timeout_s=1.0)))
    assert shares(response("print('1 2')", SORTS))["total"] == 0.5
    asked = list[float]()
    real = jail.Jail.run
    monkeypatch.setattr(jail.Jail, "run", lambda self, *about: asked.append(about[2]) or real(self, *about))
    assert shares(response("while True: pass", SORTS)) == {"total": 0.0, "passed": 0.0}
    assert len(asked) == 1, "the first test has had all of the time"


def test_a_prompt_without_tests_is_an_error_and_a_response_without_a_program_is_not(code: Code) -> None:
    for tests in (None, [], "", 3):
        with pytest.raises(ValueError, match="tests: found"):
            code(response("print(1)", tests))
    with pytest.raises(TypeError, match="tests: found an input or output that is no text"):
        code(response("print(1)", [{"input": 1, "output": "1"}]))
    assert code(RewardInput("?", "", "I would sort them.", "stop", {"tests": SORTS})) == {"total": 0.0, "passed": 0.0}


def test_a_program_within_a_thought_is_no_answer(code: Code) -> None:
    program = "```python\nprint(*sorted(input().split()))\n```\n"
    for text, total in ((f"<think>{program}</think>No.", 0.0), (f"<think>Hm.</think>{program}", 1.0)):
        assert code(RewardInput("?", "", text, "stop", {"tests": SORTS}))["total"] == total


def test_nobody_else_reads_a_program_or_its_tests(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = list[int]()
    real = jail.Jail._words

    def words(self: Jail, folder: str, *about: object) -> list[str]:
        modes.append(Path(folder).stat().st_mode & 0o777)
        return real(self, folder, *about)

    monkeypatch.setattr(jail.Jail, "_words", words)
    code(response("def add(a, b): return a + b", "assert add(1, 2) == 3"))
    assert modes == [0o700, 0o700]
