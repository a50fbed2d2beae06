"""Commands that look at a run directory which somebody else has made to harm its reader."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import socket
import sys
import time
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.algorithms import UnavailableAlgorithm, algorithm_record
from relax_hpc.base.errors import EXIT_CONFIG, ConfigError
from relax_hpc.base.foreign_files import (
    ForeignFileError,
    open_in_run,
    read_json,
    read_json_object,
    unpack_gzip,
)
from relax_hpc.base.log_rotation import read_all_lines
from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.plugins import refuse_imports
from relax_hpc.base.rundir import RunDir, read_map, write_json
from relax_hpc.commands.program import main
from relax_hpc.config import Config, dump, load_resolved
from relax_hpc.net.rendezvous.roster import GroupCard, claim_incarnation, publish_card
from relax_hpc.queue.controller import eventlog
from relax_hpc.queue.plan import Plan
from relax_hpc.rollout import sample_log
from relax_hpc.rollout.sample_log import read_samples
from tests.effort import effort
from tests.helpers.queue_helpers import make_run

COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("report",),
    ("logs",),
    ("samples", "--limit", "0", "--dropped"),
    ("queue", "audit"),
    ("list",),
)
SAMPLE = {
    "id": "000000000.00.00",
    "step": 0,
    "reward": 1.0,
    "time": 0.0,
    "finish_reason": "stop",
    "prompt": "2?",
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path / "run")
    dump(Config(), run.config)
    return run


def printed(run: RunDir, *command: str) -> tuple[int, str, str]:
    """Exit code of a command about ``run``, and the texts that it printed to both streams."""
    folder = run.root.parent if command[0] == "list" else run.root
    verbs = 2 if command[0] == "queue" else 1
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*command[:verbs], str(folder), *command[verbs:]])
    return code, out.getvalue(), err.getvalue()


def json_line(**values: Any) -> str:
    return json.dumps(values) + "\n"


def write_texts(run: RunDir, text: str) -> None:
    """Have ``text`` wherever a run directory may have one that commands print."""
    logs, rendezvous = run.logs("actor", 1), run.rendezvous("actor")
    for folder in (logs, rendezvous, run.submit / "jobs", run.samples):
        folder.mkdir(parents=True, exist_ok=True)
    run.stop.write_text(json_line(code=93, reason=text))
    (rendezvous / "inc-000001.claim").touch()
    card = {
        "group": "actor",
        "incarnation": 1,
        "ranks": [{"node": text}],
        "endpoint": text,
        "protocol": 1,
    }
    (rendezvous / "inc-000001.json").write_text(json_line(**card))
    beat = {
        "time": time.time(),
        "incarnation": 1,
        "gap_s": 0,
        "busy_s": 0,
        "progress": 0,
        "doing": text,
        "doing_s": 1,
    }
    (rendezvous / "beat-a.json").write_text(json_line(**beat))
    (logs / "exit-actor.json").write_text(json_line(status=text, code=93, reason=text))
    (logs / "actor.log").write_bytes(f"{text}\n".encode(errors="surrogatepass"))
    (run.root / "supervisor.log").write_bytes(f"{text}\n".encode(errors="surrogatepass"))
    (run.root / "logs" / "preparing.json").write_text(json_line(doing=text, since=0.0))
    line = {
        "step": 0,
        "incarnation": 1,
        "time": 1.0,
        "reward/mean": 1.0,
        f"queue/dropped_{text}": 1,
        text: text,
    }
    run.metrics.write_text(
        json_line(**line) + json_line(**{**line, "step": 1, f"queue/bad_prompt_{text}": 2})
    )
    (run.submit / "nodes.jsonl").write_text(
        2 * json_line(time=time.time(), node=text, kind="death")
    )
    sample = {
        **SAMPLE,
        "response": text,
        "answer": text,
        "components": {text: 1.0},
        "versions": [text],
    }
    kept = json_line(**sample) + json_line(**sample, eval=text)
    (run.samples / "rollout-inc-000001-rank-0.jsonl.gz").write_bytes(gzip.compress(kept.encode()))
    clock = {"boot": text, "wall": 1.0, "monotonic": 0.0, "role": "actor"}
    span = {
        "role": "actor",
        "what": text,
        "step": 0,
        "start": 0.0,
        "end": 1.0,
        "peer": text,
        "reason": text,
    }
    (logs / "spans-actor-0.jsonl").write_text(json_line(**clock) + json_line(**span))
    run.events.write_bytes(f"{text}\n".encode(errors="surrogatepass"))


@settings(max_examples=effort(3, 100))
@given(text=st.text(st.characters(exclude_characters="\n"), max_size=8))
def test_no_command_prints_a_character_that_a_terminal_obeys(
    tmp_path_factory: pytest.TempPathFactory, text: str
):
    run = make_run(tmp_path_factory.mktemp("texts") / "run")
    dump(Config(), run.config)
    write_texts(run, f"\x1b]0;title\x07\x1b[2J{text}\u202e\x9b31m\x7f")
    for command in COMMANDS:
        _, *streams = printed(run, *command)
        for printed_text in streams:
            obeyed = {
                c
                for c in printed_text
                if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"
            }
            assert obeyed <= {"\u200c", "\u200d"}, (command, printed_text)


def test_a_newline_in_a_text_begins_no_line_of_a_command(run: RunDir) -> None:
    write_texts(run, "text\nforged: line")
    for command in COMMANDS:
        lines = "".join(printed(run, *command)[1:]).split("\n")
        # Each line of a log has the name of its file before it.
        assert not [line for line in lines if line.startswith("forged")], command


def leave_pipe(path: Path) -> None:
    os.mkfifo(path)


def leave_socket(path: Path) -> None:
    former = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(former)


def leave_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def leave_folder(path: Path) -> None:
    path.mkdir()


def leave_link(path: Path) -> None:
    root = next(folder for folder in path.parents if (folder / "token").exists())
    private = root.parent / "private"
    private.write_text('{"code": 7, "reason": "PRIVATE"}\n')
    path.symlink_to(private)


KINDS = leave_pipe, leave_socket, leave_device, leave_folder, leave_link


@pytest.mark.parametrize("leave", KINDS)
def test_only_regular_files_of_a_run_are_opened(run: RunDir, leave: Any) -> None:
    leave(run.stop)
    with pytest.raises(ForeignFileError):
        open_in_run(run.stop)
    assert read_map(run.stop, code=int) == {}
    leave(run.metrics)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: a "):
        read_metrics(run.root)
    leave(run.root / "x.log")
    with contextlib.suppress(ForeignFileError):
        assert list(read_all_lines(run.root / "x.log")) == []


@pytest.mark.parametrize("leave", KINDS)
@pytest.mark.timeout(60)
def test_commands_end_in_a_line_whatever_lies_in_the_place_of_files(
    run: RunDir, leave: Any
) -> None:
    """The text of a file that a link leads to is not printed."""
    write_texts(run, "text")
    for path in [
        path
        for path in run.root.rglob("*")
        if path.is_file() and path.name not in ("config.yaml", "token")
    ]:
        path.unlink()
        leave(path)
    for command in COMMANDS:
        _, out, err = printed(run, *command)
        assert "PRIVATE" not in out + err


def test_a_configuration_that_is_no_file_is_refused(run: RunDir) -> None:
    for leave in KINDS:
        if leave is leave_folder:
            continue
        run.config.unlink()
        leave(run.config)
        for command in COMMANDS[:-1]:
            code, _, err = printed(run, *command)
            assert code == EXIT_CONFIG and len(err.splitlines()) == 1, (command, err)


def test_a_run_is_reached_through_a_link_and_links_inside_of_it_are_followed(run: RunDir) -> None:
    (run.root / "elsewhere").mkdir()
    (run.root / "elsewhere" / "stop").write_text('{"code": 93, "reason": "enough"}')
    run.stop.symlink_to("elsewhere/stop")
    link = run.root.parent / "link"
    link.symlink_to(run.root)
    assert read_map(RunDir(link).stop, code=int)["reason"] == "enough"
    code, out, _ = printed(RunDir(link), "status")
    assert code == 93 and "enough" in out


@pytest.mark.parametrize(
    "endpoint", ["tcp://[::1", "tcp://a..b:80", "tcp://127.0.0.1:99999", "\x1b:x", ""]
)
def test_an_address_of_the_hub_that_is_none_ends_no_command(run: RunDir, endpoint: str) -> None:
    claim_incarnation(run, "hub")
    publish_card(run, GroupCard("hub", 1, [], endpoint))
    code, out, err = printed(run, "queue", "audit")
    assert code == 0 and "nothing is wrong" in out and not err


CHANGES = (
    ("stop", "--now"),
    ("resubmit", "--group", "rollout"),
    ("scale", "--replicas", "2"),
    ("scale", "--without", "1"),
    ("resume",),
)


@pytest.mark.parametrize("command", CHANGES, ids=" ".join)
def test_commands_that_change_a_run_refuse_another_users(
    run: RunDir, imported: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Its files name modules that would be imported, and jobs that would be ended, with the rights
    of the caller."""
    run.config.write_text(
        json.dumps({"run_dir": str(run.root), "algorithm": {"name": "evil:Evil"}})
    )
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    code, _, err = printed(run, *command)
    assert (
        code == EXIT_CONFIG and f"{run.root} belongs to user" in err and len(err.splitlines()) == 1
    )
    assert not imported.exists() and not run.stop.exists()


def bomb(size: int, text: bytes = b" ") -> bytes:
    packer = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16)
    pieces = [packer.compress(text * 2**20) for _ in range(size >> 20)]
    return b"".join([*pieces, packer.flush()])


def test_samples_that_unpack_to_too_much_are_left_out_and_said(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "_MAX_MEMBER_BYTES", 4 << 20)
    run.samples.mkdir()
    whole = gzip.compress(json_line(**SAMPLE, response="kept").encode())
    (run.samples / "rollout-inc-000001-rank-0.jsonl.gz").write_bytes(whole + bomb(64 << 20) + whole)
    (run.samples / "rollout-inc-000002-rank-0.jsonl.gz").write_bytes(whole)
    lines = list[str]()
    assert [sample["response"] for sample in read_samples(run.samples, lines.append)] == [
        "kept",
        "kept",
    ]
    assert len(lines) == 1 and "unpacks to more than 4194304 bytes" in lines[0]
    code, out, err = printed(run, "samples", "--dropped")
    assert code == 0 and out.count("kept") == 2 and err.count("unpacks to more than") == 1


def test_events_that_unpack_to_too_much_end_an_audit_in_a_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eventlog, "_MOST_PART_BYTES", 4 << 20)
    run.events.write_bytes(b"")
    (run.root / "events.jsonl.000001.gz").write_bytes(bomb(64 << 20, b"{}\n"))
    code, _, err = printed(run, "queue", "audit")
    assert code and err.count("\n") == 1 and "unpacks to more than 4194304 bytes" in err


@given(
    members=st.lists(st.binary(max_size=3000).map(lambda data: 40 * data), min_size=1, max_size=3),
    limit=st.integers(1, 200_000),
)
def test_what_is_unpacked_is_what_gzip_unpacks_up_to_a_bound(
    members: list[bytes], limit: int
) -> None:
    content, packed = b"".join(members), b"".join(map(gzip.compress, members))
    if len(content) <= limit:
        assert unpack_gzip(packed, Path("x"), limit) == content
    else:
        with pytest.raises(ForeignFileError, match="unpacks to more"):
            unpack_gzip(packed, Path("x"), limit)
    with pytest.raises((EOFError, zlib.error, ForeignFileError)):
        unpack_gzip(packed[:-1], Path("x"), limit)


@pytest.mark.parametrize("depth", [101, 100_000])
def test_json_that_is_nested_too_deep_is_refused_by_value(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" * depth + "]" * depth)
    with pytest.raises(ValueError, match="nested"):
        read_json(path)
    path.write_text("[" * 100 + "]" * 100)
    assert read_json(path)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "found no a.json in .*; copy it again"),
        ("[]", "a.json: found list, expected a JSON object; copy it again"),
        ("{", "a.json: not JSON: .*; copy it again"),
        (
            '{"a": {"b": 1, "b": 2}}',
            "a.json: not JSON: found 'b' twice in one object, allowed: once; copy it again",
        ),
        (
            '{"a": "' + "x" * 100 + '"}',
            "a.json: cannot be read: more than 100 bytes.*; copy it again",
        ),
    ],
    ids=["missing", "list", "broken", "repeated", "large"],
)
def test_a_json_file_without_an_object_is_named_with_the_fix(
    tmp_path: Path, content: str | None, error: str
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=error):
        read_json_object(path, "copy it again", most_bytes=100)
    if content is None:
        assert read_json_object(path, is_optional=True) == {}


RECORDS = [
    b"\xc1",
    b"\x93\x01\x02\x03",
    b"\x81\xa2op\x01",
    b"\x81\xa1x\x01",
    b"\xdd\xff\xff\xff\xff",
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_journal_that_no_controller_has_written_ends_commands_in_a_line(
    run: RunDir, record: bytes
) -> None:
    from relax_hpc.queue.controller.journal import _frame

    (run.journal / "inc-000001.journal").write_bytes(_frame(record))
    code, _, err = printed(run, "queue", "audit")
    assert code == EXIT_CONFIG and len(err.splitlines()) == 1, err
    assert str(run.journal) in err


MODULE = """
from pathlib import Path
Path({mark!r}).touch()
from relax_hpc.algorithms import Grpo as Evil
def make(*_): raise SystemExit
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """File that is there once the module `evil` was imported."""
    mark = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(MODULE.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield mark
    sys.modules.pop("evil", None)


NAMING = [
    {"algorithm": {"name": "evil:Evil"}},
    {"rollout": {"engine": {"kind": "evil:make"}, "reward": "evil:make"}},
]


@pytest.mark.parametrize("settings", NAMING)
def test_commands_that_read_a_run_import_no_module_that_it_names(
    run: RunDir, imported: Path, settings: Any
) -> None:
    run.config.write_text(json.dumps({"run_dir": str(run.root), **settings}))
    write_texts(run, "text")
    for command in COMMANDS:
        printed(run, *command)
    printed(run, "plot", "--output", str(run.root / "plot.png"))
    assert not imported.exists()
    if "algorithm" in settings:
        load_resolved(run.root)
        assert imported.exists()


STEPWISE = """
from dataclasses import dataclass
from relax_hpc.algorithms import Grpo
@dataclass(kw_only=True)
class Stepwise(Grpo):
    window = "step"
    gives = ("advantages", "returns")
    needs = ("reward", "values")
"""


def test_the_queue_knows_an_algorithm_that_is_not_imported(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What became of rows follows from the fields that it needs and gives."""
    (tmp_path / "stepwise.py").write_text(STEPWISE)
    monkeypatch.syspath_prepend(str(tmp_path))
    algorithm = {"name": "stepwise:Stepwise", "whiten": True}
    run.config.write_text(json.dumps({"run_dir": str(run.root), "algorithm": algorithm}))
    config = load_resolved(run.root)
    write_json(run.algorithm, algorithm_record(config.algorithm))
    with refuse_imports():
        looked_at = load_resolved(run.root)
    assert isinstance(looked_at.algorithm, UnavailableAlgorithm)
    assert Plan.from_config(looked_at) == Plan.from_config(config)
    assert Plan.from_config(config).tasks["advantages"].whole_step
    run.algorithm.write_text(json.dumps({**algorithm_record(config.algorithm), "gives": [3]}))
    with refuse_imports():
        assert load_resolved(run.root).algorithm.gives == ("advantages",)


ODD_VALUES = ("text", None, True, [], {}, 1e999, -1e999, 10**400, 2**70, -1)


@pytest.mark.parametrize("odd", ODD_VALUES, ids=[str(value)[:12] for value in ODD_VALUES])
def test_metrics_with_odd_values_end_no_command(run: RunDir, odd: Any) -> None:
    line = {"step": 0, "incarnation": 1, "time": 1.0, "reward/mean": 1.0, "perf/step_s": 1.0}
    tags = (
        "queue/dropped_x",
        "queue/bad_prompt_x",
        "reward/mean",
        "perf/rollout_tokens_per_s",
        "idle/actor",
    )
    texts = [
        {**line, **dict.fromkeys(tags, odd)},
        *({**line, name: odd} for name in ("step", "incarnation", "time")),
    ]
    run.metrics.write_text("".join(json_line(**text) for text in texts))
    plot = ("plot", "--output", f"{run.root}/a.png")
    for command in (("status",), ("status", "--json"), ("report",), ("list",), plot):
        code, _, err = printed(run, *command)
        assert "Traceback" not in err and code in (0, 75, 78), (command, err)
