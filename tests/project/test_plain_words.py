"""Code and pages are in plain words, within the bounds that CONTRIBUTING.md lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plain_words import Counts, count, public_classes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "relax_hpc"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
COMMENTED = ("cluster", "net", "training", "rollout/engines/sglang")
"""Packages that deal with Slurm, MPI, NCCL, megatron-core and SGLang."""
PAGES = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
COUNTED = ("method called of", "dense comprehension", "nested conditional")


def examples(counts: Counts, rule: str) -> str:
    return "\n" + "\n".join(counts.findings.get(rule, ())[:20])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_in_plain_words(room: str) -> None:
    counts = count([PACKAGE / room])
    assert counts.vague_names_per_100_functions <= 5, examples(counts, "vague name")
    assert counts.idioms_per_1000_lines <= 2, examples(counts, "idiom")
    for rule in COUNTED:
        assert counts.number(rule) == 0, examples(counts, rule)


@pytest.mark.parametrize("room", COMMENTED)
def test_workarounds_are_explained(room: str) -> None:
    assert count([PACKAGE / room]).comment_percent >= 3


def test_pages_are_in_plain_words() -> None:
    counts = count([ROOT / name for name in PAGES])
    assert counts.idioms_per_1000_page_words <= 2, examples(counts, "idiom of a page")


def test_a_class_name_means_one_thing() -> None:
    folders = public_classes(PACKAGE)
    assert {name: where for name, where in folders.items() if len(where) > 2} == {}
