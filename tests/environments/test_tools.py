"""Tools in this process that the policy calls: their answers, and errors for wrong calls."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from relax_hpc.base.errors import ConfigError
from relax_hpc.environments.base import Beginning, MediaPart, Observation, Step
from relax_hpc.environments.tool_calls import ToolError
from relax_hpc.environments.tools import corpus, pictures, tools_of
from relax_hpc.environments.tools.calculator import value_of
from relax_hpc.environments.tools.corpus import Corpus, write_corpus
from relax_hpc.environments.tools.pictures import box_of
from relax_hpc.environments.with_tools import WithTools
from relax_hpc.environments.zoom import ZoomIn
from tests.environments.tool_helpers import call_text, response_of, texts
from tests.helpers.media_files import encoded, picture

TOOLS = {"calculator": {}, "python": {"timeout_s": 20.0, "processes": 4}}


# -- the environment -------------------------------------------------------------------------------


def test_each_call_is_answered_and_a_turn_without_calls_ends_the_episode() -> None:
    environment = WithTools(TOOLS, most_calls=3)
    text = (
        call_text("calculator", expression="6*7")
        + call_text("calculators", expression="1")
        + "<tool_call>{}"
    )
    step = environment.step(response_of(text))
    assert [observation.role for observation in step.observations] == ["tool"] * 3 and not step.done
    assert texts(step)[:2] == [
        "42",
        "Error: there is no tool 'calculators'; allowed: calculator, python",
    ]
    assert texts(step)[2].startswith(
        "Error: found <tool_call> without </tool_call>; a call is written"
    )
    assert step.info == {"calls": ["calculator", "calculators"], "failed": 2}
    too_many_calls = environment.step(response_of(call_text("calculator", expression="1") * 4))
    assert texts(too_many_calls) == ["Error: found 4 calls in a turn, allowed 3"]
    assert too_many_calls.info == {"calls": ["calculator", "calculators"], "failed": 3}, (
        "counts are over the whole episode"
    )
    assert environment.step(response_of("42")) == Step(done=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "needs the argument expression"),
        ({"expression": 1}, "found '1', allowed: string"),
        ({"expression": "1", "x": 2}, "calculator has no argument x; it has: expression"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict, expected: str) -> None:
    [answer] = texts(WithTools(TOOLS).step(response_of(call_text("calculator", **arguments))))
    assert answer.startswith("Error: ") and expected in answer


def test_signatures_for_the_template_describe_arguments() -> None:
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
def test_wrong_tool_settings_fail_at_creation(tools: Any, error: str) -> None:
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
def test_the_calculator_computes_the_same_as_python(expression: str) -> None:
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="has no value"):
            value_of(expression)
    else:
        assert value_of(expression) == expected


@given(st.text(alphabet="0123456789.e+-*/%() ,jπrounmax<>=[]'\"_:", max_size=60))
def test_the_calculator_returns_a_number_or_an_error(text: str) -> None:
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
def test_the_calculator_refuses_expressions_without_value(expression: str) -> None:
    with pytest.raises(ToolError):
        value_of(expression)


# -- programs --------------------------------------------------------------------------------------


def test_programs_run_concurrently_and_isolated() -> None:
    python = tools_of(TOOLS)["python"]
    programs = [
        "print(6 * 7)",
        "x = 1\nprint(y)",
        "print('a' * 10000)",
        "pass",
        # The largest number of processes. The processes that start a program do not count, for any
        # user.
        "import subprocess as s; [s.Popen(['sleep', '2']) for _ in range(3)]; print('all')",
        "import subprocess as s; [s.Popen(['sleep', '2']) for _ in range(4)]",
    ]
    with ThreadPoolExecutor(len(programs)) as threads:
        outputs = list(threads.map(lambda program: python.called({"code": program}), programs))
    assert outputs[0] == "42" and outputs[3] == "(it printed nothing)" and outputs[4] == "all"
    assert "BlockingIOError" in outputs[5]
    assert outputs[1].endswith("NameError: name 'y' is not defined\n(exit code 1)")
    assert len(outputs[2]) < 4100 and "6000 characters left out" in outputs[2]


def test_the_error_of_a_timeout_shows_the_output() -> None:
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


def test_a_corpus_is_built_from_rows_and_searched(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = library / "corpus.sqlite"
    monkeypatch.setattr("sys.argv", ["corpus", str(library / "rows.jsonl"), str(file)])
    corpus.main()
    printed = capsys.readouterr()
    assert printed.out == f"{file}: 3 documents\n"
    assert (
        "rows.jsonl:4: left out: broken_json" in printed.err
        and "rows.jsonl:5: left out: it has no text" in printed.err
    )

    search = tools_of({"search": {"corpus": str(file), "results": 2}})["search"]
    content_before = file.read_bytes()
    queries = ["tower"] * 8 + ["colosseum", '"(* NEAR!']
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda query: search.called({"query": query}), queries))
    assert (
        results[:8]
        == ["A tower of cards; other towers.\n\nParis\nThe capital of France, of towers."] * 8
    )
    assert (
        results[8].startswith("Rome\n")
        and "stands the Colosseum" in results[8]
        and len(results[8]) < 700
    )
    assert results[9] == "No text has any of these words."
    assert file.read_bytes() == content_before
    assert sorted(path.name for path in library.iterdir()) == [file.name, "rows.jsonl"]


def test_a_long_search_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "corpus.sqlite"
    write_corpus(file, (("", f"word {number}") for number in range(2000)))
    monkeypatch.setattr(corpus, "_STEPS", 100)
    with pytest.raises(TimeoutError):
        Corpus(file).search("word", 3, limit_s=-1.0)


# -- pictures --------------------------------------------------------------------------------------


def shown_pixels(observation: Observation) -> np.ndarray:
    [medium] = observation.media
    assert isinstance(medium.source, bytes)
    return np.asarray(Image.open(io.BytesIO(medium.source)))


def test_image_tools_have_signatures_before_reset() -> None:
    names = [signature["function"]["name"] for signature in ZoomIn({"calculator": None}).signatures]
    assert names == ["calculator", "image_zoom_in_tool", "image_rotate_tool"]


def zoom_environment(*sources: Any, **options: Any) -> ZoomIn:
    environment = ZoomIn(**options)
    media = tuple(MediaPart("image", source) for source in sources)
    environment.reset(Beginning("describe it", "", {}, (MediaPart("video", b""), *media)))
    return environment


@pytest.fixture
def pixels() -> np.ndarray:
    return np.asarray(picture(60, 100))


def test_zoom_and_rotation_keep_pixels(pixels: np.ndarray, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(encoded(picture(60, 100)))
    environment = zoom_environment(encoded(picture(40, 40)), file, least_side=4)
    step = environment.step(
        response_of(
            call_text("image_zoom_in_tool", bbox_2d=[10, 20, 30.0, 59.6], label="it", img_idx=1)
        )
    )
    assert np.array_equal(shown_pixels(step.observations[0]), pixels[20:60, 10:30])
    step = environment.step(response_of(call_text("image_rotate_tool", angle=90, img_idx=1)))
    assert np.array_equal(shown_pixels(step.observations[0]), np.rot90(pixels))


def test_boxes_in_thousandths_are_scaled(pixels: np.ndarray) -> None:
    environment = zoom_environment(encoded(picture(60, 100)), unit="thousandths", least_side=1)
    [observation] = environment.step(
        response_of(call_text("image_zoom_in_tool", bbox_2d=[500, 0, 1000, 500]))
    ).observations
    assert np.array_equal(shown_pixels(observation), pixels[:30, 50:])


def test_a_shown_image_is_reduced_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_PIXELS", 20_000)
    environment = zoom_environment(encoded(picture(200, 400)))
    [observation] = environment.step(
        response_of(call_text("image_zoom_in_tool", bbox_2d=[0, 0, 400, 200]))
    ).observations
    assert shown_pixels(observation).shape == (100, 200, 3)


@given(
    st.tuples(*[st.floats(-50, 1000)] * 4),
    st.tuples(st.integers(1, 500), st.integers(1, 500)),
    st.integers(1, 64),
)
def test_a_box_is_inside_the_image_and_has_the_least_side(
    requested: tuple, size: tuple[int, int], least_side: int
) -> None:
    try:
        box_left, box_top, box_right, box_bottom = box_of(requested, (1.0, 1.0), size, least_side)
    except ToolError:
        return
    assert 0 <= box_left < box_right <= size[0] and 0 <= box_top < box_bottom <= size[1]
    assert box_right - box_left >= min(least_side, size[0]) and box_bottom - box_top >= min(
        least_side, size[1]
    )
    for axis, (box_start, box_end) in enumerate([(box_left, box_right), (box_top, box_bottom)]):
        requested_inside = [min(max(0.0, requested[axis + end]), size[axis]) for end in (0, 2)]
        assert box_start <= requested_inside[0] + 1 and box_end >= requested_inside[1] - 1


@pytest.mark.parametrize(
    ("wrong_call", "expected"),
    [
        (call_text("image_zoom_in_tool", bbox_2d=[50, 0, 10, 20]), "left < right"),
        (call_text("image_zoom_in_tool", bbox_2d=[200, 200, 300, 300]), "left < right"),
        (call_text("image_zoom_in_tool", bbox_2d=[1, 2, 3]), "allowed: a list of 4 numbers"),
        (
            call_text("image_zoom_in_tool", bbox_2d=[1, 2, 3, 10**400]),
            "allowed: a list of 4 numbers",
        ),
        (call_text("image_rotate_tool", angle=10**400), "allowed: number"),
        (call_text("image_rotate_tool", angle=True), "allowed: number"),
        (call_text("image_rotate_tool", angle=1, img_idx=1), "the prompt has 1 pictures"),
    ],
)
def test_wrong_arguments_of_image_tools_are_errors(wrong_call: str, expected: str) -> None:
    [answer] = texts(zoom_environment(encoded(picture(60, 100))).step(response_of(wrong_call)))
    assert answer.startswith("Error: argument ") and expected in answer


@pytest.mark.parametrize(
    "options", [{"unit": "inches"}, {"least_side": 0}, {"limits": {"pixel": 1}}]
)
def test_wrong_options_of_image_tools_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=f"environment.options.{next(iter(options))}: found"):
        ZoomIn(**options)
