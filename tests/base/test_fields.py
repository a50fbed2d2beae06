"""Fields are declared once: one line more in the table, and the values come from the rollout's put
to the loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.base import fields
from relax_hpc.base.fields import FieldSpec, as_markdown
from relax_hpc.base.versions import Version
from relax_hpc.queue.plan import GENERATED
from relax_hpc.queue.row_schema import BadRow
from relax_hpc.queue.storage.columns import parse_columns
from relax_hpc.queue.storage.hdf5 import read
from relax_hpc.queue.storage.hdf5_writer import write
from relax_hpc.queue.storage.shard import pack, unpack
from tests.helpers.queue_helpers import rows_of

ROOT = Path(__file__).parents[2]


def test_every_field_is_explained_in_the_docs() -> None:
    told = (ROOT / "docs/reference/fields.md").read_text()
    table = "\n".join(as_markdown())
    assert table in told, (
        "the table in docs/reference/fields.md is not that of relax_hpc/base/fields.py, which is "
        f"now\n{table}"
    )


@pytest.mark.parametrize("what", ["new_fields", "new_role"])
def test_what_is_new_in_a_table_is_known_everywhere(tmp_path: Path, what: str) -> None:
    """Fields from the rollout's put to the loss's batch; a role from its claim to the actor's."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.base.{what}", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


LOAD = """
import sys
from relax_hpc.config.load import load
from relax_hpc.base.fields import FIELDS

load([], {"rollout.engine.kind": sys.argv[1]})
print("routes" in FIELDS, "torch" in sys.modules)
"""


@pytest.mark.parametrize("kind", ["built_in", "transformers"])
def test_a_built_in_engine_declares_its_fields_in_its_class(kind: str) -> None:
    """As a plug-in does. The library of an engine without fields is not imported for that."""
    register = (
        "from relax_hpc.base import engine_classes\n"
        "engine_classes.ENGINE_CLASSES['built_in'] = 'tests.helpers.routes_engine:RoutesEngine'"
    )
    command = [sys.executable, "-c", register + LOAD, kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(kind == "built_in"), "False"]


INHERITED = """
import sys
from relax_hpc.base import engine_classes
from relax_hpc.config.load import load
from relax_hpc.rollout.engines import make_engine

engine_classes.ENGINE_CLASSES["derived"] = "derived_engine:DerivedEngine"
make_engine(load([], {"rollout.engine.kind": "derived"}), 0, None, None, None)
"""


def test_inherited_fields_of_a_built_in_engine_are_refused(tmp_path: Path) -> None:
    """The search in the source does not find them: they would be missing in the queue."""
    (tmp_path / "derived_engine.py").write_text(
        "from tests.helpers.routes_engine import RoutesEngine\n\n\nclass DerivedEngine(RoutesEngine):\n    "
        "pass\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    command = [sys.executable, "-c", INHERITED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "found fields routes that DerivedEngine inherits" in done.stderr


@pytest.fixture(name="routes")
def routes_fixture(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """What a row has where the table has a field with a tail of any length."""
    monkeypatch.setitem(
        fields.FIELDS, "routes", FieldSpec("routes", "token", "uint8", "", tail=(None, 2))
    )
    return (*GENERATED, "routes")


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([(5, 3, 2), (5, 3, 2)], ""),
        ([(5, 3), (5, 3)], r"routes: found uint8 \[5, 3\], expected uint8 \[tokens, \*, 2\]"),
        ([(5, 3, 4), (5, 3, 4)], r"routes: found uint8 \[5, 3, 4\], expected"),
        (
            [(5, 3, 2), (5, 4, 2)],
            r"routes: found entries of \(3, 2\) and of \(4, 2\), expected one shape",
        ),
        ([(5, 0, 2), (5, 0, 2)], r"routes: found uint8 \[5, 0, 2\], expected"),
        ([(4, 3, 2), (5, 3, 2)], r"routes: 4 entries for 5 tokens in 000000000\.00"),
    ],
)
def test_entries_of_tokens_have_one_shape(
    tmp_path: Path, routes: tuple[str, ...], shapes: list, says: str
) -> None:
    rows = [
        {**row, "routes": np.full(shape, k, np.uint8)}
        for k, (row, shape) in enumerate(zip(rows_of([0], Version(1, 0)), shapes, strict=True))
    ]
    if says:
        with pytest.raises(BadRow, match=says):
            pack(rows, routes, {})
        return
    record = pack(rows, routes, {"group": "rollout", "incarnation": 1})
    write(tmp_path / "a.h5", parse_columns(record), {"run": "a"}, sync=False)
    for found in (unpack(record), read(tmp_path / "a.h5")):
        assert all(np.array_equal(found[row["row_id"]]["routes"], row["routes"]) for row in rows)
