"""`relax-hpc warm`: two steps of the run, with the jobs of its layout, or one line that says what is
missing. tests/runs/test_kernel_caches_run.py proves that the run then compiles nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE
from relax_hpc.commands import warm
from relax_hpc.commands.program import main
from relax_hpc.config import Config
from tests.helpers.run_helpers import write_config


def warm_up(tmp_path: Path, site: dict[str, object]) -> int:
    run = {"run_dir": str(tmp_path / "run"), "steps": 50, "site": site}
    return main(["warm", "--config", str(write_config(tmp_path / "run.yaml", run))])


def test_it_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, text in (
        ("", "site.kernel_cache: found '', allowed with warm: a folder on the shared filesystem"),
        ("kernels", "site.kernel_cache: found 'kernels', allowed: an absolute path"),
        (tmp_path / "open", f"site.kernel_cache: found {tmp_path}/open, where other users could"),
    ):
        (tmp_path / "open").mkdir(exist_ok=True)
        (tmp_path / "open").chmod(0o777)
        assert warm_up(tmp_path, {"kernel_cache": str(folder)}) == EXIT_CONFIG
        [line] = capsys.readouterr().err.splitlines()
        assert text in line
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.parametrize("name", ["", "cluster"])
def test_it_starts_a_short_run_as_the_run_would_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """On this machine, or by Slurm if a site is named."""
    started: list[tuple[str, Config]] = []

    def start(kind: str, config: Config) -> int:
        started.append((kind, config))
        Path(config.run_dir).mkdir()
        return EXIT_DONE

    monkeypatch.setattr(warm.local, "run", lambda config, resume: start("local", config))
    monkeypatch.setattr(warm, "submit", lambda config, **_: start("submit", config))
    folder = tmp_path / "kernels"
    assert warm_up(tmp_path, {"kernel_cache": str(folder), "name": name}) == EXIT_DONE
    [(kind, config)] = started
    assert kind == ("submit" if name else "local")
    assert (config.steps, config.eval.every, config.checkpoint.every_s) == (2, 0, 0.0)
    assert config.run_dir.startswith(f"{tmp_path}/run-warm-") and config.name.endswith("-warm")
    assert folder.stat().st_mode & 0o077 == 0
    lines = capsys.readouterr().out.splitlines()
    if name:
        assert lines == [
            f"The kernels are in {folder} when this run has finished. Then remove {config.run_dir}."
        ]
        assert Path(config.run_dir).exists(), "its jobs have not begun"
    else:
        assert lines == [
            f"{config.run_dir} is removed",
            f"{folder}: this run compiled no kernels",
        ]
        assert not Path(config.run_dir).exists()
