"""`relax-hpc samples` as a user calls it: what was accepted, what was not, safe on a terminal and
in a browser."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import escape_controls, wrap_text
from relax_hpc.base.versions import Version
from relax_hpc.commands.program import main
from relax_hpc.config import dump
from relax_hpc.config.schema import SamplesConfig
from relax_hpc.ops.observe.sample_page import render_page
from relax_hpc.rollout.sample_log import SampleLog
from tests.helpers.browser import seen
from tests.helpers.queue_helpers import Roles, in_thread, make_run, rows_of, small

EVIL = (
    "</script><script>document.title='evil'</script><img src=x "
    "onerror=\"document.title='evil'\"><!--\u2028\x1b]0;evil\x07\x1b[31m"
)
"""A text that would run in a page, and be obeyed by a terminal."""


def sample(name: str, step: int, reward: float, **more: Any) -> dict[str, Any]:
    texts = {"prompt": "4312?", "response": "1234", "finish_reason": "stop"}
    return {
        "id": name,
        "step": step,
        "reward": reward,
        "time": float(step),
        "tokens": 5,
        **texts,
        **more,
    }


def put(roles: Roles, log: SampleLog, version: Version, reward: float) -> dict[int, str]:
    """A step's prompt groups, the first of which is kept; why tickets were refused."""
    rollout, tickets = roles["rollout"], roles.admit(version)
    name = rollout.next_shard()
    refused = rollout.put_generated(rows_of(tickets, version), name=name)
    texts = {
        "prompt": "4312?",
        "response": f"{EVIL} {reward}",
        "components": {"exact": reward},
        "versions": [str(version)],
    }
    log.keep(
        [
            sample(f"{tickets[0]:09d}.0{k}", tickets[0] // 2, reward + k, shard=name, **texts)
            for k in (0, 1)
        ]
    )
    rollout.settle()
    return refused


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 0 is trained; step 1 was generated twice, as the actor came back at step 0 in between;
    what is said to have been put in a shard that nobody knows was never accepted. And an
    evaluation."""
    run, config = make_run(tmp_path_factory.mktemp("samples") / "run"), small()
    config.queue.memory_bytes = 0
    dump(config, run.config)
    log = SampleLog(run.samples / "rollout-inc-000001-rank-0.jsonl.gz", SamplesConfig(), steps=4)
    with in_thread(run, config), Roles(run, config) as roles:
        roles.start()
        put(roles, log, Version(1, 0), 0.0)
        roles.learn(Version(1, 0))
        roles.train(0)
        put(roles, log, Version(1, 1), 5.0)
        with Roles(run, config, incarnation=2) as again:
            # What was drawn by version 1 of the first actor is rolled back, what was by version 0
            # is trained again.
            again.start(step=0)
            again.train(0)
            put(again, log, Version(2, 1), -2.0)
    log.keep(
        [sample("000000003.00.00", 1, 9.0, shard="rollout-000001-9.h5", finish_reason="length")],
        step=1,
    )
    log.keep(
        [sample(f"q{k}", 4, float(k), eval="heldout", finish_reason="length") for k in range(30)]
    )
    log.close()
    with (run.samples / "rollout-inc-000002-rank-0.jsonl.gz").open("wb") as file:
        file.write((run.samples / "rollout-inc-000001-rank-0.jsonl.gz").read_bytes()[:50])
    return run.root


def shown(made: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["samples", str(made), "--json", *words]) == EXIT_DONE
    return json.loads(capsys.readouterr().out)


def test_what_the_journal_did_not_accept_is_left_out(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shown(made, capsys)
    assert [(one["step"], one["reward"], one["fate"]) for one in found["samples"]] == [
        (1, -2.0, "accepted"),
        (1, -1.0, "accepted"),
        (0, 0.0, "trained i000002-v000000"),
        (0, 1.0, "trained i000002-v000000"),
    ]
    assert (
        found["hidden"] == {"dropped rolled_back": 2, "never accepted": 1}
        and found["matching"] == 4
    )
    marked = shown(made, capsys, "--dropped", "--best", "--limit", "3")
    assert [(one["reward"], one["fate"]) for one in marked["samples"]] == [
        (9.0, "never accepted"),
        (6.0, "dropped rolled_back"),
        (5.0, "dropped rolled_back"),
    ]
    assert marked["hidden"] == {} and marked["matching"] == 7


def test_a_sample_is_of_the_step_that_it_was_trained_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ticket 0 is slow: what was admitted for step 1 takes its place in step 0."""
    run, config = make_run(tmp_path / "run"), small(staleness=1)
    dump(config, run.config)
    log, drawn = (
        SampleLog(run.samples / "rollout-inc-000001-rank-0.jsonl.gz", SamplesConfig(), steps=4),
        Version(1, 0),
    )
    with in_thread(run, config), Roles(run, config) as roles:
        roles.start()
        tickets = roles.admit(drawn, count=4)
        rollout = roles["rollout"]
        shard = rollout.next_shard()
        assert rollout.put_generated(rows_of(tickets[1:3], drawn), name=shard) == {}
        rollout.settle()
        log.keep(
            [
                sample(f"{ticket:09d}.00", ticket // 2, ticket, shard=shard)
                for ticket in tickets[1:3]
            ]
        )
        log.close()
        assert {one["reward"]: one["step"] for one in shown(run.root, capsys)["samples"]} == {
            1: 0,
            2: 1,
        }
        for _ in range(2):
            # A window of middle roles ends where a step of tickets does.
            roles.learn(drawn)
        roles.train(0)
        assert [
            one["reward"] for one in shown(run.root, capsys, "--step", "0", "--best")["samples"]
        ] == [2, 1]
    assert shown(run.root, capsys, "--step", "1")["samples"] == []


def test_samples_are_chosen(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {one["step"] for one in shown(made, capsys, "--step", "0")["samples"]} == {0}
    assert shown(made, capsys, "--worst", "--limit", "1")["samples"][0]["reward"] == -2.0
    held_out = shown(made, capsys, "--eval", "heldout", "--best", "--reason", "length")
    assert [one["reward"] for one in held_out["samples"]] == [float(k) for k in range(29, 19, -1)]
    assert held_out["matching"] == 30 and held_out["samples"][0]["fate"] == "evaluated"
    assert shown(made, capsys, "--eval", "heldout", "--limit", "0", "--step", "4")["matching"] == 30
    assert shown(made, capsys, "--reason", "abort")["samples"] == []
    assert main(["samples", str(made), "--reason", "abort"]) == EXIT_DONE
    assert "no kept episode matches" in capsys.readouterr().err
    for words, text in (
        (["--eval", "held"], "--eval: found 'held', allowed: heldout"),
        (["--best", "--worst"], "--worst: found together with --best"),
        (["--limit", "-1"], "--limit: found -1"),
        (["--json", "--html", "x"], "--html: found together with --json"),
        (
            ["--html", f"{made}/no/such.html"],
            "No such file or directory; name a file in a folder of yours",
        ),
    ):
        assert main(["samples", str(made), *words]) == EXIT_CONFIG
        assert text in capsys.readouterr().err
    assert main(["samples", str(made.parent)]) == EXIT_CONFIG
    assert "no run here" in capsys.readouterr().err


def test_a_damaged_journal_hides_nothing_and_is_said(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(shutil.copytree(made, tmp_path / "run"))
    journal = next(path for path in run.journal.iterdir() if path.suffix == ".journal")
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    assert main(["samples", str(run.root), "--json", "--limit", "0"]) == EXIT_DONE
    said = capsys.readouterr()
    assert {one["fate"] for one in json.loads(said.out)["samples"]} == {"unknown"}
    assert said.err.count("\n") == 1 and "the fates of samples are unknown" in said.err


def test_what_others_have_put_there_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    dump(small(), run.config)
    assert main(["samples", str(run.root)]) == EXIT_DONE and capsys.readouterr() == (
        "",
        "no kept episode matches\n",
    )
    log = SampleLog(run.samples / "x.jsonl.gz", SamplesConfig(), steps=4)
    odd: list[Any] = [
        sample("1", 1, float("nan")),
        sample("1", 1, 1.0, eval=["list"]),
        sample("1", 1, 1.0, versions=3),
        sample("1", 1, 1.0, prompt=None),
        {"id": 1},
        {},
        sample("no ticket", 1, 1.0, shard=None, components={"a": "b"}, versions=[3], time=3),
    ]
    for one in odd:
        log.keep([one], step=3)
    log.close()
    (run.samples / "y.jsonl.gz").mkdir()
    assert main(["samples", str(run.root), "--dropped"]) == EXIT_DONE
    assert capsys.readouterr().out.count("step 1") == 1


def on_terminal(words: list[str], columns: int) -> str:
    """What the command prints to a terminal of this width."""
    main_end, their_end = pty.openpty()
    command = [sys.executable, "-m", "relax_hpc", "samples", *words]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {
        "COLUMNS": str(columns)
    }
    with subprocess.Popen(command, stdout=their_end, env=environment) as process:
        os.close(their_end)
        said = b""
        # A terminal whose other end is gone gives EIO.
        while piece := _read(main_end):
            said += piece
        assert process.wait(60) == EXIT_DONE
    os.close(main_end)
    return said.decode()


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except OSError:
        return b""


def test_a_terminal_obeys_nothing_that_a_model_has_written(made: Path) -> None:
    text = on_terminal([str(made), "--limit", "1"], columns=60)
    colours = re.compile(r"\x1b\[\d+m")
    plain = colours.sub("", text)
    assert plain != text and not {"\x1b", "\x07", "\u2028"}.intersection(plain)
    assert r"\x1b]0;evil\x07\x1b[31m" in re.sub(r"\s+", "", plain)
    assert "reward -2  (exact -2)  stop  5 tokens  i000002-v000001  accepted" in plain
    body = [line for line in plain.splitlines() if line.startswith(" ")]
    assert body and all(len(line) <= 60 for line in body)


def test_lines_are_broken_by_columns() -> None:
    assert list(wrap_text("日本語のテキスト", 6)) == ["日本語", "のテキ", "スト"]
    assert list(wrap_text("a" * 7, 3)) == ["aaa", "aaa", "a"]
    assert list(wrap_text("", 3)) == [""] and list(wrap_text("a\n\nb", 9)) == ["a", "", "b"]
    assert escape_controls("\u202e\u2066\x9b\ud800\x00\r") == r"\u202e\u2066\x9b\ud800\x00\x0d"
    assert escape_controls("é日本\n\tx") == "é日本\n\tx"


class Tags(html.parser.HTMLParser):
    """What a browser would see: its elements, and what stands in each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.texts.append(data)


def test_the_page_holds_its_data_and_nothing_else_that_runs(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(made), "--html", str(tmp_path / "page.html")]) == EXIT_DONE
    assert "34 episodes" in capsys.readouterr().out
    text = (tmp_path / "page.html").read_text()
    found, plain = Tags(text), Tags(render_page({"run": "r", "left_out": ""}, []))
    assert found.tags == plain.tags, "texts of samples make no elements"
    style, data, script = (one for one in found.texts if one.strip())
    samples = json.loads(data)["samples"]
    assert len(samples) == 34 and any(one["response"].startswith(EVIL) for one in samples)
    policy = next(
        attributes["content"] for tag, attributes in found.tags if "http-equiv" in attributes
    )
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for part, content in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{part} 'sha256-{digest}'" in policy
    assert not re.search(
        r"https?:|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text.replace(data, "")
    )


def test_a_browser_shows_and_filters_the_page(made: Path, tmp_path: Path) -> None:
    assert main(["samples", str(made), "--html", str(tmp_path / "page.html")]) == EXIT_DONE
    everything = seen(tmp_path / "page.html")
    chosen = seen(tmp_path / "page.html", "set=training&reason=stop&most=-1.5&text=EVIL")
    assert "34 of 34 episodes" in everything and everything.count("<article>") == 34
    assert "1 of 34 episodes, mean reward -2" in chosen and chosen.count("<article>") == 1
    assert "<title>Samples of" in chosen and "&lt;/script&gt;&lt;script&gt;document.title" in chosen
