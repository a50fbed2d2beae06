"""Tools of MCP servers: calls, restarts after faults, results, and the environment of a server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.environments.base import MediaPart, Observation
from relax_hpc.environments.host import Environments
from relax_hpc.environments.tool_calls import ToolError
from relax_hpc.environments.tools import tools_of
from relax_hpc.environments.tools.mcp import NoAnswer, ServerDied, ServerProcess
from tests.environments.environment_helpers import LIMIT_S, play, with_host
from tests.environments.tool_helpers import call_text
from tests.helpers.signalled import count_calls


def server_options(*tools: str, **settings: Any) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
    server = {"command": command, "tools": list(tools), "env": {"WORD": "word"}, **settings}
    return {"mcp": {"servers": {"one": server}}}


def test_many_episodes_share_one_server() -> None:
    async def work(host: Environments) -> Any:
        sums = [play(host, call_text("sum", numbers=[number, 1])) for number in range(20)]
        return await asyncio.gather(*sums), await play(
            host, *map(call_text, ("fails", "none", "echo"))
        )

    tools = server_options("sum", "echo", "fails", "none")
    sums, [failed, unknown, echo] = with_host(work, "tools", options={"tools": tools})
    assert [answer.split()[0] for [answer] in sums] == [str(number + 1) for number in range(20)]
    assert failed == "Error: nothing there" and unknown == "Error: Unknown tool: none"
    variable, last_pid = echo.split()
    pids = {answer.split()[1] for [answer] in sums}
    assert variable == "word" and pids == {last_pid}
    # A process of environments has started the server. The server ends with this process.
    with contextlib.suppress(psutil.NoSuchProcess):
        server, deadline = psutil.Process(int(last_pid)), time.monotonic() + LIMIT_S
        while server.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_server_returns_images_and_signatures_and_can_time_out() -> None:
    tools = tools_of(server_options("picture", "sum", "silent", timeout_s=2.0))
    try:
        assert tools["picture"].called({}) == Observation("a\nb", (MediaPart("image", b"pixels"),))
        function = {"name": "sum", "description": "", "parameters": {"type": "object"}}
        assert tools["sum"].signature == {"type": "function", "function": function}
        with pytest.raises(ToolError, match="no answer in 2 s"):
            tools["silent"].called({})
    finally:
        tools["sum"].close()
    [tool] = tools_of(
        {"mcp": {"servers": {"no": {"command": ["/no/such"], "tools": ["a"]}}}}
    ).values()
    with pytest.raises(ToolError, match="cannot be started"):
        tool.called({})


@pytest.mark.parametrize(
    ("program", "quote"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys; sys.exit('name a database')", "name a database"),
    ],
)
def test_the_last_line_of_a_server_that_cannot_start_is_quoted(program: str, quote: str) -> None:
    server = {"command": [sys.executable, "-c", program], "tools": ["a"]}
    [tool] = tools_of({"mcp": {"servers": {"broken": server}}}).values()
    text = f"environment.options.tools.mcp: a: the tool's server cannot be started: {quote}"
    with pytest.raises(ConfigError, match=f"{re.escape(text)}$"):
        _ = tool.signature


@pytest.mark.parametrize(
    ("signal_number", "calls", "answers"),
    [
        (signal.SIGKILL, 2, ["call 3"]),
        (signal.SIGKILL, 9, ["environment_died: the tool's server has ended, 3 times"]),
        (signal.SIGSTOP, 1, ["call 2"]),
        (signal.SIGSTOP, 9, ["environment_timeout: no answer in 0.5 s, nor to a ping, 3 times"]),
    ],
)
def test_a_call_is_retried_after_a_server_dies_or_hangs(
    signal_number: int, calls: int, answers: list[str], tmp_path: Path
) -> None:
    arguments = {"signal": int(signal_number), "calls": calls, "log": str(tmp_path / "log")}

    async def work(host: Environments) -> Any:
        return await play(host, call_text("signal", **arguments)), await play(
            host, call_text("sum", numbers=[1, 2])
        )

    tools = server_options(
        "signal", "sum", timeout_s=0.5 if signal_number == signal.SIGSTOP else LIMIT_S
    )
    signalled, [total] = with_host(work, "tools", options={"tools": tools})
    assert signalled == answers and count_calls(arguments["log"]) == min(3, calls + 1)
    # A later episode has a working server.
    assert total.split()[0] == "3"


def test_a_server_that_does_not_read_is_killed() -> None:
    connection = ServerProcess(["sleep", "1000"], {"PATH": os.environ["PATH"]})
    try:
        with pytest.raises(NoAnswer, match="does not read its input"):
            connection.ask("tools/call", {"text": "x" * (1 << 20)}, 0.2)
        with pytest.raises(ServerDied, match="the tool's server has ended"):
            connection.ask("tools/call", {}, LIMIT_S)
    finally:
        connection.close()


def test_a_server_that_refuses_initialization_restarts_for_the_next_call() -> None:
    program = """if True:
        import json, sys
        for message in map(json.loads, sys.stdin):
            answer = {"id": message["id"], "error": {"message": "refuses " + message["method"]}}
            print(json.dumps(answer), flush=True)
    """
    server = {"command": [sys.executable, "-c", program], "tools": ["sum"]}
    [tool] = tools_of({"mcp": {"servers": {"old": server}}}).values()
    try:
        for _ in range(2):
            with pytest.raises(ToolError, match=r"^refuses initialize$"):
                tool.called({})
    finally:
        tool.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ('"result": []', "^the tool's server gave a result that is no object$"),
        ('"error": "no memory"', "^no memory$"),
        ('"error": {"message": "no disk"}', "^no disk$"),
    ],
)
def test_a_malformed_answer_is_reported_without_a_wait(answer: str, text: str) -> None:
    program = """if True:
        import json, sys
        for message in map(json.loads, sys.stdin):
            if "id" in message:
                answer = sys.argv[1] if message["method"] == "tools/call" else '"result": {}'
                print('{"id": %d, %s}' % (message["id"], answer), flush=True)
    """
    server = {
        "command": [sys.executable, "-c", program, answer],
        "tools": ["sum"],
        "timeout_s": 10 * LIMIT_S,
    }
    [tool] = tools_of({"mcp": {"servers": {"odd": server}}}).values()
    start_s = time.monotonic()
    try:
        with pytest.raises(ToolError, match=text):
            tool.called({})
    finally:
        tool.close()
    assert time.monotonic() - start_s < LIMIT_S


@pytest.mark.parametrize(
    ("end", "kind"), [("exit(3)", ConfigError), ("os.kill(os.getpid(), 9)", RelaxError)]
)
def test_an_episode_fails_if_its_server_never_starts(end: str, kind: type) -> None:
    command = [sys.executable, "-c", f"import os; {end}"]
    tools = {"mcp": {"servers": {"broken": {"command": command, "tools": ["sum"]}}}}

    async def work(host: Environments) -> Any:
        return await play(host, call_text("sum", numbers=[1, 2]))

    died = "the tool's server cannot be started: the tool's server has ended"
    assert with_host(work, "tools", options={"tools": tools}) == [
        f"environment_died: {died}, 3 times"
    ]
    [tool] = tools_of(tools).values()
    with pytest.raises(RelaxError, match=died) as failure:
        _ = tool.signature
    assert failure.type is kind


BLOB = base64.b64encode(b"pixels").decode()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (
            [
                {"type": "text", "text": "here:"},
                {
                    "type": "resource",
                    "resource": {
                        "uri": "file:///a.txt",
                        "mimeType": "text/plain",
                        "text": "it is 4",
                    },
                },
            ],
            Observation("here:\n[resource file:///a.txt]\nit is 4"),
        ),
        (
            [
                {
                    "type": "resource_link",
                    "uri": "file:///b.py",
                    "name": "b.py",
                    "description": "a program",
                }
            ],
            Observation("[resource file:///b.py: b.py, a program]"),
        ),
        (
            [
                {
                    "type": "resource",
                    "resource": {"uri": "file:///c.png", "mimeType": "image/png", "blob": BLOB},
                }
            ],
            Observation("", (MediaPart("image", b"pixels"),)),
        ),
        (
            [
                {
                    "type": "resource",
                    "resource": {
                        "uri": "file:///d.zip",
                        "mimeType": "application/zip",
                        "blob": BLOB,
                    },
                }
            ],
            Observation(
                "[resource file:///d.zip: 6 bytes of application/zip, which cannot be shown]"
            ),
        ),
        ([{"type": "hologram"}], Observation("[hologram, which cannot be shown]")),
        ([{"type": "text", "text": "cut \ud83d"}], Observation("cut \ufffd")),
    ],
)
def test_every_part_of_a_result_is_shown_or_named(result: list[Any], expected: Observation) -> None:
    tools = tools_of(server_options("answers"))
    try:
        assert tools["answers"].called({"content": result}) == expected
        assert tools["answers"].called({"structuredContent": {"x": "é"}}).text == '{"x": "é"}'
        for malformed in (
            {"type": "image"},
            {"type": "resource"},
            {},
            "text",
            {"type": "resource", "resource": {"uri": "x"}},
        ):
            with pytest.raises(ToolError, match="a malformed part of a result"):
                tools["answers"].called({"content": [malformed]})
    finally:
        tools["answers"].close()


def test_a_server_gets_only_named_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET", "https_proxy", "LC_ALL"):
        monkeypatch.setenv(name, "x")
    tools = tools_of(server_options("environment", inherit=["AWS_SECRET"]))
    try:
        names = tools["environment"].called({}).text.split()
    finally:
        tools["environment"].close()
    assert {"WORD", "PATH", "AWS_SECRET", "https_proxy", "LC_ALL"} <= set(names)
    assert not {"HF_TOKEN", "OPENAI_API_KEY"} & set(names)
    with pytest.raises(ConfigError, match="inherit: found 'HF_TOKEN', allowed: a list of names"):
        tools_of(server_options("environment", inherit="HF_TOKEN"))
