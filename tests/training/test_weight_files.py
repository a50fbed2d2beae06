"""Files of published versions: damage is refused by the name of the file, full disks are waited
for, and other libraries can load them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax_hpc.base.disk_waits import CURES, WAITS
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import TinyModelConfig, WeightsConfig
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stored_pieces import split_into_pieces
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.published_form import published_form
from relax_hpc.training.weights import publisher, version_files
from relax_hpc.training.weights.file_form import FileForm
from relax_hpc.training.weights.manifest import MANIFEST, WeightsError, read_manifest
from relax_hpc.training.weights.pull import Puller
from relax_hpc.training.weights.subscriber import NOTHING, Fetcher, PublishedVersion
from relax_hpc.training.weights.untrained_tensors import UntrainedTensors
from relax_hpc.training.weights.version_files import FOLDER, LISTING, TENSORS
from tests.helpers.weights_helpers import SOON_S, Source, Stage, stage  # noqa: F401

# ruff: noqa: F811

INDEX = "model.safetensors.index.json"


# -- contents --------------------------------------------------------------------------------------


def test_the_files_are_a_hugging_face_directory(stage: Stage) -> None:
    stage.put(0)
    directory = stage.run.weights / "i000001-v000000"
    assert sorted(path.name for path in directory.iterdir()) == [LISTING, MANIFEST, FOLDER]
    assert sorted(path.name for path in (directory / FOLDER).iterdir()) == ["config.json", TENSORS]
    assert load_file(directory / FOLDER / TENSORS)["w"].tolist() == [0, 0, 0]


def test_the_manifest_has_the_position_of_each_tensor(stage: Stage) -> None:
    stage.put(0)
    manifest = json.loads((stage.run.weights / "i000001-v000000" / MANIFEST).read_bytes())
    assert manifest["tensors"]["half"] == {"dtype": "BF16", "shape": [5, 2]}
    (chunk,) = manifest["chunks"]
    rows = [(tensor["name"], tensor["start"], tensor["stop"]) for tensor in chunk["parts"]]
    assert rows == [("w", 0, 3), ("half", 0, 5)]
    assert "shm" in chunk["planes"]


def test_versions_with_files_have_the_untrained_tensors(stage: Stage) -> None:
    """Untrained tensors keep their types, and all versions share one file with them."""
    untrained = {
        "talker.head": torch.randn(3, 5).bfloat16(),
        "talker.b": torch.randn(7),
        "code2wav.s": torch.arange(3),
    }
    trained = {"thinker.w": torch.zeros(2, 3)}
    save_file(untrained | trained, stage.run.model / TENSORS, metadata={"format": "pt"})
    form = FileForm(untrained=("talker.", "code2wav."))
    source = Source(stage.run, stage.actor, trained, form=form, keep_every=1)
    shared_files = []
    for number in range(2):
        trained["thinker.w"].fill_(number)
        source.publish(Version(1, number))
        folder = stage.run.weights / str(Version(1, number)) / FOLDER
        files = json.loads((folder / INDEX).read_text())["weight_map"]
        tensors = {name: load_file(folder / file)[name] for name, file in files.items()}
        assert (tensors.pop("thinker.w") == number).all()
        assert_equal_tensors(tensors, untrained)
        shared_files.append(folder / files["talker.head"])
    first, second = shared_files
    assert first.samefile(second)
    listing = json.loads((stage.run.weights / str(Version(1, 0)) / LISTING).read_text())
    assert listing.keys() == {path.name for path in first.parent.iterdir()} - {INDEX}


def assert_equal_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check names, types and values."""
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype is expected[name].dtype and torch.equal(tensor, expected[name]), name


EXPERTS_WITH_VISION = TinyModelConfig(
    vision_layers=1,
    num_layers=1,
    num_experts=3,
    moe_intermediate_size=24,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("AutoModelForCausalLM", TinyModelConfig()),
        ("AutoModelForImageTextToText", EXPERTS_WITH_VISION),
    ],
    ids=["dense", "transposed experts"],
)
def test_a_version_in_several_files_is_loaded_by_transformers(
    stage: Stage, tmp_path: Path, kind: str, shape: TinyModelConfig
) -> None:
    """Three ranks write shares of the version from the memory of one rank, in the published form of
    the family."""
    install_transformers_hook()
    import transformers

    model = tmp_path / "model"
    make_tiny_model(model, shape, 3)
    shutil.copytree(model, stage.run.model, dirs_exist_ok=True)
    stored, spec = load_file(model / TENSORS), spec_from_config(read_config(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    pieces, _ = split_into_pieces(spec, stored, shapes)
    tensors = {name: piece[:].contiguous() for name, piece in pieces.items()}
    Source(stage.run, stage.actor, tensors, file_every=0).publish(Version(1, 0))
    folder = write_files(stage, spec, model, writers=3)
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    assert len(files) == 3 and all(files)
    assert_equal_tensors(files[0] | files[1] | files[2], stored)
    loader = getattr(transformers, kind)
    loaded = loader.from_pretrained(folder, dtype=torch.float32).state_dict()
    expected = loader.from_pretrained(model, dtype=torch.float32).state_dict()
    assert_equal_tensors(loaded, expected)


def write_files(stage: Stage, spec: ModelSpec, model: Path, writers: int) -> Path:
    """Write the files of version 0, each writer its share. Return their folder."""
    directory = stage.run.weights / "i000001-v000000"
    news = stage.rollout.connection.call("next_version", after=str(NOTHING))
    manifest = read_manifest(directory, news["digest"])
    partial = directory / ".partial"
    partial.mkdir()
    puller = Puller(stage.rollout.store.planes, SOON_S)
    division = version_files.FileDivision(writers, form=published_form(spec, "F32"))
    scratch = model.parent
    sums = [
        version_files.write_share(manifest, puller, partial, rank, division, scratch, sync=True)
        for rank in range(writers)
    ]
    untrained = UntrainedTensors(model, (), scratch / "none")
    version_files.finish(manifest, partial, model, sums, division, untrained, sync=True)
    return directory / FOLDER


@pytest.mark.parametrize("writers", [1, 2, 3, 7])
def test_each_tensor_is_in_the_share_of_one_writer(writers: int) -> None:
    tensors = {
        f"t{number}": version_files.TensorInfo("F32", (number + 1, 10)) for number in range(5)
    }
    shares = version_files.divide_tensors(tensors, writers)
    names = sorted(itertools.chain(*shares))
    assert names == sorted(tensors) and len(shares) == writers


# -- damage ----------------------------------------------------------------------------------------


Damage = Callable[[bytes], bytes] | None
"""Function that changes the contents of a file. None: the file is deleted."""
DAMAGES: dict[str, Damage] = {
    "truncated": lambda data: data[:-1],
    "changed": lambda data: data[:-1] + b"\x07",
    "empty": lambda data: b"",
    "deleted": None,
}


@pytest.mark.parametrize(
    "name", [MANIFEST, LISTING, f"{FOLDER}/{TENSORS}", f"{FOLDER}/config.json"]
)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_files_are_refused_by_name_and_the_previous_version_stays(
    stage: Stage, name: str, damage: Damage, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.put(0)
    reader = stage.reader()
    assert stage.fetch(reader) == 0
    reader.served(Version(1, 0))
    stage.put(1)
    stage.end_actor()
    path = stage.run.weights / "i000001-v000001" / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    if name == MANIFEST:
        assert stage.fetch(reader) == 1, "files can be read without a manifest"
        return
    assert stage.fetch(reader) is None
    output = capfd.readouterr().err
    assert path.name in output and output.endswith("continues with i000001-v000000\n")
    assert stage.rollout.connection.call("status")["noted"] == {"weights_unreadable/unreadable": 1}


def test_each_flipped_bit_of_config_json_is_detected(stage: Stage) -> None:
    """By readers of memory, by readers of files, by a resume and by a conversion."""
    config = stage.run.model / "config.json"
    config.write_text('{"rope_theta": 10000}')
    stage.put(0)
    folder, contents = stage.run.weights / "i000001-v000000" / FOLDER, config.read_bytes()

    def check_model() -> None:
        version_files.check_unchanged(stage.run.weights, stage.run.model)

    def check_files() -> None:
        version_files.check_listed(folder)

    check_model()
    check_files()
    for bit in range(8 * len(contents)):
        flipped = bytearray(contents)
        flipped[bit // 8] ^= 1 << bit % 8
        for path, check in ((config, check_model), (folder / "config.json", check_files)):
            path.write_bytes(flipped)
            with pytest.raises(ConfigError, match=r"config\.json: was replaced or damaged"):
                check()
            path.write_bytes(contents)
    config.write_bytes(flipped)
    # Readers take the files, which have their own config.json.
    reader = stage.reader()
    assert stage.fetch(reader) == 0 and reader.fetcher.puller.bytes.keys() == {"file"}
    (stage.run.model / "README.md").write_text("may change")
    config.write_bytes(contents)
    check_model()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format_version": 1}', '{"format_version": 2, "tensors": 7}']
)
def test_an_invalid_manifest_is_refused(stage: Stage, text: str) -> None:
    stage.put(0, file_every=0)
    path = stage.run.weights / "i000001-v000000" / MANIFEST
    path.write_text(text)
    news = PublishedVersion(version="i000001-v000000", digest=version_files.digest(text.encode()))
    with pytest.raises(WeightsError, match=f"{MANIFEST}: "):
        Fetcher(stage.run, stage.rollout.store.planes, WeightsConfig()).fetch(news)


# -- disks -----------------------------------------------------------------------------------------


def fail_twice(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, error_number: int
) -> list[OSError]:
    """Let the first two calls of a function fail. Return the errors that are still to come."""
    function = getattr(module, name)
    errors = [OSError(error_number, os.strerror(error_number)) for _ in range(2)]

    def fail_or_call(*args: object, **kwargs: object) -> object:
        if errors:
            raise errors.pop()
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, fail_or_call)
    return errors


@pytest.mark.parametrize("number", sorted(CURES))
@pytest.mark.parametrize("function", ["write_summed", "sync_directory"])
def test_on_a_full_disk_files_wait_for_space(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    function: str,
) -> None:
    errors = fail_twice(monkeypatch, version_files, function, number)
    stage.put(0, last=True)
    assert stage.fetch(stage.reader()) == 0 and not errors and not WAITS
    assert (stage.run.weights / "i000001-v000000" / "model" / TENSORS).exists()
    assert os.strerror(number) in capfd.readouterr().err
    assert stage.rollout.connection.call("status")["noted"] == {}


@pytest.mark.parametrize("number", sorted(CURES))
def test_on_a_full_disk_a_manifest_waits_for_space(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    errors = fail_twice(monkeypatch, publisher, "write_atomic", number)
    stage.put(0)
    assert stage.fetch(stage.reader()) == 0 and not errors and not WAITS


def test_a_version_whose_files_are_too_large_is_published_in_memory(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(version_files, "write_summed", refuse)
    stage.put(0)
    assert stage.fetch(stage.reader()) == 0
    message = "version i000001-v000000 has no files: rank 0: [Errno 27] File too large"
    assert message in capfd.readouterr().err
    assert [path.name for path in (stage.run.weights / "i000001-v000000").iterdir()] == [MANIFEST]
    assert stage.rollout.connection.call("status")["noted"] == {"weights_unwritten/unwritten": 1}


def test_a_manifest_that_cannot_be_written_ends_the_actor(stage: Stage) -> None:
    stage.put(0)
    shutil.rmtree(stage.run.weights)
    stage.run.weights.write_text("no folder")
    message = "i000001-v000001: Not a directory; version i000001-v000001 is not published"
    with pytest.raises(Exception, match=message):
        stage.put(1)
