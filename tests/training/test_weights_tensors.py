"""A version put together of parts is the file that the safetensors library would have written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from relax_hpc.training.weights.manifest import Chunk, Manifest, lay_out_chunks
from relax_hpc.training.weights.tensors import (
    InnerTensor,
    SafetensorsFile,
    TensorInfo,
    TensorPart,
    coverage_error,
    file_header,
)

TYPES = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I64": np.int64}
SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text("abc.é", min_size=1, max_size=6), st.tuples(st.sampled_from(sorted(TYPES)), SHAPES)
)


@st.composite
def versions(
    draw: st.DrawFn,
) -> tuple[dict[str, np.ndarray], dict[str, TensorInfo], list[tuple[str, int, int, int]]]:
    """Arrays, what they are, and how they are split: (name, axis, start, stop) in any order."""
    described = {name: TensorInfo(*value) for name, value in draw(TENSORS.filter(bool)).items()}
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    arrays, split = {}, []
    for name, tensor in described.items():
        arrays[name] = rng.integers(0, 100, tensor.shape).astype(TYPES[tensor.dtype])
        axis = draw(st.integers(0, len(tensor.shape) - 1))
        size = tensor.shape[axis]
        cuts = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3)) - {size})
        split += [(name, axis, a, b) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    return arrays, described, draw(st.permutations(split))


@given(versions(), st.integers(1, 200))
def test_parts_come_together(tmp_path_factory: pytest.TempPathFactory, version, limit: int) -> None:
    arrays, tensors, split = version
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    file = SafetensorsFile(path, tensors)
    chunks = []
    for number, (begin, end, parts) in enumerate(lay_out_chunks(split, tensors, limit)):
        record = bytearray(end - begin)
        for part in parts:
            piece = arrays[part.name].take(range(part.start, part.stop), part.axis).tobytes()
            record[part.offset : part.offset + len(piece)] = piece
            file.put(part, memoryview(record))
        chunks.append(Chunk(str(number), len(record), "", parts))
        again = bytearray(len(record))
        for part in parts:
            file.get(part, memoryview(again))
        assert again == record
    file.close()
    found = load_file(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)
    manifest = Manifest("i000001-v000001", tensors, tuple(chunks))
    assert Manifest.decode(manifest.encode()) == manifest


WHOLE = {"w": TensorInfo("F32", (4, 2)), "v": TensorInfo("F32", (3,))}


@pytest.mark.parametrize(
    ("parts", "wrong"),
    [
        ([("w", 0, 0, 4), ("v", 0, 0, 3)], ""),
        ([("w", 1, 1, 2), ("v", 0, 0, 3), ("w", 1, 0, 1)], ""),
        ([("w", 0, 0, 4)], r"tensor v is split along axes \[\]"),
        ([("w", 0, 0, 4), ("v", 0, 0, 2)], "tensor v lacks rows from 2 on of axis 0"),
        (
            [("w", 0, 0, 3), ("w", 0, 2, 4), ("v", 0, 0, 3)],
            "tensor w lacks rows, or has them twice, at 2",
        ),
        ([("w", 0, 1, 4), ("v", 0, 0, 3)], "tensor w lacks rows, or has them twice, at 0"),
        ([("w", 0, 0, 2), ("w", 1, 0, 2), ("v", 0, 0, 3)], r"axes \[0, 1\]"),
        ([("w", 5, 0, 4), ("v", 0, 0, 3)], r"axes \[5\]"),
        ([("x", 0, 0, 4)], "a part of x, which is not a tensor"),
    ],
)
def test_what_is_no_partition_is_named(parts, wrong: str) -> None:
    chunks = (Chunk("0", 1000, "", tuple(TensorPart(*part, 0) for part in parts)),)
    if not wrong:
        assert not coverage_error(WHOLE, [part for chunk in chunks for part in chunk.parts])
        return
    with pytest.raises(ValueError, match=wrong):
        Manifest("i000001-v000001", WHOLE, chunks).encode()


def test_wide_types_come_first_and_are_aligned() -> None:
    header, offsets = file_header(
        {"a": TensorInfo("U8", (3,)), "b": TensorInfo("F64", (1,)), "c": TensorInfo("BF16", (1,))}
    )
    assert [offsets[name] - len(header) for name in "bca"] == [0, 8, 10] and len(header) % 8 == 0


def test_a_file_for_which_there_is_no_room_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"File too large|No space left"):
        SafetensorsFile(tmp_path / "f", {"w": TensorInfo("F64", (1 << 58,))})


@given(st.data(), st.booleans(), st.tuples(*[st.integers(1, 4)] * 3))
def test_parts_come_together_inside_of_a_tensor_of_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    turned: bool,
    sizes: tuple[int, int, int],
) -> None:
    """Each block made of two tensors of as many columns, which come in parts along either axis."""
    blocks, rows, columns = sizes
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    both, inside = (
        np.arange(blocks * (rows + 1) * columns, dtype=np.float32).reshape(
            blocks, rows + 1, columns
        ),
        {},
    )
    expected = both.transpose(0, 2, 1) if turned else both
    pieces = {
        f"{n}.{k}": both[n, first:][:count]
        for n in range(blocks)
        for k, first, count in ((0, 0, rows), (1, rows, 1))
    }
    for name, piece in pieces.items():
        block, number = map(int, name.split("."))
        inside[name] = InnerTensor(
            TensorInfo("F32", piece.shape), "all", block, number * rows, turned
        )
    with SafetensorsFile(path, {"all": TensorInfo("F32", expected.shape)}, inside) as file:
        for name, piece in pieces.items():
            axis = data.draw(st.integers(0, 1))
            cut = data.draw(st.integers(0, piece.shape[axis]))
            for start, stop in ((0, cut), (cut, piece.shape[axis])):
                record = piece.take(range(start, stop), axis).tobytes()
                file.put(TensorPart(name, axis, start, stop, 0), memoryview(record))
    assert np.array_equal(load_file(path)["all"], expected)
