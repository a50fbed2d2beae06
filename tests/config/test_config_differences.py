"""A changed setting is named by its key, whatever section it is in."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands.run_setup import FIXED, check_resumable
from relax_hpc.config import dump, load
from relax_hpc.config.differences import differences
from relax_hpc.config.options import options
from relax_hpc.config.schema import Config

LEAVES = [option.key for option in options() if option.key.partition(".")[0] in FIXED]


def with_other_value(config: Config, key: str) -> Config:
    """``config`` with another value for ``key``, of whatever type."""
    other = copy.deepcopy(config)
    *sections, name = key.split(".")
    section: Any = functools.reduce(getattr, sections, other)
    setattr(section, name, "other")
    return other


def test_each_leaf_is_named_alone() -> None:
    config = Config()
    for key in LEAVES:
        section = key.partition(".")[0]
        changed = with_other_value(config, key)
        pair = getattr(changed, section), getattr(config, section)
        [(name, value, kept)] = differences(*pair, section)
        assert name == key and value == "'other'" and "Config(" not in kept


def test_settings_of_maps_are_named_too() -> None:
    first, second = {"eval": {"a": "/a", "b": "/b"}}, {"eval": {"a": "/a", "c": "/c"}}
    assert list(differences(first, second, "data")) == [
        ("data.eval.b", "'/b'", "nothing"),
        ("data.eval.c", "nothing", "'/c'"),
    ]
    assert len(next(differences("x" * 1000, "", "data.system"))[1]) < 210


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"model.path": "/other"}, ["model.path: found '/other', a run keeps '/mine'"]),
        ({"data.train": "/b.jsonl"}, ["data.train: found '/b.jsonl', a run keeps '/a.jsonl'"]),
        ({"prompts_per_step": 8}, ["prompts_per_step: found 8, a run keeps 4"]),
        (
            {"model.tiny.num_layers": 3, "model.dtype": "bfloat16"},
            [
                "model.dtype: found 'bfloat16', a run keeps 'float32'",
                "model.tiny.num_layers: found 3, a run keeps 2",
            ],
        ),
    ],
)
def test_a_resume_with_another_fixed_setting_says_which(
    tmp_path: Path, settings: dict[str, Any], texts: list[str]
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    shape = {
        "run_dir": str(run.root),
        "model.path": "/mine",
        "data.train": "/a.jsonl",
        "prompts_per_step": 4,
    }
    dump(load([], shape), run.config)
    with pytest.raises(ConfigError) as caught:
        check_resumable(run, load([], shape | settings))
    mistakes = sorted(line.removeprefix(f"{run.config}: ") for line in caught.value.mistakes)
    assert mistakes == [f"{text}; start a new run_dir" for text in texts]


@pytest.mark.parametrize("value", ["text", [1]])
def test_a_section_that_is_something_else_is_not_printed(value: Any) -> None:
    """Errors name the section; none shows how Python prints its class."""
    sections = {option.key.rpartition(".")[0] for option in options()} - {""}
    for section in sections:
        with pytest.raises(ConfigError) as caught:
            load([], {section: value})
        text = str(caught.value)
        assert section in text
        assert not re.search(r"[A-Za-z]\(\w+=|<\w+ object|<class", text), text
