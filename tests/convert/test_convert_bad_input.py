"""Whatever is wrong with the source of a conversion is said in one line that names it, and leaves
no target."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax_hpc.base.errors import ConfigError
from relax_hpc.commands.program import main
from relax_hpc.convert.torch_dist import METADATA
from relax_hpc.training.checkpoint.store import MARKER
from tests.helpers.convert_helpers import DENSE, MIXED, content, model, to

WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def act(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    return act


def with_bytes(
    change: Callable[[bytearray], bytes | bytearray], name: str = WEIGHTS
) -> Callable[[Path], None]:
    def act(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        (directory / name).write_bytes(change(data))

    return act


def with_config(**change: object) -> Callable[[Path], None]:
    def act(directory: Path) -> None:
        found = json.loads((directory / "config.json").read_bytes())
        (directory / "config.json").write_text(json.dumps(found | change))

    return act


def header_of(length: int) -> Callable[[bytearray], bytes]:
    return lambda data: length.to_bytes(8, "little") + data[8:]


def flipped(at: int) -> Callable[[bytearray], bytearray]:
    def act(data: bytearray) -> bytearray:
        data[at] ^= 0x20
        return data

    return act


HF = {
    "truncated": (
        with_bytes(lambda data: data[:-1]),
        r"model\.safetensors: not a whole .* bytes, expected",
    ),
    "in its header": (with_bytes(lambda data: data[:100]), r"model\.safetensors: not a whole"),
    "empty": (with_bytes(lambda data: b""), r"a header of 0 bytes in a file of 0"),
    "longer": (with_bytes(lambda data: data + b"x"), r"not a whole"),
    "huge header": (with_bytes(header_of(1 << 60)), r"a header of 1152921504606846976 bytes"),
    "flipped header length": (with_bytes(flipped(0)), r"not a whole"),
    "flipped name": (with_bytes(flipped(60)), r"tensor .* is missing|unknown tensor|not a whole"),
    "header no JSON": (with_bytes(flipped(8)), r"not a whole"),
    "deep header": (
        with_bytes(lambda data: (9000).to_bytes(8, "little") + b"[" * 9000),
        r"not a whole",
    ),
    "missing": (
        with_tensors(lambda found: found.pop(NORM)),
        rf"tensor {NORM} is missing, expected shape \[32\]",
    ),
    "unknown": (
        with_tensors(lambda found: found.update(extra=torch.zeros(1))),
        r"unknown tensor extra",
    ),
    "mis-shaped": (
        with_tensors(lambda found: found.update({NORM: torch.zeros(31)})),
        r"has shape \[31\], expected",
    ),
    "of another type": (
        with_tensors(lambda found: found.update({NORM: torch.zeros(32, dtype=torch.int64)})),
        rf"tensor {NORM} is of type I64, allowed: F32, BF16, F16",
    ),
    "of mixed types": (
        with_tensors(
            lambda found: found.update(
                {"model.layers.1.mlp.up_proj.weight": torch.zeros(48, 32).bfloat16()}
            )
        ),
        r"up_proj\.weight is torch\.bfloat16, .* convert all to one type with --dtype",
    ),
    "twice": (
        lambda at: shutil.copyfile(at / WEIGHTS, at / "more.safetensors"),
        r"is in another file",
    ),
    "other head": (
        with_config(tie_word_embeddings=True),
        r"lm_head\.weight differs from model\.embed_tokens\.weight",
    ),
    "no config": (lambda at: (at / "config.json").unlink(), r"config\.json"),
    "config no JSON": (lambda at: (at / "config.json").write_text("{"), r"config\.json"),
    "config no object": (lambda at: (at / "config.json").write_text("[]"), r"config\.json"),
    "config without sizes": (
        lambda at: (at / "config.json").write_text("{}"),
        r"config\.json: model_type is missing",
    ),
    "config with a wrong size": (
        with_config(hidden_size="32"),
        r"hidden_size is '32', supported is a positive",
    ),
    "config with odd heads": (
        with_config(num_key_value_heads=3),
        r"num_key_value_heads is 3, .* divisor of 4 heads",
    ),
    "another family": (with_config(model_type="gemma"), r"model_type is 'gemma'"),
    "some layers dense": (
        with_config(**(MIXED | {"mlp_only_layers": [0]})),
        r"mlp_only_layers is \[0\], supported is \[\]",
    ),
    "no weights": (lambda at: (at / WEIGHTS).unlink(), r"no \*\.safetensors"),
}


def refused(
    source: Path, target: Path, says: str, capsys: pytest.CaptureFixture, *options: str
) -> None:
    """The command ends in one line, and neither a target nor anything beside it is there."""
    with pytest.raises(ConfigError, match=says):
        to(source, target)
    assert main(["convert", str(source), str(target), *options]) == 78
    *steps, error = capsys.readouterr().err.splitlines()
    assert error.startswith("relax-hpc: error: ") and len(error) < 600
    assert all(step.startswith(("part ", "file ")) for step in steps)
    assert not target.exists()


@pytest.mark.parametrize("name", HF)
def test_what_is_wrong_with_a_model_is_named(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
):
    damage, says = HF[name]
    source = model(tmp_path / "hf", DENSE)
    damage(source)
    refused(source, tmp_path / "megatron", says, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("converted")
    to(model(root / "hf", DENSE), root / "megatron", shard_bytes=20_000)
    return root / "megatron"


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "megatron"))


PART = "__1_0.distcp"
MEGATRON = {
    "part missing": (lambda at: (at / PART).unlink(), rf"{PART}: missing"),
    "part truncated": (with_bytes(lambda data: data[:-2000], PART), rf"{PART}: shard .* damaged"),
    "part empty": (with_bytes(lambda data: b"", PART), rf"{PART}: shard .* damaged"),
    "no metadata": (
        lambda at: (at / METADATA).unlink(),
        r"\.metadata: missing, so the checkpoint is incomplete",
    ),
    "metadata flipped": (
        with_bytes(flipped(700), METADATA),
        r"\.metadata: damaged.*checksum differs from the marker",
    ),
    "marker no JSON": (lambda at: (at / MARKER).write_text("{"), rf"{MARKER}: not JSON: .*damaged"),
    "headers no JSON": (
        lambda at: (at / "huggingface/headers.json").write_text("{"),
        r"headers\.json: .*--shard-size",
    ),
    "no config": (
        lambda at: shutil.rmtree(at / "huggingface"),
        r"--model: found no config\.json in .*model",
    ),
    "more layers": (
        lambda at: with_config(num_hidden_layers=3)(at / "huggingface"),
        r"tensor decoder\.layers\.\S+ has shape \[2, .*expected \[3, ",
    ),
    "tied": (
        lambda at: with_config(tie_word_embeddings=True)(at / "huggingface"),
        r"unknown tensor output_layer",
    ),
    "experts": (
        lambda at: with_config(**MIXED)(at / "huggingface"),
        r"tensor decoder\.layers\.mlp\.router\.weight is missing, expected shape \[2, 4, 32\]",
    ),
    "larger vocabulary": (
        lambda at: with_config(vocab_size=62)(at / "huggingface"),
        r"\[61, 32\], expected \[62, 32\]",
    ),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_what_is_wrong_with_a_checkpoint_is_named(copy: Path, tmp_path: Path, name: str, capsys):
    damage, says = MEGATRON[name]
    damage(copy)
    refused(copy, tmp_path / "hf", says, capsys)


def test_no_flipped_bit_of_a_part_passes(copy: Path, converted: Path, tmp_path: Path):
    to(converted, tmp_path / "expected")
    original, random_ = (copy / PART).read_bytes(), random.Random(3)
    refusals = 0
    for number in range(60):
        data = bytearray(original)
        data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        (copy / PART).write_bytes(data)
        try:
            to(copy, tmp_path / f"hf-{number}")
            # Padding and what repeats in an archive's two directories say nothing about the tensor.
            assert content(tmp_path / f"hf-{number}") == content(tmp_path / "expected")
        except ConfigError as error:
            refusals += 1
            assert PART in str(error)
    assert refusals > 30


def test_a_difference_found_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from relax_hpc.convert import to_megatron

    source = model(tmp_path / "hf", DENSE)
    original = to_megatron.fuse
    monkeypatch.setattr(to_megatron, "fuse", lambda *given: original(*given).flip(0))
    with pytest.raises(
        ConfigError, match=r"verify: \d+ of 25 tensors differ: model\.embed_tokens\.weight"
    ):
        to(source, tmp_path / "megatron", verify="digests")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dtype", "int8"], "--dtype: found 'int8', allowed: float32, bfloat16, float16"),
        (["--verify", "some"], "--verify: found 'some', allowed: digests, all"),
        (["--shard-size", "5"], "--shard-size: found '5', allowed: a number with KB, MB or GB"),
        (["--prompt", "hello"], "--prompt: found without --verify"),
        (
            ["--verify", "--prompt", "1,900"],
            "--prompt: found token ids [1, 900], allowed: at least one, each below 61",
        ),
        (["--verify", "--prompt", "hello"], "give token ids with commas between"),
        (["--partition", "gpu"], "--partition: found without --slurm"),
    ],
)
def test_wrong_options_are_explained(
    tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture
):
    source = model(tmp_path / "hf", DENSE)
    assert main(["convert", str(source), str(tmp_path / "megatron"), *options]) == 78
    assert says in capsys.readouterr().err
    assert not (tmp_path / "megatron").exists()


def test_nothing_to_convert(tmp_path: Path, capsys: pytest.CaptureFixture):
    for source in (tmp_path, tmp_path / "absent"):
        refused(source, tmp_path / "target", "found neither", capsys)
