"""Conversion there and back gives the same bytes, in every form that a model has; an interruption
costs one part."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.protocol import RUN_FORMAT
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands.program import main
from relax_hpc.convert import workspace
from relax_hpc.training.checkpoint.store import MARKER, checksum
from tests.helpers.convert_helpers import (
    DENSE,
    MIXED,
    bounded_data,
    content,
    in_child,
    kill_at,
    model,
    to,
)

FORMS: dict[str, tuple[dict, dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "tied": (DENSE | {"tie_word_embeddings": True}, {}),
    "tied, embedding stored twice": (
        DENSE | {"tie_word_embeddings": True},
        {"head": True, "files": 2},
    ),
    "bfloat16 in three files": (DENSE, {"dtype": torch.bfloat16, "files": 3}),
    "a tensor an expert": (MIXED, {"files": 2}),
    "a tensor for all experts": (MIXED | {"tie_word_embeddings": True}, {"packed": True}),
}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return model(tmp_path / "dense", DENSE)


@pytest.mark.parametrize("form", FORMS)
def test_there_and_back_gives_the_same_bytes(tmp_path: Path, form: str):
    """Also in the folder of a run of an older format, which is not gone on with."""
    config, options = FORMS[form]
    source, run = model(tmp_path / "hf", config, **options), RunDir(tmp_path / "run")
    run.create()
    (run.root / "format.json").write_text(f'{{"format": {RUN_FORMAT - 1}}}')
    there = to(source, run.checkpoints / "megatron", shard_bytes=20_000, verify="digests")
    back = to(run.checkpoints / "megatron", tmp_path / "again", verify="digests")
    assert content(tmp_path / "again") == content(source)
    assert there["digests"] == back["digests"] and (there["direction"], back["direction"]) == (
        "megatron",
        "hf",
    )


def test_all_files_are_in_the_marker_and_none_is_left_beside(dense: Path, tmp_path: Path):
    to(dense, tmp_path / "megatron", shard_bytes=20_000)
    files = json.loads((tmp_path / "megatron" / MARKER).read_bytes())["files"]
    assert len([name for name in files if name.endswith(".distcp")]) > 3
    assert files == {
        path.name: checksum(path)
        for path in (tmp_path / "megatron").iterdir()
        if path.is_file() and path.name != MARKER
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "megatron"]


def test_who_may_read_what_is_made_is_for_its_user_to_say(dense: Path, tmp_path: Path):
    """By the umask: the folder as well as what lies in it."""
    mask = 0o027
    for path in (dense, *dense.iterdir()):
        path.chmod(0o700 if path.is_dir() else 0o600)
    before = os.umask(mask)
    try:
        assert main(["convert", str(dense), str(tmp_path / "megatron")]) == 0
        assert main(["convert", str(tmp_path / "megatron"), str(tmp_path / "again")]) == 0
    finally:
        os.umask(before)
    for target in (tmp_path / "megatron", tmp_path / "again"):
        for path in (target, *target.rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_new_shards_have_an_index(dense: Path, tmp_path: Path):
    to(dense, tmp_path / "megatron")
    to(tmp_path / "megatron", tmp_path / "again", shard_bytes=20_000, verify="digests")
    index = json.loads((tmp_path / "again/model.safetensors.index.json").read_bytes())
    found = {}
    for path in sorted((tmp_path / "again").glob("*.safetensors")):
        tensors = load_file(path)
        assert {index["weight_map"][name] for name in tensors} == {path.name}
        found |= tensors
    expected = load_file(dense / "model.safetensors")
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


@pytest.mark.parametrize("way", ["there", "back"])
def test_the_type_can_be_changed(dense: Path, tmp_path: Path, way: str):
    to(dense, tmp_path / "megatron", dtype="bfloat16" if way == "there" else "", verify="digests")
    to(
        tmp_path / "megatron",
        tmp_path / "again",
        dtype="bfloat16" if way == "back" else "",
        verify="digests",
    )
    expected = load_file(dense / "model.safetensors")
    for name, value in load_file(tmp_path / "again/model.safetensors").items():
        assert torch.equal(value, expected[name].bfloat16())
    assert json.loads((tmp_path / "again/config.json").read_bytes())["torch_dtype"] == "bfloat16"


POINTS = {
    "in the midst of a part": (workspace.HashedFile, "write", 150),
    "before a part gets its name": (workspace.os, "fsync", 9),
    "before a part is recorded": (workspace, "write_json", 3),
    "before the metadata": (workspace.Path, "write_bytes", 1),
    "before the directory gets its name": (workspace, "sync_directory", -1),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_conversion_goes_on(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
):
    to(dense, tmp_path / "expected", shard_bytes=20_000)
    expected, parts = (
        content(tmp_path / "expected"),
        len(list((tmp_path / "expected").glob("*.distcp"))),
    )
    place, name, number = POINTS[point]
    kill, original = kill_at(number if number > 0 else parts + 2), getattr(place, name)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, lambda *given, **named: (kill(), original(*given, **named))[1])
        assert in_child(lambda: to(dense, tmp_path / "megatron", shard_bytes=20_000)) == -9
    assert not (tmp_path / "megatron").exists()
    finished = len(list(tmp_path.glob(".megatron.*.records/*.json")))
    assert finished > 0
    report = to(dense, tmp_path / "megatron", shard_bytes=20_000, verify="digests")
    assert report["files_kept"] == finished
    found = content(tmp_path / "megatron")
    # torch's metadata has the name of the folder it was written to, and the marker its checksum.
    assert {key for key, value in found.items() if value != expected[key]} <= {".metadata", MARKER}
    assert sorted(found) == sorted(expected)
    assert not list(tmp_path.glob(".megatron*"))


def test_the_way_back_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = model(tmp_path / "hf", MIXED, files=4)
    to(source, tmp_path / "megatron")
    kill, original = kill_at(3), workspace.Workspace._write
    with monkeypatch.context() as patch:
        patch.setattr(workspace.Workspace, "_write", lambda *given: (kill(), original(*given))[1])
        assert in_child(lambda: to(tmp_path / "megatron", tmp_path / "again")) == -9
    assert to(tmp_path / "megatron", tmp_path / "again")["files_kept"] == 2
    assert content(tmp_path / "again") == content(source)


def test_a_part_that_was_damaged_meanwhile_is_written_again(
    dense: Path, tmp_path: Path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(workspace.Workspace, "finish", lambda *_: None)
        to(dense, tmp_path / "megatron", shard_bytes=20_000)
    part = next(tmp_path.glob(".megatron.*/__1_0.distcp"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    parts = len(list(part.parent.glob("*.distcp")))
    assert (
        to(dense, tmp_path / "megatron", shard_bytes=20_000, verify="digests")["files_kept"]
        == parts - 1
    )


def test_another_source_is_not_gone_on_with(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(workspace.Workspace, "finish", lambda *_: None)
        to(dense, tmp_path / "megatron")
    other = model(tmp_path / "other", DENSE | {"vocab_size": 7})
    assert to(other, tmp_path / "megatron", verify="digests")["files_kept"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "megatron", "other"]


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_full_disk_is_said_and_gone_on_from(dense: Path, tmp_path: Path, way: str, capfd):
    source, target = dense, tmp_path / "target"
    if way == "back":
        source = tmp_path / "megatron"
        to(dense, source)
    size = {"there": 20_000, "back": 0}[way]

    def with_little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, resource.RLIM_INFINITY))
        with pytest.raises(
            RelaxError, match=r"cannot be written: File too large; finished files are kept"
        ) as error:
            to(source, target, shard_bytes=size)
        assert error.value.exit_code == 75 and not target.exists()

    assert in_child(with_little_room) == 0, capfd.readouterr()
    assert not list(tmp_path.glob(".target*/.*.[0-9]*"))
    to(source, target, shard_bytes=size, verify="digests")


LARGE = DENSE | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
MANY = MIXED | {
    "hidden_size": 512,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_experts": 24,
}


@pytest.mark.parametrize(("about", "packed"), [(LARGE, False), (MANY, False), (MANY, True)])
def test_memory_is_bounded_by_the_largest_tensors_not_by_the_model(
    tmp_path: Path, about: dict, packed: bool
):
    """Nor by the number of experts, also where all of a layer are one tensor."""
    source = model(tmp_path / "large", about, files=2, packed=packed)
    whole = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    inner = about["moe_intermediate_size"] if about is MANY else about["intermediate_size"]
    room = 6 * 2 * inner * about["hidden_size"] * 4
    assert whole > 3 * room

    def with_little_memory() -> None:
        with bounded_data(room):
            to(source, tmp_path / "megatron", verify="digests")
            to(tmp_path / "megatron", tmp_path / "again", verify="digests")

    assert in_child(with_little_memory) == 0
    assert content(tmp_path / "again") == content(source)


def test_the_command_says_what_it_did(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert (
        main(
            [
                "convert",
                str(dense),
                str(tmp_path / "megatron"),
                "--shard-size",
                "1MB",
                "--verify",
                "digests",
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert "a megatron-core checkpoint" in said.out and "verified: 25 tensors" in said.out
    assert "part 1 of 1" in said.err
    assert main(["convert", str(tmp_path / "megatron"), str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["direction"] == "hf"
    assert main(["convert", str(dense), str(tmp_path / "again")]) == 78
    assert "exists, and is never overwritten" in capsys.readouterr().err
