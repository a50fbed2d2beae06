"""Settings changed for one group of a living run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.config import Config, dump, load, load_resolved
from relax_hpc.config.changes import add_change, change_files, retire_changes


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory with its configuration."""
    run = RunDir(tmp_path / "run")
    run.create()
    dump(
        load([], {"run_dir": str(run.root), "groups.rollout.env": {"A": "1", "B": "2"}}), run.config
    )
    return run


def changed(run: RunDir, group: str, **overrides: Any) -> Path | None:
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return add_change(run, load_resolved(run.root, group), group, [], named)


def test_layers_add_up_for_their_group_alone(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "change.yaml"
    file.write_text(
        "rollout: {temperature: 0.5, top_p: 0.9}\ngroups: {rollout: {resources: {nodes: 2}}}\n"
    )
    config = load_resolved(run.root, "rollout")
    first = add_change(run, config, "rollout", [file], {"rollout": {"temperature": 0.6}})
    second = changed(run, "rollout", groups__rollout__resources__nodes=3)
    assert change_files(run, "rollout") == [first, second] and not change_files(run, "actor")
    found = load_resolved(run.root, "rollout")
    assert (
        found.rollout.temperature,
        found.rollout.top_p,
        found.groups["rollout"].resources.nodes,
    ) == (0.6, 0.9, 3)
    for name in ("", "actor"):
        assert load_resolved(run.root, name).rollout.temperature == 1.0


def test_members_have_the_changes_of_their_group_and_their_own(run: RunDir) -> None:
    changed(run, "rollout", rollout__temperature=0.5)
    changed(run, "rollout-2", rollout__top_p=0.7)
    member, first = load_resolved(run.root, "rollout-2"), load_resolved(run.root, "rollout")
    assert (member.rollout.temperature, member.rollout.top_p) == (0.5, 0.7)
    assert (first.rollout.temperature, first.rollout.top_p) == (0.5, 1.0)


def test_null_takes_out_what_the_run_has(run: RunDir) -> None:
    changed(run, "rollout", groups__rollout__env__A=None)
    assert load_resolved(run.root, "rollout").groups["rollout"].env == {"B": "2"}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "actor.optimizer.lr",
            1.0,
            "this setting does not belong to group rollout alone, allowed: groups.rollout, profile, reward, rollout",
        ),
        (
            "groups.actor.env.A",
            "1",
            "groups.actor.env.A: this setting does not belong to group rollout alone",
        ),
        ("steps", 5, "submit --resume"),
        ("rollout.temperature", -1, "rollout.temperature: found -1"),
        ("rollout.temprature", 1, "unknown key"),
        ("groups.rollout", None, "cannot change during a run"),
        ("groups.rollout.roles", ["actor"], "cannot change during a run"),
    ],
)
def test_what_is_not_the_groups_own_is_refused(
    run: RunDir, key: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        add_change(run, load_resolved(run.root), "rollout", [], {key: value})
    assert said in str(caught.value) and "command line" in str(caught.value)
    assert not (run.root / "changes").exists()


def test_nothing_is_kept_of_what_the_judge_refuses(run: RunDir) -> None:
    def judge(config: Config) -> None:
        assert config.rollout.replicas == 3
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        add_change(run, load_resolved(run.root), "rollout", [], {"rollout.replicas": 3}, judge)
    assert not change_files(run) and changed(run, "rollout") is None


def test_retired_changes_count_no_more(run: RunDir) -> None:
    changed(run, "rollout", rollout__temperature=0.5)
    retire_changes(run)
    assert not change_files(run) and load_resolved(run.root, "rollout").rollout.temperature == 1.0
    later = changed(run, "rollout", rollout__temperature=0.7)
    assert later is not None and later.name.startswith("000002-")
