"""Prompts by an index: the same as all of them at once, less memory, and never another prompt than
the one indexed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.config.schema import Config, TinyModelConfig
from relax_hpc.data import prompt_file
from relax_hpc.data.prompt_file import PromptFile, open_prompts
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.rows import BadLine, count_rows, read_rows
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.effort import effort
from tests.helpers.prompt_helpers import load_prompts, read_prompts
from tests.requirements import requires

HOW = PromptRules(12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(
        directory,
        TinyModelConfig(hidden_size=8, num_layers=1, head_dim=8, intermediate_size=8),
        seed=0,
    )
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


texts = st.text("123?é\U0001f600 \t<s>", max_size=20) | st.text(max_size=4)
rows = st.fixed_dictionaries(
    {"id": st.integers(0, 5) | texts, "prompt": texts, "answer": st.sampled_from(["1", 2, None])},
    optional={
        "token_ids": st.lists(st.integers(-1, 70), max_size=14),
        "more": st.lists(texts, max_size=2),
    },
)
lines = st.one_of(
    rows.map(lambda row: json.dumps(row).encode()),
    rows.map(lambda row: json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [
            b"",
            b" \t",
            b"{",
            b"[1]",
            b"null",
            b"\xff",
            b"\r",
            b'{"id": "\\ud800"}',
            b'"' + b"x" * 70_000,
        ]
    ),
    st.binary(max_size=8).map(lambda data: data.replace(b"\n", b"").replace(b"\0", b"")),
)


@settings(max_examples=effort(100, 3000), deadline=None)
@given(
    content=st.lists(lines, max_size=12),
    end=st.sampled_from([b"\n", b"\r\n"]),
    closed=st.booleans(),
    truncate_left=st.booleans(),
)
def test_an_index_finds_what_reading_all_at_once_finds(
    content: list[bytes],
    end: bytes,
    closed: bool,
    truncate_left: bool,
    tokenizer: Tokenizer,
    folder: Path,
) -> None:
    """And with the rules of tokens and lines as they are: order, bad lines with their numbers,
    duplicates."""
    good = b'{"id": "first", "prompt": "1?", "answer": "1"}'
    path = folder / "any.jsonl"
    path.write_bytes(end.join([good, *content]) + (end if closed else b""))
    load_prompts(path, tokenizer, PromptRules(12, truncate_left=truncate_left), 1.0)


def write(path: Path, *ids: object, prompt: str = "12?") -> Path:
    path.write_text(
        "".join(json.dumps({"id": name, "prompt": prompt, "answer": "1"}) + "\n" for name in ids)
    )
    return path


def opened(
    path: Path, tokenizer: Tokenizer, how: PromptRules = HOW, share: float = 0.0
) -> PromptFile:
    return open_prompts(path, path.parent / "of.index", tokenizer, how, share)


def test_a_ticket_has_the_prompt_that_it_always_had(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Also where bad lines lie between, and whoever fetched it before."""
    path = write(tmp_path / "p.jsonl", *range(40))
    content = path.read_text().splitlines()
    content[7], content[11], content[20], content[33] = (
        "{",
        content[3],
        "",
        json.dumps({"id": "long"}),
    )
    path.write_text("\n".join(content))
    before, bad = read_prompts(path, tokenizer, HOW)
    source = PromptSource(opened(path, tokenizer, share=1.0), Config(seed=5))
    known = PromptSource(before, Config(seed=5))
    wanted = [(ticket, attempt) for ticket in range(100) for attempt in range(3)]
    source.fetch(wanted[:50])
    assert [source.prompt(*each) for each in wanted] == [known.prompt(*each) for each in wanted]
    assert [(line.line, line.reason) for line in bad] == [
        (8, "broken_json"),
        (12, "duplicate_id"),
        (34, "missing_field"),
    ]


def test_tokens_are_made_of_prompts_that_are_used(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """At the start only of those that may be too long, which are found as ever."""
    path = write(tmp_path / "p.jsonl", *range(50))
    with path.open("a") as file:
        for name, prompt in [("fits", "1" * 11), ("long", "1" * 12), ("other", "é" * 3)]:
            file.write(json.dumps({"id": name, "prompt": prompt, "answer": ""}) + "\n")
    encoded: list[str] = []
    real = tokenizer.encode
    tokenizer.encode = lambda text, **how: encoded.append(text) or real(text, **how)
    try:
        prompts = opened(path, tokenizer, share=0.5)
        assert set(encoded) - {chr(code) for code in range(128)} - {""} <= {"1" * 12, "é" * 3}
        encoded.clear()
        assert [(line.line, line.reason) for line in prompts.bad] == [(52, "over_long")]
        assert len(prompts[50].token_ids) == 12 and encoded == ["1" * 11]
    finally:
        del tokenizer.encode


def replaced(path: Path) -> None:
    other = write(path.with_name("other"), 1, 2, 3, prompt="34?")
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    other.replace(path)


def grown(path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"id": 4, "prompt": "1?", "answer": "1"}) + "\n")


@pytest.mark.parametrize(
    "change", [replaced, grown, lambda path: write(path, 1)], ids=["replaced", "grown", "cut"]
)
def test_a_file_that_was_changed_is_refused_by_name(
    change: Callable[[Path], object], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write(tmp_path / "p.jsonl", 1, 2, 3)
    assert len(opened(path, tokenizer)) == 3
    change(path)
    how = "(found [0-9]+ bytes, had [0-9]+|other bytes, as many as before)"
    text = rf"p\.jsonl: has changed since the run began \({how}\), .* or remove .*of\.index to"
    with pytest.raises(ConfigError, match=text):
        opened(path, tokenizer)
    (tmp_path / "of.index").unlink()
    assert opened(path, tokenizer)[:] == read_prompts(path, tokenizer, HOW)[0]


def test_a_file_that_was_copied_or_touched_is_the_same(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write(tmp_path / "p.jsonl", 1, 2, 3)
    opened(path, tokenizer)
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    assert len(opened(path, tokenizer)) == 3


def test_a_line_that_changes_while_a_run_reads_it_is_noticed(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Whatever the file's times say: no other prompt than the one that was indexed is ever used."""
    path = write(tmp_path / "p.jsonl", 1, 2, 3)
    times, prompts = path.stat(), opened(path, tokenizer)
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b"12?", 60))
        file.write(b"21?")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = opened(path, tokenizer)
    for each in (prompts, again):
        assert each[0].text == each[2].text == "12?"
        with pytest.raises(
            ConfigError, match=r"p\.jsonl: has changed since the run began \(line 2 is another\)"
        ):
            each[1]
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="line 3 is another"):
        prompts[2]


def test_the_index_is_made_once_and_again_for_other_files(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = write(tmp_path / "p.jsonl", 1, 2), write(tmp_path / "o.jsonl", 1, 2, 3)
    made: list[Path] = []
    build = prompt_file.build_index
    monkeypatch.setattr(
        prompt_file,
        "build_index",
        lambda files, *rest: made.append(files.lines) or build(files, *rest),
    )
    for _ in range(3):
        assert len(opened(path, tokenizer)) == 2
    assert made == [path]
    # Under other rules tickets would silently get other prompts.
    with pytest.raises(
        ConfigError, match="would become other prompts than when the run began: the chat template"
    ):
        opened(path, tokenizer, PromptRules(3, truncate_left=True))
    assert len(opened(other, tokenizer)) == 3 and made == [path, other]
    whole = (tmp_path / "of.index").read_bytes()
    for damaged in (b"", whole[:-1], b"{}\n" + whole, b"\xff" * 50):
        (tmp_path / "of.index").write_bytes(damaged)
        assert len(opened(other, tokenizer)) == 3


def test_bad_lines_are_kept_up_to_a_number_and_counted_beyond(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_file, "KEPT_BAD", 3)
    path = write(tmp_path / "p.jsonl", *"aabbccdd", prompt="1?")
    path.write_text("{\n" + path.read_text() + "{\n")
    assert [line.line for line in opened(path, tokenizer, share=0.7).bad] == [1, 3, 5]
    says = (
        r"6 of 10 lines are bad: 4 duplicate_id \(first line 3: id a\); 2 broken_json \(first "
        r"line 1"
    )
    with pytest.raises(ConfigError, match=says):
        opened(path, tokenizer, share=0.5)


# -- parquet ---------------------------------------------------------------------------------------


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    requires("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_rows_of_parquet_are_those_of_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"id": n, "prompt": f"{n}?", "answer": Decimal("1.5") if n % 2 else None, "more": [n]}
        for n in range(5)
    ]
    path = parquet(
        tmp_path / "p.parquet", [row | {"answer": str(n)} for n, row in enumerate(rows)] + [rows[0]]
    )
    prompts = opened(path, tokenizer, share=0.5)
    assert prompts[:] == read_prompts(path, tokenizer, HOW)[0]
    assert [(one.prompt_id, one.answer, one.metadata) for one in prompts[:2]] == [
        ("0", "0", {"more": [0]}),
        ("1", "1", {"more": [1]}),
    ]
    assert prompts.bad == [BadLine(6, "missing_field")] and count_rows(path) == 6
    assert len(opened(path, tokenizer, share=0.5)) == 5
    path.unlink()
    parquet(path, [rows[1] | {"answer": "1"}])
    with pytest.raises(ConfigError, match=r"p\.parquet: has changed since the run began"):
        opened(path, tokenizer)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    requires("pyarrow")
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="found two columns 'prompt', allowed: one of each name"):
        list(read_rows(tmp_path / "p.parquet"))
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "1?", "prompt": "2?"}\n{"prompt": [{"role": "user", "role": "tool"}]}\n'
    )
    rows = list(read_rows(tmp_path / "p.jsonl"))
    assert [(row.reason, row.detail[:17]) for row in rows] == [
        ("broken_json", "found 'prompt' tw"),
        ("broken_json", "found 'role' twic"),
    ]


def test_one_repeated_name_among_many_is_found_in_linear_time(tmp_path: Path) -> None:
    """A row of somebody else's data set must not stop the reading of the other rows."""
    names = [f'"{number}":0' for number in (*range(400_000), 399_999)]
    (tmp_path / "p.jsonl").write_text(f"{{{','.join(names)}}}\n")
    (row,) = read_rows(tmp_path / "p.jsonl")
    assert isinstance(row, BadLine) and row.detail.startswith("found '399999' twice")


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_of_float32_are_the_shortest_that_name_them(values: list[float]) -> None:
    requires("pyarrow")
    import pyarrow
    from pyarrow import parquet

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.parquet"
        parquet.write_table(
            pyarrow.table({"answer": pyarrow.array(values, pyarrow.float32())}), path
        )
        numbers = [record["answer"] for _, record in read_rows(path)]
    assert numbers == [float(str(np.float32(value))) for value in values]


def test_columns_that_json_has_no_word_for_are_texts_or_bad(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    row = {"id": "a", "prompt": "1?", "answer": "1"}
    (prompt,) = opened(
        parquet(tmp_path / "p.parquet", [row | {"price": Decimal("1.50")}]), tokenizer
    )
    assert prompt.metadata == {"price": "1.50"}
    path = parquet(tmp_path / "b.parquet", [row | {"image": b"\x89PNG"}])
    with pytest.raises(ConfigError, match=r"1 wrong_type \(first line 1: a column holds bytes"):
        open_prompts(path, tmp_path / "b.index", tokenizer, HOW, 0.5)


def test_parquet_that_cannot_be_read_is_named_whatever_its_library_raises(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    requires("pyarrow")
    import pyarrow
    from pyarrow import parquet as pq

    path = tmp_path / "p.parquet"
    late = pyarrow.array([10**7], pyarrow.int32()).cast(pyarrow.date32())
    pq.write_table(
        pyarrow.table({"id": ["a"], "prompt": ["1?"], "answer": ["1"], "when": late}), path
    )
    with pytest.raises(ConfigError, match=r"p\.parquet: no parquet file that can be read: .*range"):
        opened(path, tokenizer)
    path.write_bytes(b"PAR1" + b"?" * 20)
    for read in (lambda: opened(path, tokenizer), lambda: count_rows(path)):
        with pytest.raises(
            ConfigError, match=r"p\.parquet: no parquet file that can be read: .*; write it again"
        ):
            read()


def test_parquet_without_its_library_says_what_to_do(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        ConfigError, match=r"p\.parquet: found parquet, which needs pyarrow.*pip install"
    ):
        opened(tmp_path / "p.parquet", tokenizer)


# -- memory ----------------------------------------------------------------------------------------

MEMORY = """
import sys
import tempfile
from pathlib import Path
from relax_hpc.config.schema import Config
from relax_hpc.data.prompt_file import open_prompts
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.rollout.prompt_source import PromptSource

def most():
    # Bytes of memory that this process has ever had.
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

path, where, model = map(Path, sys.argv[1:4])
before = most()
prompts = open_prompts(path, where, load_tokenizer(model), PromptRules(64), 0.0)
source = PromptSource(prompts, Config())
for ticket in range(0, len(prompts), max(1, len(prompts) // 500)):
    source.prompt(ticket, 0)
print(len(prompts), most() - before)
"""


def test_a_process_does_not_hold_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The largest that it ever was, beside what an empty file takes: less than the file, and so
    much a prompt."""
    count, found = effort(30_000, 1_000_000), dict[int, int]()
    for lines in (1, count):
        path = tmp_path / f"{lines}.jsonl"
        with path.open("w") as file:
            for number in range(lines):
                row = {"id": str(number), "prompt": f"{number}?", "answer": "1", "more": "x" * 900}
                file.write(json.dumps(row) + "\n")
        words = [str(path), str(path.with_suffix(".index")), str(tokenizer.directory)]
        used = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", MEMORY, *words], capture_output=True, text=True, check=True
            )
            prompts, most = map(int, done.stdout.split())
            used.append(most)
        found[prompts] = used
    making, having = (many - one for many, one in zip(found[count], found[1], strict=True))
    size = (tmp_path / f"{count}.jsonl").stat().st_size
    told = f"{making / 1e6:.1f} MB to make the index, {having / 1e6:.1f} to have it"
    print(f"{count} prompts, {size / 1e6:.0f} MB: {told}")
    assert having < 6e6 + 60 * count and making < 6e6 + 150 * count < size


def test_a_file_that_cannot_be_read_now_is_said(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch
) -> None:
    prompts = opened(write(tmp_path / "p.jsonl", 1), tokenizer)

    def ill(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", ill)
    with pytest.raises(RelaxError, match=r"p\.jsonl: line 1 cannot be read: Input/output error"):
        prompts[0]
