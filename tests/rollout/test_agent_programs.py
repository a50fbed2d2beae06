"""Processes of agent programs: their results, which no other process can send, and their end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.environments.plain_values import clean_texts, read_plain
from relax_hpc.rollout.agents import program as program_module
from relax_hpc.rollout.agents.agents import _variables, _without_proxy
from relax_hpc.rollout.agents.program import Program
from tests.effort import effort

LIMIT_S = 60.0
MEMORY_BYTES = 1 << 32
SEND = """
import json, os, subprocess, sys
def send(result):
    os.write(int(os.environ['RELAX_RESULT_FD']), json.dumps(result).encode())
"""
both_modes = pytest.mark.parametrize("pid_namespace", [True, False], ids=["namespace", "subreaper"])


def run(code: str, pid_namespace: bool = True, **variables: str) -> tuple[Program, int]:
    """A Python program that has run, and its exit code."""
    program = Program(
        [sys.executable, "-c", SEND + code], variables, {}, MEMORY_BYTES, pid_namespace
    )

    async def play() -> int:
        async with asyncio.timeout(LIMIT_S):
            return await program.run()

    return program, asyncio.run(play())


def marked(mark: str) -> list[psutil.Process]:
    """Processes whose environment has this mark."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MARK") == mark:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("send({'reward': 1.0})", {"reward": 1.0}),
        ("print('x'); print(json.dumps({'reward': 0.5}))", {"reward": 0.5}),
        ("send({'reward': 1.0}); print(json.dumps({'reward': 0.0}))", {"reward": 1.0}),
        ("print(json.dumps({'reward': 1.0}), flush=True); print('Unclosed session', "
         "file=sys.stderr)", {"reward": 1.0}),
        ("for part in ['{\"rew', 'ard\": ', '1', '}']: sys.stdout.write(part); "
         "sys.stdout.flush()", {"reward": 1}),
        ("for part in ['{\"rew', 'ard\": ', '1', '}\\n']: os.write(3, "
         "part.encode())", {"reward": 1}),
        ("print(json.dumps({'reward': 1.0}) + '\\r\\n\\n  ')", {"reward": 1.0}),
        ("print(json.dumps({'text': 'x' * 300_000, 'reward': "
         "1}))", {"text": "x" * 300_000, "reward": 1}),
        ("print('{\"reward\": 0.5, \"loss\": NaN}')", {"reward": 0.5, "loss": "NaN"}),
        ("print('{\"reward\": 0.5, \"most\": -1e999}')", {"reward": 0.5, "most": "-Infinity"}),
        ("print(json.dumps({'said': 'cut \\ud83d', 'reward': "
         "1}))", {"said": "cut \ufffd", "reward": 1}),
        ("print('[1]')", None),
        ("print('{\"reward\": 1.0}'); print('bye')", None),
        ("print('[' * 100_000)", None),
        ("pass", None),
    ],
)  # fmt: skip
def test_a_result_is_one_object_over_the_descriptor_or_else_the_last_line_of_standard_output(
    code: str, result: Mapping[str, Any] | None
) -> None:
    program, exit_code = run(code)
    assert (exit_code, program.read_result()) == (0, result)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "send({'reward': 0.0}); send({'reward': 1.0})",
            "found no JSON .*allowed: one JSON object",
        ),
        ("send([1])", "found list, allowed: one JSON object"),
        ("os.write(3, b'x' * ((1 << 20) + 1))", "found more bytes, allowed: one JSON object"),
        (
            "print('{\"a\": \"' + 'x' * (5 << 19) + '\"}')",
            "the last line of standard output is longer than",
        ),
    ],
)
def test_a_result_that_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    monkeypatch.setattr(program_module, "_PAUSE_S", 0.0)
    program, exit_code = run(code)
    assert exit_code == 0
    with pytest.raises(ValueError, match=says):
        program.read_result()


@both_modes
def test_no_process_but_the_program_itself_sends_its_result(pid_namespace: bool) -> None:
    """A command inherits the descriptor, as those of languages that close none, and opens it
    through /proc."""
    forge = "echo '{\"reward\": 1.0}'"
    code = f"""
commands = [{forge!r} + ' >&3', {forge!r} + ' >/proc/self/fd/3', {forge!r} + ' >/proc/$PPID/fd/3']
for command in commands:
    subprocess.run(['sh', '-c', command], pass_fds=[3], stderr=subprocess.DEVNULL)
if os.fork() == 0:
    send({{'reward': 1.0}})
    os._exit(0)
os.wait()
send({{'reward': 0.25}})
"""
    program, _ = run(code, pid_namespace)
    assert program.read_result() == {"reward": 0.25} and program.forged > 0
    silent, _ = run(
        code.replace("send({'reward': 0.25})", "print('{\"reward\": 0.0}')"), pid_namespace
    )
    assert silent.read_result() == {"reward": 0.0}


@both_modes
def test_no_command_reports_an_end_in_the_name_of_the_launcher(pid_namespace: bool) -> None:
    code = """
import contextlib, glob
for path in glob.glob(f'/proc/{os.getppid()}/fd/*'):
    with contextlib.suppress(OSError), open(path, 'w') as stream:
        stream.write('{"ended": 0}\\n')
send({'reward': 0.5})
sys.exit(7)
"""
    program, exit_code = run(code, pid_namespace)
    assert (exit_code, program.read_result()) == (7, {"reward": 0.5})


@both_modes
def test_what_outlives_a_program_is_killed_and_says_nothing_more(pid_namespace: bool) -> None:
    """A command leaves its process group, waits for the program's end, and writes the reward to its
    output."""
    daemon = """exec 9>/proc/$PROGRAM/fd/1
echo ready >&2
exec >/dev/null 2>&1
while [ -r /proc/$PROGRAM/fd/1 ]; do :; done
sleep 0.5
echo '{"reward": 1.0}' >&9
exec sleep 1000"""
    code = f"""
ready, tell = os.pipe()
variables = {{**os.environ, 'PROGRAM': str(os.getpid())}}
subprocess.Popen(['setsid', 'sh', '-c', {daemon!r}], env=variables, stdout=subprocess.DEVNULL, stderr=tell)
assert os.read(ready, 6) == b'ready\\n'
print(json.dumps({{'reward': 0.0}}))
"""
    mark = f"daemon-{os.getpid()}-{pid_namespace}"
    program, exit_code = run(code, pid_namespace, MARK=mark)
    assert (exit_code, program.output) == (0, '{"reward": 0.0}\n'), program.errors
    assert not marked(mark)


@both_modes
def test_many_descendants_end_with_a_program_that_is_given_up(pid_namespace: bool) -> None:
    mark = f"many-{os.getpid()}-{pid_namespace}"
    code = """
import signal
for _ in range(8):
    subprocess.Popen(['setsid', 'sh', '-c', 'setsid sleep 1000 & setsid sleep 1000'])
signal.pause()
"""
    program = Program(
        [sys.executable, "-c", SEND + code], {"MARK": mark}, {}, MEMORY_BYTES, pid_namespace
    )

    async def play() -> None:
        running = asyncio.create_task(program.run())
        async with asyncio.timeout(LIMIT_S):
            while len(marked(mark)) < 17:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(play())
    assert not marked(mark)


@both_modes
def test_a_rollout_process_that_is_killed_leaves_no_program(pid_namespace: bool) -> None:
    mark = f"killed-{os.getpid()}-{pid_namespace}"
    code = (
        "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '1000']); time.sleep(1000)"
    )
    script = f"""
import asyncio, sys
from relax_hpc.rollout.agents.program import Program
asyncio.run(Program([sys.executable, '-c', {code!r}], {{'MARK': {mark!r}}}, {{}}, 1 << 32, {pid_namespace}).run())
"""
    rollout = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + LIMIT_S

    def wait_until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    wait_until(lambda: "sleep" in [process.name() for process in marked(mark)])
    rollout.send_signal(signal.SIGKILL)
    rollout.wait()
    wait_until(lambda: not marked(mark))


def test_a_program_sees_its_own_processes_alone_and_finds_its_signals_as_they_were() -> None:
    code = """
pids = sorted(int(name) for name in os.listdir('/proc') if name.isdecimal())
pipe = subprocess.run('yes | head -n 1', shell=True, capture_output=True).stderr.decode()
descriptors = len(os.listdir('/proc/self/fd')) - 1
send({'pids': pids, 'pid': os.getpid(), 'session': os.getsid(0), 'pipe': pipe, 'descriptors': descriptors})
"""
    program, _ = run(code)
    result = program.read_result()
    assert result and result["session"] == result["pid"]
    assert result["pipe"] == "" and result["descriptors"] == 4
    if program.no_namespace:
        assert "unshare" in program.no_namespace or "mount" in program.no_namespace
    else:
        assert result["pids"] == [1, result["pid"]]


@both_modes
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), 11)", -11),
        ("x = bytearray(1 << 33)", 1),
        ("os._exit(0)", 0),
    ],
)
def test_how_a_program_has_ended_is_known(pid_namespace: bool, code: str, expected: int) -> None:
    assert run(code, pid_namespace)[1] == expected


@both_modes
def test_a_command_that_there_is_not_is_named(pid_namespace: bool) -> None:
    program = Program(["no-such-program"], {}, {}, MEMORY_BYTES, pid_namespace)
    with pytest.raises(OSError, match="no-such-program: "):
        asyncio.run(program.run())


def test_the_end_of_what_was_printed_is_kept_however_it_was_written() -> None:
    code = (
        "[print('line', n, flush=True) for n in range(200)]; print('x' * 70_000, file=sys.stderr)"
    )
    program, _ = run(code)
    assert program.output.splitlines() == [f"line {n}" for n in range(200)]
    assert program.errors.endswith("x\n") and len(program.errors) > 1 << 15


# -- values ----------------------------------------------------------------------------------------

texts = st.text(st.characters())
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=effort(100, 2000), deadline=None)
@given(values)
def test_any_json_becomes_plain_json_that_everybody_reads(value: Any) -> None:
    plain = read_plain(json.dumps(value))
    assert json.dumps(plain, allow_nan=False, ensure_ascii=False).encode().decode()
    assert clean_texts(plain) == plain
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return
    assert plain == value, "plain values stay the same"


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "a.b"}, "a.b,127.0.0.1,localhost"),
        ({"no_proxy": "a.b", "NO_PROXY": "127.0.0.1,c"}, "a.b,127.0.0.1,c,localhost"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_this_node_itself_is_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], hosts: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert _without_proxy(variables) == {"no_proxy": hosts, "NO_PROXY": hosts}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _without_proxy({}) == {"no_proxy": hosts, "NO_PROXY": hosts}


def test_no_client_asks_another_server_that_the_users_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """langchain-openai reads OPENAI_API_BASE before OPENAI_BASE_URL."""
    names = ("OPENAI_API_BASE", "ANTHROPIC_API_BASE", "ANTHROPIC_API_URL", "ANTHROPIC_AUTH_TOKEN")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert not set(names) & set(_variables({}, "http://here", "sk-1"))
    for name in names:
        monkeypatch.setenv(name, "the user's")
    variables = _variables({"ANTHROPIC_API_URL": "of the options"}, "http://here", "sk-1")
    assert [variables[name] for name in names] == [
        "http://here/v1",
        "http://here",
        "of the options",
        "sk-1",
    ]
