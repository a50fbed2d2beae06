"""Copies on a node's own disk appear whole and once, whoever else copies or dies at it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

from relax_hpc.base import local_dir
from relax_hpc.base.errors import ConfigError, DeadlineError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config import Config
from relax_hpc.net import node_files

ROOT = Path(__file__).resolve().parents[2]
WHERE = """
import sys
from relax_hpc.config import Config
from relax_hpc.net.node_files import restart_in_local_environment
config = Config()
config.site.stage = ["environment"]
restart_in_local_environment(config, "where", sys.argv[1:])
print("in", sys.prefix, "with", sys.argv[1:])
"""


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "weights").write_bytes(b"w" * 1000)
    return folder


def test_many_processes_copy_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, copies = model(tmp_path / "model"), tmp_path / "local", []
    real = node_files.shutil.copytree
    monkeypatch.setattr(
        node_files.shutil, "copytree", lambda *a, **k: (copies.append(a), real(*a, **k))[1]
    )
    threads = [
        threading.Thread(target=node_files.copy_once, args=(source, target, 30.0)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(copies) == 1 and (target / "weights").read_bytes() == b"w" * 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local", "model"]


def test_a_dead_copier_is_replaced_and_a_living_one_waited_for(tmp_path: Path) -> None:
    source, claim = model(tmp_path / "model"), tmp_path / ".local.claim"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    claim.write_text(str(dead.pid))
    assert (node_files.copy_once(source, tmp_path / "local", 30.0) / "config.json").exists()
    (tmp_path / ".other.claim").write_text("1")
    with pytest.raises(DeadlineError, match="other"):
        node_files.copy_once(source, tmp_path / "other", 0.3)


def test_the_model_is_staged_where_the_site_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = RunDir(tmp_path / "run"), Config()
    run.create()
    model(run.model)
    monkeypatch.setenv(local_dir.LOCAL_DIR, str(tmp_path / "disk"))
    assert node_files.model_directory(run, config) == run.model
    config.site.stage = ["model"]
    found = node_files.model_directory(run, config)
    assert found.parent == tmp_path / "disk" and (found / "config.json").exists()
    (tmp_path / "disk").chmod(0o777)
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        local_dir.local_folder()


def test_a_process_goes_on_in_a_copy_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment with symbolic links, as `venv` makes them: the copy is entered once,
    and is whole."""
    venv, disk = tmp_path / "venv", tmp_path / "disk"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", venv], check=True, timeout=60
    )
    packages = next(venv.glob("lib/python3.*/site-packages"))
    (packages / "ours.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    (packages / "where.py").write_text(WHERE)
    monkeypatch.setenv(local_dir.LOCAL_DIR, str(disk))
    words = [venv / "bin" / "python", "-m", "where", "word"]
    said = [
        subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        for _ in range(2)
    ]
    (copy,) = disk.glob("environment-*")
    assert said == [f"in {copy} with ['word']\n"] * 2


def test_each_node_takes_its_own_temporary_folder(tmp_path: Path) -> None:
    """TMPDIR of the batch node is inherited by roles of other jobs and nodes, where it may not be,
    or another is."""
    batch = {
        "RELAX_TMPDIR": "/local/job1",
        "RELAX_LOCAL_DIR": "/local/job1/me-relax",
        "HF_HOME": "/shared/hf",
    }
    batch["TRITON_CACHE_DIR"] = "/local/job1/me-relax/triton"
    for here, expected in ((str(tmp_path), str(tmp_path)), ("/local/job1", "/tmp"), ("", "/tmp")):
        environment = batch | {"TMPDIR": here}
        local_dir.use_folders_of_this_node(environment)
        assert environment == {
            "TMPDIR": expected,
            "RELAX_LOCAL_DIR": f"{expected}/me-relax",
            "TRITON_CACHE_DIR": f"{expected}/me-relax/triton",
            "HF_HOME": "/shared/hf",
        }
    chosen = {"RELAX_LOCAL_DIR": "/nvme/me-relax", "TMPDIR": "/nowhere"}
    local_dir.use_folders_of_this_node(environment := dict(chosen))
    assert environment == chosen, "the site's own folder is the same on each node"
    local_dir.use_folders_of_this_node(
        environment := chosen | {"RELAX_TMPDIR": "/local/job1", "TMPDIR": str(tmp_path)}
    )
    assert environment == chosen | {"TMPDIR": str(tmp_path)}, (
        "also where site.env names it, after the job's own"
    )
