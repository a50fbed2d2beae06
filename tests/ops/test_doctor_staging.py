"""What the doctor finds about modules and staging without a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config import load
from relax_hpc.ops.doctor.modules import check_staging
from tests.helpers.model_files import model_directory

OLD_TCL = (
    'module() { [[ $2 == cuda/12 ]] || echo "ModuleCmd_Load.c(213):ERROR:105: Unable to '
    'locate $2" >&2; }'
)
LMOD = (
    'module() { [[ $2 == cuda/12 ]] || { printf "Lmod has detected\\n  error: $2 unknown\\n" '
    ">&2; return 1; }; }"
)


def found(**site: Any) -> list[str]:
    path = site.pop("path", "")
    over = {"model.path": path, **{f"site.{key}": value for key, value in site.items()}}
    return [f"{one.severity}: {one.text}" for one in check_staging(load([], over))]


@pytest.mark.parametrize("profile", [OLD_TCL, LMOD], ids=["Tcl", "Lmod"])
def test_modules_are_loaded_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    (tmp_path / ".bash_profile").write_text(profile + "\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found(modules=["cuda/12"]) == []
    (line,) = found(modules=["cuda/99"])
    assert line.startswith(
        "error: site.modules: found cuda/99, which cannot be loaded on this host: "
    )
    assert "cuda/99 unknown" in line or "Unable to locate cuda/99" in line


def test_modules_are_looked_for_where_the_site_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`module use` and what a profile defines come before; what fails after lines for a node may do
    so here alone."""
    (tmp_path / ".bash_profile").write_text("unset -f module\n")
    (tmp_path / "profile").write_text(LMOD.replace("cuda/12", "$KNOWN") + "\necho hello\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    setup = [
        f"source {tmp_path}/profile",
        "export KNOWN='cuda/12'  # where they lie",
        "# the last line",
    ]
    assert found(modules=["cuda/12"], setup=setup) == []
    (line,) = found(modules=["cuda/99"], setup=setup)
    assert (
        line.startswith("warning: site.modules: found cuda/99, which cannot be loaded")
        and "unknown" in line
    )


def test_a_module_that_complains_in_another_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bash_profile").write_bytes(
        b"module() { printf 'error: \\xfcnbekannt\\n'; return 1; }\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    (line,) = found(modules=["cuda/99"])
    assert line.startswith("error: site.modules: found cuda/99") and "nbekannt" in line


def test_a_host_without_modules_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".bash_profile").write_text("unset -f module\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    (line,) = found(modules=["cuda/12"])
    assert line.startswith("warning: site.modules: cuda/12 not checked, because this host has no")


def test_a_local_dir_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_directory(tmp_path / "model", hidden_size=8192, intermediate_size=65536)
    assert found(path=str(model), stage=["model"], local_dir=str(tmp_path / "new" / "folder")) == []
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*room[:4], 1000, *room[5:])))
    (line,) = found(path=str(model), stage=["model"], local_dir=str(tmp_path / "new"))
    assert "error: site.local_dir:" in line and "(model)" in line
    assert found(path=str(model), local_dir=str(tmp_path)) == [], "nothing is staged"
    (tmp_path / "file").touch()
    (line,) = found(path=str(model), stage=["model"], local_dir=str(tmp_path / "file" / "x"))
    assert "you cannot write in" in line
