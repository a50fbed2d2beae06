"""Files of weights in a Hugging Face directory, and their headers, read without torch.

This is the only reader of safetensors headers besides the safetensors library, which
models/hf_files.py uses to load a model. The library (0.8.0) is not used here for these reasons:

- `safe_open` maps the file. If the file is shorter than its header says, or a shared file system
  cannot read it, the process ends by SIGBUS without a message. A read that fails raises an error
  with the name of the file.
- The mapping is private and writable, so that the whole file counts to RLIMIT_DATA: 776 MiB for a
  file of 768 MiB. `read_pieces` needs the memory of one piece.
- The library does not tell where a tensor begins, and does not return the header byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import INDEX_BYTES, open_regular, parse_json, read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "U8": 1}
"""Types of tensors in files -> bytes of a number."""
ITEM_BYTES = {name: TYPE_BYTES[name] for name in ("F32", "BF16", "F16")}
"""Types that trained weights may have."""
MAX_HEADER_BYTES = 100_000_000
"""Bytes of a header at most, which is the safetensors library's own limit."""
_OTHER_FORMATS = ("consolidated",)
"""Prefixes of files with the same weights in a publisher's format, such as Mistral's. transformers
and SGLang do not read them if the directory has an index."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
"""Patterns of files of weights that only Python's pickle can read."""
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file; `start` in bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * TYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Header of a file: its text, byte for byte, and its tensors in the order of their bytes."""

    text: str
    tensors: dict[str, StoredTensor]


def _other_weights(directory: Path) -> str:
    """Remedy for a directory without weights that can be read."""
    pickled: list[str] = []
    for pattern in _PICKLED:
        pickled += [path.name for path in directory.glob(pattern)]
    if not pickled:
        return "its weights are missing: download it again, whole"
    return (
        f"found {pickled[0]}, which is pickled and may run code when it is read; convert it with "
        "transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER)"
    )


def weight_files(directory: Path) -> list[Path]:
    """The *.safetensors files of the model in ``directory``.

    These are the files that its index names, or all files if it has no index. ConfigError: there
    are none, one is missing, or a further file makes the choice ambiguous.
    """
    # Opening a FIFO with such a name would block.
    files = [path for path in sorted(directory.glob("*.safetensors")) if path.is_file()]
    if not (directory / INDEX).is_file():
        if not files:
            raise ConfigError(f"found no *.safetensors in {directory}; {_other_weights(directory)}")
        return files
    names = _indexed(directory / INDEX)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            f"found no {', '.join(missing[:4])} in {directory}, which its index names; download it "
            "again"
        )
    for path in files:
        if path.name not in names and not path.name.startswith(_OTHER_FORMATS):
            raise ConfigError(
                f"found {path.name} in {directory}, which its index does not name; remove the "
                "file or the index, as programs differ in which of them they read"
            )
    return [directory / name for name in names]


def _indexed(path: Path) -> list[str]:
    """Names of the files in an index. ConfigError: it is invalid."""
    try:
        names = sorted(set(read_json_object(path, most_bytes=INDEX_BYTES)["weight_map"].values()))
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: found no weight_map of file names ({error!r}); download it again"
        ) from error
    wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if wrong or not names:
        value = repr(wrong[0]) if wrong else "no files"
        raise ConfigError(
            f"{path}: found {value}, allowed: names of files in the same folder; download it again"
        )
    return names


def read_header(path: Path, types: Collection[str] = ITEM_BYTES) -> FileHeader:
    """The header of a complete file whose tensors have these ``types``. ConfigError: it is damaged
    or incomplete."""
    try:
        with open_regular(path) as file:
            size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            text = file.read(length).decode()
        return FileHeader(text, _tensors(text, 8 + length, size, types))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a whole safetensors file ({error}); download it again"
        ) from error


def _tensors(text: str, begin: int, size: int, types: Collection[str]) -> dict[str, StoredTensor]:
    """Tensors of a header ``text``. Their bytes must fill ``begin`` to ``size`` without gaps."""
    entries: dict[str, Any] = parse_json(text, is_unique=True)
    entries.pop("__metadata__", None)
    tensors, end = {}, begin
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in types:
            raise ValueError(
                f"tensor {name} is of type {entry['dtype']}, allowed: {', '.join(types)}"
            )
        stored = StoredTensor(entry["dtype"], tuple(entry["shape"]), end)
        if any(type(length) is not int or length < 0 for length in stored.shape):
            raise ValueError(f"tensor {name} has shape {entry['shape']}")
        if entry["data_offsets"] != [end - begin, end - begin + stored.bytes]:
            raise ValueError(
                f"tensor {name} lies at {entry['data_offsets']}, expected {end - begin} on"
            )
        tensors[name] = stored
        end += stored.bytes
    if end != size:
        raise ValueError(f"{size} bytes, expected {end}")
    return tensors


def stored_tensors(directory: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """Each tensor in ``directory`` with its file. ConfigError: a file is damaged, or two files have
    the same tensor."""
    tensors: dict[str, tuple[Path, StoredTensor]] = {}
    for path in weight_files(directory):
        for name, stored in read_header(path).tensors.items():
            if name in tensors:
                raise ConfigError(
                    f"{path}: tensor {name} lies in {tensors[name][0].name} too; remove one of the "
                    "files"
                )
            tensors[name] = path, stored
    return tensors


def check_tied(
    tensors: Mapping[str, tuple[Path, StoredTensor]], output: str, embedding: str
) -> None:
    """Check the tensor ``output`` of a model whose config.json ties it to ``embedding``.

    ``tensors``: see `stored_tensors`. ConfigError: both are stored, and they differ.
    """
    if output not in tensors or embedding not in tensors:
        return
    if not _are_equal(tensors[output], tensors[embedding]):
        raise ConfigError(
            f"{tensors[output][0]}: tensor {output} differs from {embedding}, and config.json has "
            "tie_word_embeddings true; one of the two is wrong"
        )


def _are_equal(first: tuple[Path, StoredTensor], second: tuple[Path, StoredTensor]) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    if (first[1].dtype, first[1].shape) != (second[1].dtype, second[1].shape):
        return False
    return all(a == b for a, b in zip(read_pieces(*first), read_pieces(*second), strict=True))


def read_pieces(path: Path, stored: StoredTensor) -> Iterator[bytes]:
    """Bytes of a tensor, in pieces. ConfigError: the file is too short."""
    with open_regular(path) as file:
        file.seek(stored.start)
        for start in range(0, stored.bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, stored.bytes - start)
            piece = file.read(size)
            if len(piece) < size:
                raise ConfigError(f"{path}: shorter than its header says; download it again")
            yield piece
