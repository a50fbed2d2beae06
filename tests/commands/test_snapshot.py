"""The copy of the code that a run is made of."""

from __future__ import annotations

import struct
import subprocess
import sys
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

import relax_hpc
from relax_hpc.commands.snapshot import copy_code


def test_the_copy_is_compiled_so_that_no_rank_compiles_it_at_its_start(tmp_path: Path) -> None:
    copy_code(Path(relax_hpc.__file__).parents[1], tmp_path / "code")
    sources = list((tmp_path / "code/relax_hpc").rglob("*.py"))
    for source in sources:
        header, about = Path(cache_from_source(str(source))).read_bytes()[:16], source.stat()
        # By the time and size of its source: who edits the copy by hand is heard.
        assert header == MAGIC_NUMBER + struct.pack(
            "<III", 0, int(about.st_mtime), about.st_size
        ), source
    assert len(sources) == len(list(Path(relax_hpc.__file__).parent.rglob("*.py")))


def test_the_copy_of_a_checkout_has_its_own_examples(tmp_path: Path) -> None:
    copy_code(Path(relax_hpc.__file__).parents[1], tmp_path / "code")
    program = (
        "from relax_hpc.examples.tasks import sort_digits; print(sort_digits.__file__, end='')"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path / "code", capture_output=True, text=True, timeout=60, check=True
    )
    assert (
        Path(done.stdout).resolve() == (tmp_path / "code/examples/tasks/sort_digits.py").resolve()
    )


def test_a_folder_beside_an_installed_package_belongs_to_another_project(tmp_path: Path) -> None:
    for name in ("relax_hpc/templates", "relax_hpc/examples", "examples", "slurm"):
        (tmp_path / "site" / name).mkdir(parents=True)
    copy_code(tmp_path / "site", tmp_path / "code")
    assert [path.name for path in (tmp_path / "code").iterdir()] == ["relax_hpc"]
