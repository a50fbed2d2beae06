"""Folders of rows: which files of them are which split, and what is read of those."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Config, DataConfig
from relax_hpc.data.prompt_file import check_same, open_prompts
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.row_files import RowFiles
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.ops.checks.files import read_prompts
from tests.helpers.media_prompts import IMAGE, png, seeing_model
from tests.helpers.prompt_helpers import row_set
from tests.requirements import requires

SAVED = Path(__file__).parents[1] / "golden" / "saved_dataset"
"""What `DatasetDict.save_to_disk` of `datasets` 5.2.0 has written: 5 rows of `train` in 2 shards, 2
of `test`, each with a list of one `Image`, whose column is struct<bytes, path>."""
DATA = DataConfig(max_prompt_tokens=64, max_bad_share=0.5)
README = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: 'x/*.jsonl'}
  - {split: held, path: [y.jsonl]}
- config_name: other
  data_files: {test: z.jsonl}
---
"""
FILES = ("x/1.jsonl", "x/2.jsonl", "y.jsonl", "z.jsonl")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(seeing_model(tmp_path_factory.mktemp("model") / "m"))


def write(folder: Path, files: Mapping[str, Sequence[object]]) -> Path:
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
        )
    return folder


def rows(*names: str) -> list[dict[str, str]]:
    return [{"id": name, "prompt": f"{name}?", "answer": name} for name in names]


def test_what_datasets_has_saved_is_read_with_its_images(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    requires("pyarrow")
    files = RowFiles.from_path(f"{SAVED}#train")
    how = PromptRules.from_config(DATA, tokenizer, files.folder)
    found = open_prompts(f"{SAVED}#train", tmp_path / "index", tokenizer, how, 0.0)
    assert [one.prompt_id for one in found] == ["t0", "t1", "t2", "t3", "t4"] and files.count() == 5
    assert [one.metadata for one in found] == [{"level": level} for level in range(5)]
    # 96 x 64 pixels of a file, which has its name beside its bytes, and 64 x 64 that never had one.
    assert [one.media[0].tokens for one in found] == [6, 4, 6, 4, 6]
    assert all(
        one.media[0].source.startswith(b"\x89PNG") and IMAGE in one.token_ids for one in found
    )
    assert [
        RowFiles.from_path(SAVED / "test").count(),
        RowFiles.from_path(f"{SAVED}#test").count(),
    ] == [2, 2]


@pytest.mark.parametrize(
    ("readme", "splits", "others"),
    [
        ("", {"train": ["train.jsonl"], "test": ["test.jsonl"]}, ["notes.txt"]),
        (
            "",
            {"train": ["train/a.jsonl", "train/sub/c.jsonl"], "validation": ["validation/b.jsonl"]},
            [],
        ),
        ("", {"a_b": ["data/a_b-00000-of-00002.jsonl", "data/a_b-00001-of-00002.jsonl"]}, []),
        ("", {"train": ["a.jsonl", "b.jsonl"]}, [".hidden.jsonl"]),
        (
            "",
            {
                "train": ["my-train-v2.jsonl"],
                "validation": ["my_dev.jsonl"],
                "test": ["eval_3.jsonl"],
            },
            ["contest.jsonl"],
        ),
        (
            README,
            {"train": ["x/1.jsonl", "x/2.jsonl"], "held": ["y.jsonl"], "other/test": ["z.jsonl"]},
            ["train.jsonl"],
        ),
        ("---\nconfigs: [{data_files: x/*.jsonl}]\n---\n", {"train": ["x/1.jsonl"]}, ["y.jsonl"]),
        (
            "---\r\nconfigs: [{data_files: x/*.jsonl}]\r\n---\r\n",
            {"train": ["x/1.jsonl"]},
            ["y.jsonl"],
        ),
        ("---\nconfigs: [1, {data_files: 7}]\n---\n", {"train": ["a.jsonl"]}, []),
        ("---\n\t{\n---\n", {"train": ["a.jsonl"]}, []),
    ],
)
def test_files_of_a_folder_are_those_that_datasets_finds(
    readme: str, splits: dict[str, list[str]], others: list[str], tmp_path: Path
) -> None:
    """The first seven as `load_dataset_builder` of `datasets` 5.2.0 splits the same folders, but
    for configurations that are not the usual one, which it loads by another argument."""
    write(tmp_path, dict.fromkeys((*others, *chain.from_iterable(splits.values())), ()))
    (tmp_path / "README.md").write_text(readme)
    for split, names in splits.items():
        assert RowFiles.from_path(f"{tmp_path}#{split}").paths == tuple(
            tmp_path / name for name in names
        )
    if len(splits) > 1:
        with pytest.raises(ConfigError, match=r"found a folder of several splits, allowed: .*#"):
            RowFiles.from_path(tmp_path)
    with pytest.raises(ConfigError, match=f"found no such split, allowed: .*#{next(iter(splits))}"):
        RowFiles.from_path(f"{tmp_path}#other")


MAIN, OTHER = "m/train.jsonl", "s/train.jsonl"


@pytest.mark.parametrize(
    ("configs", "files", "expected"),
    [
        ("{data_dir: m}", [MAIN, OTHER], [MAIN]),
        (
            "{config_name: a, data_dir: m, default: true}, {config_name: b, data_dir: s}",
            [MAIN, OTHER],
            "several splits",
        ),
        (
            "{config_name: a, data_dir: m}, {config_name: b, data_dir: s}",
            [MAIN, OTHER],
            "several splits",
        ),
        ("{data_files: [b.jsonl, a.jsonl]}", ["a.jsonl", "b.jsonl"], ["b.jsonl", "a.jsonl"]),
        ("{data_files: z.jsonl}", ["a.jsonl"], "found no z.jsonl, which README.md names"),
        ("{data_dir: z}", ["a.jsonl"], "found no rows in the data_dir of README.md"),
        (
            "{data_files: [{split: train, path: a.jsonl}, {split: train, path: b.jsonl}]}",
            ["a.jsonl", "b.jsonl"],
            "found split 'train' twice",
        ),
        ("", ["train.jsonl", "train.parquet"], "may hold the same rows"),
    ],
)
def test_rows_that_a_readme_leaves_out_are_not_read(
    configs: str, files: list[str], expected: list[str] | str, tmp_path: Path
) -> None:
    """As `load_dataset` of `datasets` 5.2.0 reads these folders, or refuses them."""
    write(tmp_path, dict.fromkeys(files, ()))
    (tmp_path / "README.md").write_text(f"---\nconfigs: [{configs}]\n---\n")
    if isinstance(expected, list):
        assert RowFiles.from_path(tmp_path).paths == tuple(tmp_path / name for name in expected)
        return
    with pytest.raises(ConfigError, match=expected):
        RowFiles.from_path(tmp_path)


def test_bad_rows_of_several_files_are_named_by_file_and_line(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = write(
        tmp_path / "d", {"a.jsonl": [*rows("1"), "", "{"], "b.jsonl": [*rows("2", "3"), *rows("1")]}
    )
    named, where = f"{folder}#train", tmp_path / "index"
    found = open_prompts(named, where, tokenizer, PromptRules(64), 0.5)
    assert [one.prompt_id for one in found] == ["1", "2", "3"]
    assert [(found.location_of(bad.line), bad.reason) for bad in found.bad] == [
        ("a.jsonl, line 3", "broken_json"),
        ("b.jsonl, line 3", "duplicate_id"),
    ]
    # By an index that is there, too.
    again = open_prompts(named, where, tokenizer, PromptRules(64), 0.5)
    assert again[:] == found[:] and again.location_of(6) == "b.jsonl, line 3"
    tally = read_prompts(row_set(named), tokenizer, Config(data=DATA)).tally
    assert "1 duplicate_id (first b.jsonl, line 3: id 1)" in tally.problem(0.0, 6)
    with pytest.raises(ConfigError, match=r"1 broken_json \(first a\.jsonl, line 3: "):
        open_prompts(named, tmp_path / "other", tokenizer, PromptRules(64), 0.0)


def test_media_of_a_folder_are_relative_to_that_of_its_files(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """As in what `datasets` calls an image folder."""
    seen = [{"id": "a", "prompt": "<image>", "answer": "x", "file_name": "one.png"}]
    folder = write(tmp_path / "d", {"train/metadata.jsonl": seen, "test/metadata.jsonl": seen})
    (folder / "train" / "one.png").write_bytes(png())
    data = DataConfig(max_prompt_tokens=64, multimodal_keys={"image": "file_name"})
    for split, share in (("train", 0.0), ("test", 1.0)):
        reading = read_prompts(row_set(f"{folder}#{split}"), tokenizer, Config(data=data))
        assert reading.tally.counts == ({"missing_file": 1} if share else {})


def test_a_folder_that_has_changed_since_it_was_indexed_is_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder, where = (
        write(tmp_path / "d", {"a.jsonl": rows("1"), "b.jsonl": rows("2")}),
        tmp_path / "index",
    )
    open_prompts(folder, where, tokenizer, PromptRules(64), 0.0)
    shutil.copy(folder / "b.jsonl", tmp_path / "kept")
    (folder / "b.jsonl").write_text(json.dumps(rows("3")[0]) + "\n")
    with pytest.raises(ConfigError, match=r"has changed since the run began.*other bytes"):
        check_same(RowFiles.from_path(folder), where, tokenizer, PromptRules(64))
    shutil.copy(tmp_path / "kept", folder / "b.jsonl")
    check_same(RowFiles.from_path(folder), where, tokenizer, PromptRules(64))
    write(folder, {"c.jsonl": rows("4")})
    with pytest.raises(ConfigError, match="has changed since the run began"):
        open_prompts(folder, where, tokenizer, PromptRules(64), 0.0)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {},
            "found a folder without rows, allowed: files whose names end with .jsonl, .parquet, "
            ".arrow",
        ),
        ({"state.json": ["{"]}, "state.json: not JSON"),
        (
            {"state.json": [[]]},
            "state.json: found list, expected a JSON object; save the data set again",
        ),
        (
            {"state.json": [{"_data_files": [{"filename": "gone.arrow"}]}]},
            "names files that are not there",
        ),
        (
            {"dataset_dict.json": [{"splits": ["train"]}]},
            "train/state.json: names files that are not there",
        ),
    ],
)
def test_folders_without_rows_are_named(
    files: dict[str, list[object]], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    write(folder, files)
    with pytest.raises(ConfigError, match=says):
        read_prompts(row_set(folder), None, Config(data=DATA))


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    requires("pyarrow")
    shutil.copytree(SAVED / "test", tmp_path / "d")
    (shard,) = (tmp_path / "d").glob("*.arrow")
    shard.write_bytes(shard.read_bytes()[:900])
    with pytest.raises(ConfigError, match=rf"{shard.name}: no arrow file that can be read: "):
        read_prompts(row_set(tmp_path / "d"), None, Config(data=DATA))


LEAVING = {
    "state.json": [
        {"_data_files": [{"filename": "{}/private.jsonl"}]},
        {"_data_files": [{"filename": "../private.jsonl"}]},
    ],
    "dataset_dict.json": [{"splits": ["../saved"]}, {"splits": ["{}/saved"]}],
}


@pytest.mark.parametrize("name", LEAVING)
@pytest.mark.parametrize("number", [0, 1])
def test_a_saved_data_set_names_no_file_outside_of_its_folder(
    tmp_path: Path, name: str, number: int
) -> None:
    folder = write(tmp_path / "set", {})
    folder.mkdir()
    write(tmp_path, {"private.jsonl": rows("1"), "saved/a.jsonl": rows("1")})
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "a.jsonl"}]}')
    (folder / name).write_text(json.dumps(LEAVING[name][number]).replace("{}", str(tmp_path)))
    with pytest.raises(ConfigError, match=f"{name}: found .*, allowed: files inside of {folder}"):
        RowFiles.from_path(folder)


@pytest.mark.parametrize(
    "text",
    [
        "data_files: ../private.jsonl",
        "data_files: '{}/private.jsonl'",
        "data_files: ['a.jsonl', 'sub/../../*.jsonl']",
        "data_files: [{split: train, path: ['../*.jsonl']}]",
        "data_files: {train: ['link.jsonl']}",
        "data_files: {train: ['linked/*.jsonl']}",
        "data_files: [{split: train, path: [7]}]",
        "data_files: ''\n  data_dir: ..",
        "data_files: '*.jsonl'\n  data_dir: ..",
        "data_files: '*.jsonl'\n  data_dir: '{}'",
        "data_files: '*.jsonl'\n  data_dir: linked",
    ],
)
def test_a_readme_names_no_file_outside_of_its_folder(tmp_path: Path, text: str) -> None:
    """Neither does a link that it names lead out of the folder."""
    folder = write(tmp_path / "set", {"a.jsonl": rows("1")})
    write(tmp_path, {"private.jsonl": rows("secret"), "other/private.jsonl": rows("secret")})
    (folder / "link.jsonl").symlink_to("../private.jsonl")
    (folder / "linked").symlink_to(tmp_path / "other")
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  {text}\n---\n".replace("{}", str(tmp_path))
    )
    with pytest.raises(
        ConfigError,
        match=r"README\.md: (data_files: )?found .*, allowed: (patterns of )?files inside of",
    ):
        RowFiles.from_path(folder)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "a" * 5000], ids=["nul", "surrogate", "long"])
@pytest.mark.parametrize("file", ["state.json", "dataset_dict.json", "README.md"])
def test_a_name_that_no_file_can_have_is_an_error_of_the_folder(
    tmp_path: Path, file: str, name: str
) -> None:
    folder = write(tmp_path / "set", {"a.jsonl": rows("1")})
    texts = {
        "state.json": json.dumps({"_data_files": [{"filename": name}]}),
        "dataset_dict.json": json.dumps({"splits": [name]}),
        "README.md": f"---\nconfigs: [{{data_dir: {json.dumps(name)}}}]\n---\n",
    }
    (folder / file).write_text(texts[file])
    with pytest.raises(ConfigError, match="set"):
        RowFiles.from_path(folder)


def test_a_snapshot_of_the_hub_has_its_files_in_the_blobs_of_its_repository(tmp_path: Path) -> None:
    snapshot, blobs = (
        tmp_path / "datasets--me--set" / "snapshots" / "a1",
        tmp_path / "datasets--me--set" / "blobs",
    )
    write(blobs, {"b2": rows("1")})
    snapshot.mkdir(parents=True)
    (snapshot / "x.jsonl").symlink_to("../../blobs/b2")
    (snapshot / "README.md").write_text("---\nconfigs: [{data_files: x.jsonl}]\n---\n")
    assert RowFiles.from_path(snapshot).paths == (snapshot / "x.jsonl",)


def test_a_link_of_another_user_to_a_file_of_the_reader_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "set", {"a.jsonl": rows("1")})
    write(tmp_path, {"shared.jsonl": rows("2")})
    (folder / "link.jsonl").symlink_to(tmp_path / "shared.jsonl")
    assert len(RowFiles.from_path(folder).paths) == 2
    owner = Path.lstat
    monkeypatch.setattr(
        Path, "lstat", lambda path: SimpleNamespace(st_uid=7, st_mode=owner(path).st_mode)
    )
    with pytest.raises(
        ConfigError, match=f"link.jsonl: a link of another user to {tmp_path}/shared.jsonl"
    ):
        RowFiles.from_path(folder)
