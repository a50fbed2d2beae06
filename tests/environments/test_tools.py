"""Tools that the policy calls: what it is told, whatever it writes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.environments.base import Beginning, MediaPart, Observation, Response, Step
from relax_hpc.environments.host import Environments
from relax_hpc.environments.tool_calls import ToolCall, ToolError, calls_of, read_turn
from relax_hpc.environments.tools import corpus, pictures, tools_of
from relax_hpc.environments.tools.calculator import value_of
from relax_hpc.environments.tools.corpus import Corpus, write_corpus
from relax_hpc.environments.tools.mcp import NoAnswer, ServerDied, ServerProcess
from relax_hpc.environments.tools.pictures import box_of
from relax_hpc.environments.with_tools import WithTools
from relax_hpc.environments.zoom import ZoomIn
from tests.environments.environment_helpers import LIMIT_S, play, with_host
from tests.helpers.media_files import encoded, picture
from tests.helpers.signalled import count_calls

TOOLS = {"calculator": {}, "python": {"timeout_s": 20.0, "processes": 4}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(text: str) -> Response:
    return Response(text, "stop", 0)


def texts(step: Step) -> list[str]:
    return [observation.text for observation in step.observations]


# -- calls -----------------------------------------------------------------------------------------


@given(
    st.text(),
    st.dictionaries(st.text(), st.none() | st.integers() | st.lists(st.text()), max_size=3),
)
def test_a_call_is_read_as_it_was_written(name: str, arguments: dict) -> None:
    written = f"thinking {call(name, x=arguments)} and {call('again')}"
    if "</tool_call>" not in json.dumps([name, arguments]):
        assert calls_of(written) == [ToolCall(name, {"x": arguments}), ToolCall("again", {})]


@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name":', '"a"', "{", "}", ",", "[", "1e999", "x"]
        )
    )
)
def test_whatever_is_no_call_is_told_of(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = calls_of(text)
    assert bool(found) == ("<tool_call>" in text or "</tool_call>" in text)
    assert all(isinstance(one, ToolError | ToolCall) for one in found)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "a", "arguments": {"x": NaN}}', "found NaN"),
        ('{"name": "a", "arguments": {}, "name": "b"}', "found 'name' twice in one object"),
        ('{"name": "a"}', "has name and arguments, found 'name'"),
        ('{"name": "a", "arguments": "{}"}', "its arguments are an object"),
        ('["a"]', "has name and arguments, found list"),
        ("9" * 5000, "not JSON"),
    ],
)
def test_a_call_that_is_none_says_how_it_is_written(body: str, why: str) -> None:
    [error] = calls_of(f"<tool_call>{body}</tool_call>")
    assert isinstance(error, ToolError) and why in str(error)
    assert '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>' in str(error)


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "in_thought", "calls", "spoken"),
    [
        (f"<think>I could {CALL} but I know it.</think>\n\nIt is 2.", False, 0, "\n\nIt is 2."),
        (f"<think>\nI could {CALL} but", False, 0, ""),
        (f"I could {CALL} but", True, 0, ""),
        (f"I could {CALL} but no</think>It is 2.", False, 0, "It is 2."),
        (f"I could {CALL} but no</think>It is 2.", True, 0, "It is 2."),
        (f"<think>hm</think>a{CALL}b", False, 1, "ab"),
        (f"<think>hm {CALL}</think>{CALL}<think>{CALL}</think>{CALL}", False, 2, ""),
        ("I could <tool_call> but no</think>It is 2.", True, 0, "It is 2."),
        ("I could <tool_call> but no</think>It is 2.", False, 0, "It is 2."),
        (CALL.replace("1+1", "<think>"), False, 1, ""),
        (CALL.replace("1+1", "</think>"), False, 1, ""),
        ("<tool_call>{}</tool_call", False, 1, "<tool_call>{}</tool_call"),
    ],
)
def test_what_is_thought_is_neither_called_nor_spoken(
    text: str, in_thought: bool, calls: int, spoken: str
) -> None:
    turn = read_turn(text, in_thought)
    assert (len(turn.calls), turn.spoken) == (calls, spoken)
    assert text[turn.first_call :].startswith(
        "<tool_call>" if calls and isinstance(turn.calls[0], ToolCall) else ""
    )
    step = WithTools({"calculator": {}}).step(Response(text, "stop", 0, in_thought))
    assert step.done == (not calls) and len(step.observations) == calls


thoughts = st.text("<>/ab tool_callthink", max_size=30).map(
    lambda text: text.replace("</think>", "")
)


@given(thoughts, st.lists(st.sampled_from([CALL, "<tool_call>", "</tool_call>", "a"]), max_size=4))
def test_nothing_within_a_thought_is_a_call(thought: str, pieces: list[str]) -> None:
    inside = thought + "".join(pieces)
    assert read_turn(f"<think>{inside}").calls == read_turn(inside, in_thought=True).calls == []
    assert read_turn(f"<think>{inside}</think>{CALL}").calls == calls_of(CALL)
    assert read_turn(f"<think>{inside}</think>4").spoken == "4"


def test_half_a_surrogate_pair_in_a_call_is_replaced_and_a_number_that_is_none_refused() -> None:
    [cut] = calls_of('<tool_call>{"name": "a", "arguments": {"x": ["\\ud83d"]}}</tool_call>')
    assert cut == ToolCall("a", {"x": ["\ufffd"]})
    [error] = calls_of('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>')
    assert isinstance(error, ToolError) and "found 1e999" in str(error)


# -- the environment -------------------------------------------------------------------------------


def test_each_call_of_a_turn_is_answered_and_a_turn_without_one_is_the_last() -> None:
    environment = WithTools(TOOLS, most_calls=3)
    both = (
        call("calculator", expression="6*7") + call("calculators", expression="1") + "<tool_call>{}"
    )
    step = environment.step(said(both))
    assert [observation.role for observation in step.observations] == ["tool"] * 3 and not step.done
    assert texts(step)[:2] == [
        "42",
        "Error: there is no tool 'calculators'; allowed: calculator, python",
    ]
    assert texts(step)[2].startswith(
        "Error: found <tool_call> without </tool_call>; a call is written"
    )
    assert step.info == {"calls": ["calculator", "calculators"], "failed": 2}
    many = environment.step(said(call("calculator", expression="1") * 4))
    assert texts(many) == ["Error: found 4 calls in a turn, allowed 3"]
    assert many.info == {"calls": ["calculator", "calculators"], "failed": 3}, (
        "of the whole episode"
    )
    assert environment.step(said("42")) == Step(done=True)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "needs the argument expression"),
        ({"expression": 1}, "found '1', allowed: string"),
        ({"expression": "1", "x": 2}, "calculator has no argument x; it has: expression"),
    ],
)
def test_arguments_are_those_of_the_tool(arguments: dict, why: str) -> None:
    [answer] = texts(WithTools(TOOLS).step(said(call("calculator", **arguments))))
    assert answer.startswith("Error: ") and why in answer


def test_a_template_is_given_what_the_tools_are() -> None:
    [calculator, _] = (tool.signature["function"] for tool in tools_of(TOOLS).values())
    assert calculator["name"] == "calculator" and calculator["parameters"]["required"] == [
        "expression"
    ]
    assert calculator["parameters"]["properties"]["expression"]["type"] == "string"


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        (
            {"calculater": {}},
            "environment.options.tools: found 'calculater', allowed .*did you mean 'calculator'",
        ),
        ({"calculator": {"digits": 3}}, "'calculator' cannot be made with .*digits"),
        ({"python": {"timeout_s": -1}}, "environment.options.tools.python: timeout_s: found -1"),
        (
            {"search": {"corpus": "here"}},
            "tools.search.corpus: found 'here', allowed: an absolute path",
        ),
        (
            {"search": {"corpus": "/no/such"}},
            "corpus: /no/such: found no corpus: .*; make one by python -m",
        ),
        (
            {"mcp": {"servers": {"a": {"command": ["b"]}}}},
            "environment.options.tools.mcp.servers.a: 'tools'; allowed",
        ),
        ({"mcp": {"servers": {"a": {"command": [], "tools": ["b", "b"]}}}}, "two are called 'b'"),
        (
            {"json:dumps": {"obj": 1}},
            "'json:dumps': found no class derived from Tool, and no list of them",
        ),
        (["calculator"], "allowed: tools by name, with their options"),
    ],
)
def test_tools_that_cannot_be_had_are_said_at_once(tools: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        WithTools(tools)


# -- calculator ------------------------------------------------------------------------------------

NUMBERS = st.integers(-999, 999).map(lambda number: f"({number})")
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner)
        .map(" ".join)
        .map("({})".format)
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_the_calculator_computes_as_python_does(expression: str) -> None:
    try:
        wanted = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="has no value"):
            value_of(expression)
    else:
        assert value_of(expression) == wanted


@given(st.text(alphabet="0123456789.e+-*/%() ,jπrounmax<>=[]'\"_:", max_size=60))
def test_no_text_gets_out_of_the_calculator(text: str) -> None:
    try:
        assert isinstance(value_of(text), int | float)
    except ToolError as error:
        assert str(error)


REFUSED = (
    *(
        "9**9**9",
        "2**5000",
        "(-8)**0.5",
        "1e308*10",
        "round(5, -10**9)*0+1/0",
        "sqrt(-1)",
        "max()",
        "",
    ),
    *(
        "__import__('os')",
        "().__class__",
        "[1]",
        "'a'*10",
        "1 if 1 else 2",
        "lambda: 1",
        "True",
        "2^3",
    ),
    *("(" * 500, "-" * 2000 + "1"),
)


@pytest.mark.parametrize("expression", REFUSED)
def test_the_calculator_refuses_what_has_no_number(expression: str) -> None:
    with pytest.raises(ToolError):
        value_of(expression)


# -- programs --------------------------------------------------------------------------------------


def test_programs_are_run_apart_and_side_by_side() -> None:
    python = tools_of(TOOLS)["python"]
    programs = [
        "print(6 * 7)",
        "x = 1\nprint(y)",
        "print('a' * 10000)",
        "pass",
        # As many processes as it may have. The processes that run it are not among them, for any
        # user.
        "import subprocess as s; [s.Popen(['sleep', '2']) for _ in range(3)]; print('all')",
        "import subprocess as s; [s.Popen(['sleep', '2']) for _ in range(4)]",
    ]
    with ThreadPoolExecutor(len(programs)) as threads:
        told = list(threads.map(lambda program: python.called({"code": program}), programs))
    assert told[0] == "42" and told[3] == "(it printed nothing)" and told[4] == "all"
    assert "BlockingIOError" in told[5]
    assert told[1].endswith("NameError: name 'y' is not defined\n(exit code 1)")
    assert len(told[2]) < 4100 and "6000 characters left out" in told[2]


def test_a_program_that_does_not_end_is_told_of() -> None:
    python = tools_of({"python": {"timeout_s": 1.0}})["python"]
    with pytest.raises(ToolError, match="not done in 1 s; it had printed:\nso far"):
        python.called({"code": "print('so far', flush=True)\nwhile True: pass"})


# -- search ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    filler = "filler " * 400
    rows = [
        {"title": "Paris", "text": "The capital of France, of towers."},
        {
            "title": "Rome",
            "text": f"The capital of Italy. {filler} In it stands the Colosseum. {filler}",
        },
        {"text": "A tower of cards; other towers."},
    ]
    (folder / "rows.jsonl").write_text(
        "\n".join([*map(json.dumps, rows), "broken", '{"title": "no text"}'])
    )
    return folder


def test_a_corpus_is_made_of_rows_and_searched_by_words(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = library / "corpus.sqlite"
    monkeypatch.setattr("sys.argv", ["corpus", str(library / "rows.jsonl"), str(file)])
    corpus.main()
    told = capsys.readouterr()
    assert told.out == f"{file}: 3 documents\n"
    assert (
        "rows.jsonl:4: left out: broken_json" in told.err
        and "rows.jsonl:5: left out: it has no text" in told.err
    )

    search = tools_of({"search": {"corpus": str(file), "results": 2}})["search"]
    before = file.read_bytes()
    queries = ["tower"] * 8 + ["colosseum", '"(* NEAR!']
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda query: search.called({"query": query}), queries))
    assert (
        found[:8]
        == ["A tower of cards; other towers.\n\nParis\nThe capital of France, of towers."] * 8
    )
    assert (
        found[8].startswith("Rome\n") and "stands the Colosseum" in found[8] and len(found[8]) < 700
    )
    assert found[9] == "No text has any of these words."
    assert file.read_bytes() == before
    assert sorted(path.name for path in library.iterdir()) == [file.name, "rows.jsonl"]


def test_a_question_that_takes_too_long_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "corpus.sqlite"
    write_corpus(file, (("", f"word {number}") for number in range(2000)))
    monkeypatch.setattr(corpus, "_STEPS", 100)
    with pytest.raises(TimeoutError):
        Corpus(file).search("word", 3, limit_s=-1.0)


# -- pictures --------------------------------------------------------------------------------------


def shown(observation: Observation) -> np.ndarray:
    [part] = observation.media
    assert isinstance(part.source, bytes)
    return np.asarray(Image.open(io.BytesIO(part.source)))


def test_what_the_policy_may_look_with_is_known_before_there_is_a_picture() -> None:
    names = [signature["function"]["name"] for signature in ZoomIn({"calculator": None}).signatures]
    assert names == ["calculator", "image_zoom_in_tool", "image_rotate_tool"]


def zoom(*sources: Any, **options: Any) -> ZoomIn:
    environment = ZoomIn(**options)
    media = tuple(MediaPart("image", source) for source in sources)
    environment.reset(Beginning("what is there?", "", {}, (MediaPart("video", b""), *media)))
    return environment


@pytest.fixture
def pixels() -> np.ndarray:
    return np.asarray(picture(60, 100))


def test_a_part_of_a_picture_is_shown_pixel_by_pixel(pixels: np.ndarray, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(encoded(picture(60, 100)))
    environment = zoom(encoded(picture(40, 40)), file, least_side=4)
    step = environment.step(
        said(call("image_zoom_in_tool", bbox_2d=[10, 20, 30.0, 59.6], label="it", img_idx=1))
    )
    assert np.array_equal(shown(step.observations[0]), pixels[20:60, 10:30])
    step = environment.step(said(call("image_rotate_tool", angle=90, img_idx=1)))
    assert np.array_equal(shown(step.observations[0]), np.rot90(pixels))


def test_boxes_may_be_in_thousandths(pixels: np.ndarray) -> None:
    environment = zoom(encoded(picture(60, 100)), unit="thousandths", least_side=1)
    [observation] = environment.step(
        said(call("image_zoom_in_tool", bbox_2d=[500, 0, 1000, 500]))
    ).observations
    assert np.array_equal(shown(observation), pixels[:30, 50:])


def test_what_is_shown_of_a_huge_picture_is_not_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_PIXELS", 20_000)
    environment = zoom(encoded(picture(200, 400)))
    [observation] = environment.step(
        said(call("image_zoom_in_tool", bbox_2d=[0, 0, 400, 200]))
    ).observations
    assert shown(observation).shape == (100, 200, 3)


@given(
    st.tuples(*[st.floats(-50, 1000)] * 4),
    st.tuples(st.integers(1, 500), st.integers(1, 500)),
    st.integers(1, 64),
)
def test_a_box_is_within_the_picture_and_of_some_size(
    wanted: tuple, size: tuple[int, int], least: int
) -> None:
    try:
        left, top, right, bottom = box_of(wanted, (1.0, 1.0), size, least)
    except ToolError:
        return
    assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
    assert right - left >= min(least, size[0]) and bottom - top >= min(least, size[1])
    for axis, (low, high) in enumerate([(left, right), (top, bottom)]):
        inside = [min(max(0.0, wanted[axis + end]), size[axis]) for end in (0, 2)]
        assert low <= inside[0] + 1 and high >= inside[1] - 1


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (call("image_zoom_in_tool", bbox_2d=[50, 0, 10, 20]), "left < right"),
        (call("image_zoom_in_tool", bbox_2d=[200, 200, 300, 300]), "left < right"),
        (call("image_zoom_in_tool", bbox_2d=[1, 2, 3]), "allowed: a list of 4 numbers"),
        (call("image_zoom_in_tool", bbox_2d=[1, 2, 3, 10**400]), "allowed: a list of 4 numbers"),
        (call("image_rotate_tool", angle=10**400), "allowed: number"),
        (call("image_rotate_tool", angle=True), "allowed: number"),
        (call("image_rotate_tool", angle=1, img_idx=1), "the prompt has 1 pictures"),
    ],
)
def test_a_wrong_look_is_told_of(written: str, why: str) -> None:
    [answer] = texts(zoom(encoded(picture(60, 100))).step(said(written)))
    assert answer.startswith("Error: argument ") and why in answer


@pytest.mark.parametrize(
    "options", [{"unit": "inches"}, {"least_side": 0}, {"limits": {"pixel": 1}}]
)
def test_looking_is_set_up_rightly(options: dict) -> None:
    with pytest.raises(ConfigError, match=f"environment.options.{next(iter(options))}: found"):
        ZoomIn(**options)


# -- servers ---------------------------------------------------------------------------------------


def served(*tools: str, **about: Any) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
    one = {"command": command, "tools": list(tools), "env": {"WORD": "word"}, **about}
    return {"mcp": {"servers": {"one": one}}}


def test_tools_of_a_server_are_called_by_many_episodes() -> None:
    async def work(host: Environments) -> Any:
        sums = [play(host, call("sum", numbers=[number, 1])) for number in range(20)]
        return await asyncio.gather(*sums), await play(host, *map(call, ("fails", "none", "echo")))

    tools = served("sum", "echo", "fails", "none")
    sums, [failed, unknown, echo] = with_host(work, "tools", options={"tools": tools})
    assert [told.split()[0] for [told] in sums] == [str(number + 1) for number in range(20)]
    assert failed == "Error: nothing there" and unknown == "Error: Unknown tool: none"
    word, last = echo.split()
    pids = {told.split()[1] for [told] in sums}
    assert word == "word" and pids == {last}
    # It was started by a process of environments, and ends with it.
    with contextlib.suppress(psutil.NoSuchProcess):
        server, deadline = psutil.Process(int(last)), time.monotonic() + LIMIT_S
        while server.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_server_shows_pictures_says_what_its_tools_are_and_is_not_waited_for_for_ever() -> None:
    tools = tools_of(served("picture", "sum", "silent", timeout_s=2.0))
    try:
        assert tools["picture"].called({}) == Observation("a\nb", (MediaPart("image", b"pixels"),))
        about = {"name": "sum", "description": "", "parameters": {"type": "object"}}
        assert tools["sum"].signature == {"type": "function", "function": about}
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
def test_a_server_that_cannot_start_is_quoted(program: str, quote: str) -> None:
    server = {"command": [sys.executable, "-c", program], "tools": ["a"]}
    [tool] = tools_of({"mcp": {"servers": {"broken": server}}}).values()
    text = f"environment.options.tools.mcp: a: the tool's server cannot be started: {quote}"
    with pytest.raises(ConfigError, match=f"{re.escape(text)}$"):
        _ = tool.signature


@pytest.mark.parametrize(
    ("number", "calls", "answers"),
    [
        (signal.SIGKILL, 2, ["call 3"]),
        (signal.SIGKILL, 9, ["environment_died: the tool's server has ended, 3 times"]),
        (signal.SIGSTOP, 1, ["call 2"]),
        (signal.SIGSTOP, 9, ["environment_timeout: no answer in 0.5 s, nor to a ping, 3 times"]),
    ],
)
def test_a_server_that_dies_or_hangs_is_started_again_and_asked_again(
    number: int, calls: int, answers: list[str], tmp_path: Path
) -> None:
    arguments = {"signal": int(number), "calls": calls, "log": str(tmp_path / "log")}

    async def work(host: Environments) -> Any:
        return await play(host, call("signal", **arguments)), await play(
            host, call("sum", numbers=[1, 2])
        )

    tools = served("signal", "sum", timeout_s=0.5 if number == signal.SIGSTOP else LIMIT_S)
    signalled, [total] = with_host(work, "tools", options={"tools": tools})
    assert signalled == answers and count_calls(arguments["log"]) == min(3, calls + 1)
    # Episodes that follow have a server.
    assert total.split()[0] == "3"


def test_a_server_that_does_not_read_is_ended() -> None:
    connection = ServerProcess(["sleep", "1000"], {"PATH": os.environ["PATH"]})
    try:
        with pytest.raises(NoAnswer, match="does not read its input"):
            connection.ask("tools/call", {"text": "x" * (1 << 20)}, 0.2)
        with pytest.raises(ServerDied, match="the tool's server has ended"):
            connection.ask("tools/call", {}, LIMIT_S)
    finally:
        connection.close()


def test_a_server_that_refuses_to_be_initialized_is_started_anew_for_the_next_call() -> None:
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
def test_a_server_that_never_starts_fails_the_episode_by_name(end: str, kind: type) -> None:
    command = [sys.executable, "-c", f"import os; {end}"]
    tools = {"mcp": {"servers": {"broken": {"command": command, "tools": ["sum"]}}}}

    async def work(host: Environments) -> Any:
        return await play(host, call("sum", numbers=[1, 2]))

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
    ("result", "shown"),
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
def test_every_part_of_an_answer_is_shown_or_named(result: list[Any], shown: Observation) -> None:
    tools = tools_of(served("answers"))
    try:
        assert tools["answers"].called({"content": result}) == shown
        assert tools["answers"].called({"structuredContent": {"x": "é"}}).text == '{"x": "é"}'
        for bad in (
            {"type": "image"},
            {"type": "resource"},
            {},
            "text",
            {"type": "resource", "resource": {"uri": "x"}},
        ):
            with pytest.raises(ToolError, match="a malformed part of a result"):
                tools["answers"].called({"content": [bad]})
    finally:
        tools["answers"].close()


def test_a_server_has_no_secrets_of_its_user_but_those_that_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET", "https_proxy", "LC_ALL"):
        monkeypatch.setenv(name, "x")
    tools = tools_of(served("environment", inherit=["AWS_SECRET"]))
    try:
        names = tools["environment"].called({}).text.split()
    finally:
        tools["environment"].close()
    assert {"WORD", "PATH", "AWS_SECRET", "https_proxy", "LC_ALL"} <= set(names)
    assert not {"HF_TOKEN", "OPENAI_API_KEY"} & set(names)
    with pytest.raises(ConfigError, match="inherit: found 'HF_TOKEN', allowed: a list of names"):
        tools_of(served("environment", inherit="HF_TOKEN"))
