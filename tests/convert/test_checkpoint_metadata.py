"""`.metadata` is a pickle of somebody else: every Python's form of it is read, and nothing that it
names is run.

It is torch's format for `torch_dist`, which nobody can choose. `pickle.loads` stands here alone,
where a test has just had the file written, to write it again in another form; the package reads it
by `convert.metadata` only.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex

from relax_hpc.commands.program import main
from relax_hpc.convert.metadata import UnknownEntryError, read_metadata
from relax_hpc.convert.torch_dist import METADATA
from relax_hpc.training.checkpoint.store import MARKER
from tests.helpers.convert_helpers import DENSE, content, model, to


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a marker, as somebody else's may be."""
    root = tmp_path_factory.mktemp("converted")
    to(model(root / "hf", DENSE), root / "megatron")
    (root / "megatron" / MARKER).unlink()
    return root / "megatron"


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "megatron"))


def written_by(form: str, found: object) -> bytes:
    """The pickle of `found` as a Python writes it whose enums have that form."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: object) -> Any:
            if not isinstance(value, enum.Enum):
                return NotImplemented
            of = type(value)
            return (getattr, (of, value.name)) if form == "getattr" else (of, (value.value,))

    file = io.BytesIO()
    Pickler(file).dump(found)
    return file.getvalue()


@pytest.mark.parametrize("form", ["getattr", "value"])
def test_what_one_patch_level_of_python_wrote_another_reads(
    form: str, copy: Path, tmp_path: Path
) -> None:
    whole = pickle.loads((copy / METADATA).read_bytes())
    (copy / METADATA).write_bytes(written_by(form, whole))
    assert (b"getattr" in (copy / METADATA).read_bytes()) == (form == "getattr")
    to(copy, tmp_path / "hf")
    assert (
        content(tmp_path / "hf")["model.safetensors"]
        == (copy.parent / "hf/model.safetensors").read_bytes()
    )
    with (copy / METADATA).open("rb") as file:
        tensors, stored = read_metadata(file)
    assert list(tensors) == [
        key for key, about in whole.state_dict_metadata.items() if hasattr(about, "properties")
    ]
    assert {about.properties.memory_format for about in tensors.values()} == {
        torch.contiguous_format
    }
    assert len(stored) == sum(index.offset is not None for index in whole.storage_data)


class Reduced:
    """Pickled as a call."""

    def __init__(self, function: object, *given: object, state: object = None) -> None:
        self.made = (function, given, state)

    def __reduce__(self) -> tuple:
        return self.made


def refused(at: Path, found: object, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`convert` ends with 78 and one line that says it, and no target is there."""
    (at / METADATA).write_bytes(found if isinstance(found, bytes) else pickle.dumps(found))
    assert main(["convert", str(at), str(at.parent / "target")]) == 78
    line = capsys.readouterr().err
    assert (
        line.startswith(f"relax-hpc: error: {at / METADATA}: ")
        and line.count("\n") == 1
        and says in line
    )
    assert not (at.parent / "target").exists()


def test_a_checkpoint_of_somebody_else_runs_nothing(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """torch's own converter, below a module that a checkpoint's metadata comes from, unpickles
    whatever it is given."""
    torch.save(Reduced(os.mkdir, str(tmp_path / "sprung")), copy / "__0_0.distcp")
    trap = Reduced(torch_save_to_dcp, str(copy / "__0_0.distcp"), str(tmp_path / "dcp"))
    refused(
        copy,
        trap,
        "unknown entry: torch.distributed.checkpoint.format_utils.torch_save_to_dcp",
        capsys,
    )
    assert not (tmp_path / "sprung").exists()


def test_an_unknown_entry_is_not_called_damaged(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (copy / METADATA).read_bytes()
    refused(copy, Reduced(os.system, "false"), "unknown entry: posix.system is not a name", capsys)
    refused(copy, whole[:-9], "damaged; name another checkpoint", capsys)
    other = pickle.loads(whole)
    next(
        about for about in other.state_dict_metadata.values() if hasattr(about, "size")
    ).size = "many"
    refused(copy, other, "is not described as a tensor is", capsys)
    refused(copy, {}, "damaged; name another checkpoint", capsys)


@pytest.mark.parametrize("trap", ["method", "chain", "eval", "dotted"])
def test_getattr_gives_members_of_the_one_enum_only(trap: str) -> None:
    found = {
        "method": Reduced(getattr, Metadata, "__init__"),
        "chain": Reduced(getattr, Reduced(getattr, _MEM_FORMAT_ENCODING, "mro"), "__self__"),
        "eval": Reduced(eval, "1"),
        # Pickle follows the dots of a name by itself.
        "dotted": Reduced(Metadata.__init__),
    }[trap]
    with pytest.raises((UnknownEntryError, KeyError)):
        read_metadata(io.BytesIO(pickle.dumps(found)))


@pytest.mark.parametrize("of", [Metadata, MetadataIndex, Path, torch.Size])
def test_a_pickle_changes_no_class(of: type) -> None:
    """BUILD sets attributes of any object that it is given: here of the class itself, named and not
    called."""
    name = f"{of.__module__}\n{of.__name__}\n" if of is not Path else "pathlib\nPosixPath\n"
    state = pickle.dumps((None, {"fqn": "changed"}), protocol=2)[2:-1]
    with pytest.raises((UnknownEntryError, AttributeError, TypeError)):
        read_metadata(io.BytesIO(b"\x80\x02c" + name.encode() + state + b"b."))
    assert getattr(of, "fqn", "") != "changed"
