"""The wheel, installed in a new virtual environment, as its user works with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_hpc import __version__
from relax_hpc.base.rundir import RunDir
from tests.project.test_packaging import ROOT, files_of_the_image
from tests.requirements import requires

pytestmark = pytest.mark.run
RUN_S = 240.0


class Installed:
    """A virtual environment with the wheel, and an empty folder to work in."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder

    def run(self, *words: str, code: int = 0) -> str:
        """What `relax-hpc WORDS` prints, both streams. AssertionError: another exit code."""
        command = [str(self.python.parent / "relax-hpc"), *words]
        # Nothing of the checkout: neither its folder nor its environment.
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == code, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The wheel of this checkout. It sees the dependencies of this environment by a `.pth` file,
    which shows packages but no editable installations."""
    folder = tmp_path_factory.mktemp("wheel")
    source, wheels, environment = folder / "source", folder / "wheels", folder / "environment"
    # Building writes into the folder that it builds from.
    copy_sources(source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source)]
    subprocess.run(build, check=True, timeout=RUN_S, env=clean_environment())
    [wheel] = wheels.iterdir()
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60
    )
    python = environment / "bin" / "python"
    install = [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=RUN_S, env=clean_environment())
    [site] = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (folder / "work").mkdir()
    yield Installed(python, folder / "work")


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def copy_sources(target: Path) -> None:
    """Copy what the package is built from, as the container image does."""
    target.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    names = {source for source, _ in files_of_the_image()} | {"README.md"}
    for name in sorted(names - {"env", "tools"}):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, target / name, ignore=ignored)
        else:
            shutil.copy(path, target / name)


def test_the_wheel_is_this_version_and_typed(installed: Installed) -> None:
    assert installed.run("--version").split()[-1] == __version__
    [package] = installed.python.parents[1].glob("lib/python*/site-packages/relax_hpc")
    assert (package / "py.typed").is_file()
    files = {
        str(path.relative_to(ROOT / "configs"))
        for path in (ROOT / "configs").rglob("*")
        if path.is_file()
    }
    assert {name for name in files if not (package / "configs" / name).is_file()} == set()


def test_a_packaged_configuration_runs_in_an_empty_folder(installed: Installed) -> None:
    requires("torch", "megatron", "sglang")
    printed = installed.run("run", "--config", "quickstart", "--steps", "2", "--eval.every", "0")
    assert "finished in" in printed
    assert [path.name for path in installed.folder.iterdir()] == ["runs"]
    assert RunDir(installed.folder / "runs" / "quickstart").finished.exists()


def test_commands_find_packaged_files_by_name(installed: Installed) -> None:
    assert installed.run("check", "--config", "quickstart") == "no findings\n"
    printed = installed.run("plan", "--config", "1-nodes", "--model.path", "Qwen3-0.6B")
    assert "fits" in printed
    run_dir = str(installed.folder / "submitted")
    files = (
        "--config",
        "quickstart",
        "--config",
        "sandbox",
        "--config",
        "alex",
        "--layout",
        "jobs",
    )
    installed.run("submit", "--dry-run", *files, "--run_dir", run_dir)
    assert list(Path(run_dir).rglob("*.sbatch"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "quikstart",
            "the path of a YAML file (with a slash or .yaml), or one of the packaged audio,",
        ),
        ("quickstart.yaml", "quickstart.yaml: cannot be read: No such file"),
        ("runs/quickstart", "runs/quickstart: cannot be read: "),
    ],
)
def test_a_path_is_no_name_and_an_unknown_name_lists_the_known(
    installed: Installed, name: str, says: str
) -> None:
    printed = installed.run("check", "--config", name, code=78)
    assert says in printed
    assert ("did you mean quickstart" in printed) == (name == "quikstart")
