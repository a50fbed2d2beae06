"""Tool calls in the text of a response: calls, malformed calls, and calls in reasoning."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.environments.base import Response
from relax_hpc.environments.tool_calls import ToolCall, ToolError, calls_of, read_turn
from relax_hpc.environments.with_tools import WithTools
from tests.environments.tool_helpers import call_text


@given(
    st.text(),
    st.dictionaries(st.text(), st.none() | st.integers() | st.lists(st.text()), max_size=3),
)
def test_a_written_call_is_read_back(name: str, arguments: dict) -> None:
    written = f"thinking {call_text(name, x=arguments)} and {call_text('again')}"
    if "</tool_call>" not in json.dumps([name, arguments]):
        assert calls_of(written) == [ToolCall(name, {"x": arguments}), ToolCall("again", {})]


@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name":', '"a"', "{", "}", ",", "[", "1e999", "x"]
        )
    )
)
def test_malformed_calls_become_errors(pieces: list[str]) -> None:
    text = "".join(pieces)
    calls = calls_of(text)
    assert bool(calls) == ("<tool_call>" in text or "</tool_call>" in text)
    assert all(isinstance(entry, ToolError | ToolCall) for entry in calls)


@pytest.mark.parametrize(
    ("body", "expected"),
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
def test_the_error_of_a_malformed_call_shows_the_format(body: str, expected: str) -> None:
    [error] = calls_of(f"<tool_call>{body}</tool_call>")
    assert isinstance(error, ToolError) and expected in str(error)
    assert '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>' in str(error)


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "in_thought", "calls", "message"),
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
def test_calls_in_reasoning_are_ignored(
    text: str, in_thought: bool, calls: int, message: str
) -> None:
    turn = read_turn(text, in_thought)
    assert (len(turn.calls), turn.spoken) == (calls, message)
    assert text[turn.first_call :].startswith(
        "<tool_call>" if calls and isinstance(turn.calls[0], ToolCall) else ""
    )
    step = WithTools({"calculator": {}}).step(Response(text, "stop", 0, in_thought))
    assert step.done == (not calls) and len(step.observations) == calls


REASONING = st.text("<>/ab tool_callthink", max_size=30).map(
    lambda text: text.replace("</think>", "")
)


@given(REASONING, st.lists(st.sampled_from([CALL, "<tool_call>", "</tool_call>", "a"]), max_size=4))
def test_no_text_in_reasoning_is_a_call(reasoning: str, pieces: list[str]) -> None:
    all_reasoning = reasoning + "".join(pieces)
    assert (
        read_turn(f"<think>{all_reasoning}").calls
        == read_turn(all_reasoning, in_thought=True).calls
        == []
    )
    assert read_turn(f"<think>{all_reasoning}</think>{CALL}").calls == calls_of(CALL)
    assert read_turn(f"<think>{all_reasoning}</think>4").spoken == "4"


def test_surrogates_in_a_call_are_replaced_and_infinity_is_refused() -> None:
    [tool_call] = calls_of('<tool_call>{"name": "a", "arguments": {"x": ["\\ud83d"]}}</tool_call>')
    assert tool_call == ToolCall("a", {"x": ["\ufffd"]})
    [error] = calls_of('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>')
    assert isinstance(error, ToolError) and "found 1e999" in str(error)
