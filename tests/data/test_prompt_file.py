"""Prompts of an indexed file: the same as without index, with less memory, and never another prompt
than the indexed one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from itertools import product
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

RULES = PromptRules(12)


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
def test_an_index_finds_the_same_rows_as_reading_the_whole_file(
    content: list[bytes],
    end: bytes,
    closed: bool,
    truncate_left: bool,
    tokenizer: Tokenizer,
    folder: Path,
) -> None:
    """`load_prompts` compares order, bad lines with their numbers, and duplicates."""
    good = b'{"id": "first", "prompt": "1?", "answer": "1"}'
    path = folder / "any.jsonl"
    path.write_bytes(end.join([good, *content]) + (end if closed else b""))
    load_prompts(path, tokenizer, PromptRules(12, truncate_left=truncate_left), 1.0)


def write(path: Path, *ids: object, prompt: str = "12?") -> Path:
    path.write_text(
        "".join(json.dumps({"id": name, "prompt": prompt, "answer": "1"}) + "\n" for name in ids)
    )
    return path


def open_file(
    path: Path, tokenizer: Tokenizer, rules: PromptRules = RULES, share: float = 0.0
) -> PromptFile:
    return open_prompts(path, path.parent / "of.index", tokenizer, rules, share)


def test_a_ticket_has_the_same_prompt_with_and_without_index(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """This holds with bad lines in between, and after other tickets were fetched."""
    path = write(tmp_path / "p.jsonl", *range(40))
    lines = path.read_text().splitlines()
    lines[7], lines[11], lines[20], lines[33] = (
        "{",
        lines[3],
        "",
        json.dumps({"id": "long"}),
    )
    path.write_text("\n".join(lines))
    expected_prompts, bad = read_prompts(path, tokenizer, RULES)
    source = PromptSource(open_file(path, tokenizer, share=1.0), Config(seed=5))
    expected_source = PromptSource(expected_prompts, Config(seed=5))
    attempts = list(product(range(100), range(3)))
    source.fetch(attempts[:50])
    for ticket, attempt in attempts:
        assert source.prompt(ticket, attempt) == expected_source.prompt(ticket, attempt)
    assert [(line.line, line.reason) for line in bad] == [
        (8, "broken_json"),
        (12, "duplicate_id"),
        (34, "missing_field"),
    ]


def test_only_used_prompts_are_tokenized(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Opening a file tokenizes only prompts that may be too long."""
    path = write(tmp_path / "p.jsonl", *range(50))
    with path.open("a") as file:
        for name, prompt in [("fits", "1" * 11), ("long", "1" * 12), ("other", "é" * 3)]:
            file.write(json.dumps({"id": name, "prompt": prompt, "answer": ""}) + "\n")
    encoded: list[str] = []
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **options: encoded.append(text) or encode(text, **options)
    try:
        prompts = open_file(path, tokenizer, share=0.5)
        assert set(encoded) - {chr(code) for code in range(128)} - {""} <= {"1" * 12, "é" * 3}
        encoded.clear()
        assert [(line.line, line.reason) for line in prompts.bad] == [(52, "over_long")]
        assert len(prompts[50].token_ids) == 12 and encoded == ["1" * 11]
    finally:
        del tokenizer.encode


def replace_file(path: Path) -> None:
    other = write(path.with_name("other"), 1, 2, 3, prompt="34?")
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    other.replace(path)


def append_row(path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"id": 4, "prompt": "1?", "answer": "1"}) + "\n")


@pytest.mark.parametrize(
    "change",
    [replace_file, append_row, lambda path: write(path, 1)],
    ids=["replace_file", "append_row", "cut"],
)
def test_a_changed_file_is_refused(
    change: Callable[[Path], object], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write(tmp_path / "p.jsonl", 1, 2, 3)
    assert len(open_file(path, tokenizer)) == 3
    change(path)
    reason = "(found [0-9]+ bytes, had [0-9]+|other bytes, as many as before)"
    text = rf"p\.jsonl: has changed since the run began \({reason}\), .* or remove .*of\.index to"
    with pytest.raises(ConfigError, match=text):
        open_file(path, tokenizer)
    (tmp_path / "of.index").unlink()
    assert open_file(path, tokenizer)[:] == read_prompts(path, tokenizer, RULES)[0]


def test_a_copied_or_touched_file_is_accepted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "p.jsonl", 1, 2, 3)
    open_file(path, tokenizer)
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    assert len(open_file(path, tokenizer)) == 3


def test_a_line_that_changes_during_a_run_is_detected(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The line is compared even if the modification time of the file is unchanged."""
    path = write(tmp_path / "p.jsonl", 1, 2, 3)
    times, prompts = path.stat(), open_file(path, tokenizer)
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b"12?", 60))
        file.write(b"21?")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    reopened = open_file(path, tokenizer)
    for view in (prompts, reopened):
        assert view[0].text == view[2].text == "12?"
        with pytest.raises(
            ConfigError, match=r"p\.jsonl: has changed since the run began \(line 2 is another\)"
        ):
            view[1]
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="line 3 is another"):
        prompts[2]


def test_the_index_is_built_once_per_file(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = write(tmp_path / "p.jsonl", 1, 2), write(tmp_path / "o.jsonl", 1, 2, 3)
    indexed: list[Path] = []
    build = prompt_file.build_index
    monkeypatch.setattr(
        prompt_file,
        "build_index",
        lambda files, *arguments: indexed.append(files.lines) or build(files, *arguments),
    )
    for _ in range(3):
        assert len(open_file(path, tokenizer)) == 2
    assert indexed == [path]
    # With other rules, tickets would get other prompts without an error.
    with pytest.raises(
        ConfigError, match="would become other prompts than when the run began: the chat template"
    ):
        open_file(path, tokenizer, PromptRules(3, truncate_left=True))
    assert len(open_file(other, tokenizer)) == 3 and indexed == [path, other]
    content = (tmp_path / "of.index").read_bytes()
    for damaged in (b"", content[:-1], b"{}\n" + content, b"\xff" * 50):
        (tmp_path / "of.index").write_bytes(damaged)
        assert len(open_file(other, tokenizer)) == 3


def test_bad_lines_are_kept_up_to_a_limit_and_all_are_counted(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_file, "KEPT_BAD", 3)
    path = write(tmp_path / "p.jsonl", *"aabbccdd", prompt="1?")
    path.write_text("{\n" + path.read_text() + "{\n")
    assert [line.line for line in open_file(path, tokenizer, share=0.7).bad] == [1, 3, 5]
    message = (
        r"6 of 10 lines are bad: 4 duplicate_id \(first line 3: id a\); 2 broken_json \(first "
        r"line 1"
    )
    with pytest.raises(ConfigError, match=message):
        open_file(path, tokenizer, share=0.5)


# -- parquet ---------------------------------------------------------------------------------------


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    requires("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_rows_of_parquet_equal_those_of_json_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {
            "id": number,
            "prompt": f"{number}?",
            "answer": Decimal("1.5") if number % 2 else None,
            "more": [number],
        }
        for number in range(5)
    ]
    path = parquet(
        tmp_path / "p.parquet",
        [row | {"answer": str(number)} for number, row in enumerate(rows)] + [rows[0]],
    )
    prompts = open_file(path, tokenizer, share=0.5)
    assert prompts[:] == read_prompts(path, tokenizer, RULES)[0]
    assert [(prompt.prompt_id, prompt.answer, prompt.metadata) for prompt in prompts[:2]] == [
        ("0", "0", {"more": [0]}),
        ("1", "1", {"more": [1]}),
    ]
    assert prompts.bad == [BadLine(6, "missing_field")] and count_rows(path) == 6
    assert len(open_file(path, tokenizer, share=0.5)) == 5
    path.unlink()
    parquet(path, [rows[1] | {"answer": "1"}])
    with pytest.raises(ConfigError, match=r"p\.parquet: has changed since the run began"):
        open_file(path, tokenizer)


def test_two_columns_with_the_same_name_are_refused(tmp_path: Path) -> None:
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


def test_a_repeated_name_is_found_in_linear_time(tmp_path: Path) -> None:
    """A row with many columns must not delay reading of the other rows."""
    names = [f'"{number}":0' for number in (*range(400_000), 399_999)]
    (tmp_path / "p.jsonl").write_text(f"{{{','.join(names)}}}\n")
    (row,) = read_rows(tmp_path / "p.jsonl")
    assert isinstance(row, BadLine) and row.detail.startswith("found '399999' twice")


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_float32_values_are_read_with_their_shortest_decimal_form(values: list[float]) -> None:
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


def test_columns_without_json_type_become_text_or_are_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    row = {"id": "a", "prompt": "1?", "answer": "1"}
    (prompt,) = open_file(
        parquet(tmp_path / "p.parquet", [row | {"price": Decimal("1.50")}]), tokenizer
    )
    assert prompt.metadata == {"price": "1.50"}
    path = parquet(tmp_path / "b.parquet", [row | {"image": b"\x89PNG"}])
    with pytest.raises(ConfigError, match=r"1 wrong_type \(first line 1: a column holds bytes"):
        open_prompts(path, tmp_path / "b.index", tokenizer, RULES, 0.5)


def test_every_error_of_pyarrow_names_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    requires("pyarrow")
    import pyarrow
    from pyarrow import parquet as pq

    path = tmp_path / "p.parquet"
    late = pyarrow.array([10**7], pyarrow.int32()).cast(pyarrow.date32())
    pq.write_table(
        pyarrow.table({"id": ["a"], "prompt": ["1?"], "answer": ["1"], "when": late}), path
    )
    with pytest.raises(ConfigError, match=r"p\.parquet: no parquet file that can be read: .*range"):
        open_file(path, tokenizer)
    path.write_bytes(b"PAR1" + b"?" * 20)
    for read in (lambda: open_file(path, tokenizer), lambda: count_rows(path)):
        with pytest.raises(
            ConfigError, match=r"p\.parquet: no parquet file that can be read: .*; write it again"
        ):
            read()


def test_the_error_for_missing_pyarrow_contains_the_fix(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        ConfigError, match=r"p\.parquet: found parquet, which needs pyarrow.*pip install"
    ):
        open_file(tmp_path / "p.parquet", tokenizer)


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

def peak_bytes():
    # Largest memory of this process so far.
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

path, where, model = map(Path, sys.argv[1:4])
before = peak_bytes()
prompts = open_prompts(path, where, load_tokenizer(model), PromptRules(64), 0.0)
source = PromptSource(prompts, Config())
for ticket in range(0, len(prompts), max(1, len(prompts) // 500)):
    source.prompt(ticket, 0)
print(len(prompts), peak_bytes() - before)
"""


def test_a_process_does_not_hold_the_file_in_memory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Peak memory over that for a file of one row is bounded by a number of bytes for each prompt,
    which is less than the size of the file."""
    count, used_by_count = effort(30_000, 1_000_000), dict[int, int]()
    for lines in (1, count):
        path = tmp_path / f"{lines}.jsonl"
        with path.open("w") as file:
            for number in range(lines):
                row = {"id": str(number), "prompt": f"{number}?", "answer": "1", "more": "x" * 900}
                file.write(json.dumps(row) + "\n")
        arguments = [str(path), str(path.with_suffix(".index")), str(tokenizer.directory)]
        samples = []
        for _ in range(2):
            process = subprocess.run(
                [sys.executable, "-c", MEMORY, *arguments],
                capture_output=True,
                text=True,
                check=True,
            )
            prompts, used_bytes = map(int, process.stdout.split())
            samples.append(used_bytes)
        used_by_count[prompts] = samples
    build_bytes, load_bytes = (
        large - small for large, small in zip(used_by_count[count], used_by_count[1], strict=True)
    )
    size = (tmp_path / f"{count}.jsonl").stat().st_size
    measured = f"{build_bytes / 1e6:.1f} MB to make the index, {load_bytes / 1e6:.1f} to have it"
    print(f"{count} prompts, {size / 1e6:.0f} MB: {measured}")
    assert load_bytes < 6e6 + 60 * count and build_bytes < 6e6 + 150 * count < size


def test_an_io_error_names_file_and_line(tmp_path: Path, tokenizer: Tokenizer, monkeypatch) -> None:
    prompts = open_file(write(tmp_path / "p.jsonl", 1), tokenizer)

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(RelaxError, match=r"p\.jsonl: line 1 cannot be read: Input/output error"):
        prompts[0]
