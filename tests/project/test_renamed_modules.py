"""Modules have the names of release 0.1, too. Both names import the same module."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from relax_hpc.renamed_modules import KEPT, RENAMED, present_name

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    ("relax_hpc.rundir", "relax_hpc.base.rundir"),
    ("relax_hpc.multimodal.bad", "relax_hpc.data.multimodal.bad_media"),
    ("relax_hpc.transfer_queue.storage.shard", "relax_hpc.queue.storage.shard"),
    ("relax_hpc.engines.stops", "relax_hpc.rollout.engines.stops"),
    ("relax_hpc.rollout.turns", "relax_hpc.rollout.episodes.turns"),
    ("relax_hpc.tasks.sort_digits", "relax_hpc.examples.tasks.sort_digits"),
]


@pytest.mark.parametrize(("old", "present"), PAIRS)
def test_an_old_name_is_the_same_module_with_a_warning(old: str, present: str) -> None:
    program = f"""
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import {old} as old, {present} as present
    from {old.rpartition(".")[0]} import {old.rpartition(".")[2]} as attribute
print(old is present is attribute, [str(warning.message) for warning in caught][-1])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout == f"True {old} is {present} now\n", done.stderr


def test_names_in_files_of_users_stay_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in KEPT:
            importlib.import_module(f"relax_hpc.{name}")
    from relax_hpc.engines.engine import Engine
    from relax_hpc.rollout.engines.engine import Engine as Present

    assert Engine is Present


@pytest.mark.parametrize("present", sorted(set(RENAMED.values())))
def test_each_name_leads_to_a_module(present: str) -> None:
    folder = ROOT if present.startswith("examples.") else ROOT / "relax_hpc"
    path = folder / present.replace(".", "/")
    assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_an_unknown_module_is_still_not_found() -> None:
    assert present_name("relax_hpc.config.load") == ""
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("relax_hpc.multimodal.nothing")


@pytest.mark.parametrize(
    ("module", "old", "present"),
    [
        ("data.prompts", "prompts_of", "parse_rows"),
        ("data.multimodal.bad_media", "BadMedium", "UnusableMedium"),
        ("queue.storage.media", "BadMedia", "MediaMismatch"),
        ("rollout.episodes.turns", "Start", "EpisodeStart"),
        ("rollout.rows", "PromptSource", "PromptSource"),
    ],
)
def test_an_old_name_in_a_module_is_the_same_object(module: str, old: str, present: str) -> None:
    namespace = importlib.import_module(f"relax_hpc.{module}")
    assert getattr(namespace, old) is getattr(namespace, present)
