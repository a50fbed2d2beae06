"""Settings of algorithms, roles that they need, and findings on both."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from relax_hpc.algorithms import (
    ALGORITHMS,
    Algorithm,
    Grpo,
    Gspo,
    algorithm_class,
)
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import fields_by
from relax_hpc.config import dump, load
from relax_hpc.config.load import gather, load_resolved
from relax_hpc.config.options import options
from relax_hpc.ops.checks.files import notes
from relax_hpc.ops.checks.settings import check
from relax_hpc.queue.plan import Plan

USER_ALGORITHM = "tests.helpers.own_algorithm:Opo"


@pytest.mark.parametrize("name", [*ALGORITHMS, USER_ALGORITHM])
def test_the_name_selects_class_and_settings(tmp_path: Path, name: str):
    config = load([], {"algorithm.name": name, "algorithm.passes": 3})
    assert type(config.algorithm) is algorithm_class(name) and config.algorithm.name == name
    path = tmp_path / "config.yaml"
    dump(config, path)
    assert load([path]) == config and load([path]).algorithm == config.algorithm
    assert list(config.algorithm.findings()) == []


def test_a_layer_that_changes_the_name_keeps_only_common_settings(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm:\n  passes: 2\n  kl: {coefficient: 0.1}\n  clip_low: 0.2\n")
    layers = gather([path], {"algorithm.name": "gspo"})
    assert [error.text for error in layers.mistakes] == [
        f"{path}:4: algorithm.clip_low: set for grpo, but command line names gspo; set it there "
        "too, or remove it here"
    ]
    config = load([path], {"algorithm.name": "gspo", "algorithm.clip_low": 1e-3})
    algorithm = config.algorithm
    assert isinstance(algorithm, Gspo) and (algorithm.clip_low, algorithm.clip_high) == (1e-3, 4e-4)
    assert (algorithm.passes, algorithm.kl.coefficient, algorithm.reduction) == (
        2,
        0.1,
        "sequence_mean",
    )
    assert "groups.reference" not in layers.sources and "reference" in config.groups


def test_a_user_defined_class_has_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = load([], {"algorithm": {"name": USER_ALGORITHM, "scale": 2.0}})
    assert config.algorithm.scale == 2.0 and "actor_fwd" not in config.groups
    with pytest.raises(
        ConfigError, match=r"algorithm\.scal: unknown key, allowed: name, .*; did you mean scale\?"
    ):
        load([], {"algorithm": {"name": USER_ALGORITHM, "scal": 2.0}})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: {name: 'no.such:Thing', its_own: 3, passes: 2}")
    unloadable = load_resolved(run)
    assert unloadable.algorithm.passes == 2 and set(unloadable.groups) == {
        "hub",
        "rollout",
        "actor",
    }, "`status` can still load the configuration"
    message = "algorithm.name: 'no.such:Thing': importing 'no.such' failed: ModuleNotFoundError"
    assert any(finding.startswith(message) for finding in check(unloadable))
    for name, reason in (
        ("tests.helpers.own_algorithm:bounded", "found no class derived"),
        ("tests.algorithms.test_algorithm_settings:Plain", "@data"),
        (
            "relax_hpc.algorithms:Algorithm",
            "does not override advantages or token_advantages or given; define one",
        ),
        (
            "tests.algorithms.test_algorithm_settings:Bare",
            "the setting mine has no default; give it one",
        ),
        (
            "tests.algorithms.test_algorithm_settings:Lossless",
            "does not override token_losses or loss; define one",
        ),
    ):
        (finding,) = load([], {"algorithm.name": name}).algorithm.findings()
        assert reason in finding
    with pytest.raises(ConfigError, match="failed"):
        unloadable.algorithm.token_advantages([])


class Lossless(Algorithm):
    advantages = Grpo.advantages


@dataclasses.dataclass(kw_only=True)
class Bare(Grpo):
    mine: int


class Plain(Grpo):
    """Has a setting, but is not a dataclass."""

    mine: int = 3


def test_a_kl_whose_gradient_is_zero_is_refused():
    config = load([], {"algorithm.kl.coefficient": 0.1, "algorithm.kl.estimator": "k1"})
    (finding,) = config.algorithm.findings()
    assert finding.startswith("kl.estimator: found k1 with a coefficient")
    config.algorithm.kl.importance = True
    assert list(config.algorithm.findings()) == []


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ({}, set()),
        ({"algorithm.passes": 2}, {"actor_fwd"}),
        ({"max_staleness": 1}, set()),
        ({"max_staleness": 1, "groups.actor_fwd": {}}, {"actor_fwd"}),
        ({"max_staleness": 4, "algorithm.mini_batches": 2}, set()),
        ({"algorithm.kl.coefficient": 0.1}, {"reference"}),
        (
            {"algorithm": {"name": "reinforce_pp", "kl_in_reward": 0.1, "passes": 2}},
            {"actor_fwd", "reference"},
        ),
        ({"algorithm.name": USER_ALGORITHM, "algorithm.passes": 2, "max_staleness": 4}, set()),
        ({"algorithm.passes": 2, "actor.forward": ["actor_fwd"]}, set()),
    ],
    # Sets have another order in each process, and ids must be the same in all processes.
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_scoring_roles_follow_from_the_algorithm(overrides, roles):
    config = load([], overrides)
    assert set(config.groups) == {"hub", "rollout", "actor"} | roles
    tasks = Plan.from_config(config).tasks
    scores = set().union(*map(fields_by, roles))
    assert set(tasks["actor"].needs) == {"token_ids", "reward", "advantages"} | scores
    assert tasks["advantages"].needs == config.algorithm.needs
    assert tasks["advantages"].whole_step == (config.algorithm.name == "reinforce_pp")


@pytest.mark.parametrize(
    ("overrides", "forward"),
    [
        ({}, []),
        ({"algorithm.passes": 1}, []),
        ({"algorithm.passes": 2}, ["actor_fwd"]),
        ({"algorithm.mini_batches": 4, "weights.publish_every": 3}, ["actor_fwd"]),
        ({"algorithm": {"name": "ppo", "passes": 2}}, ["actor_fwd"]),
        ({"algorithm": {"name": "ppo"}}, []),
        ({"algorithm.passes": 2, "actor.forward": ["reference"]}, ["reference", "actor_fwd"]),
        ({"algorithm.passes": 2, "groups.actor_fwd": {}}, []),
        ({"algorithm.passes": 2, "groups.actor_fwd.resources.nodes": 2}, []),
        ({"algorithm.passes": 2, "groups.actor_fwd": None}, []),
        ({"algorithm": {"name": "m2po", "passes": 2}}, []),
        ({"algorithm": {"name": "distill", "passes": 2, "teacher_top_k": 4}}, []),
    ],
)
def test_stale_rows_are_clipped_around_the_newest_policy(overrides, forward, tmp_path):
    """The newest denominator is the policy before the step. With one update this is the trained
    policy itself. With several updates the actor scores the rows before the first update. Scores of
    a group are older, so that the group exists only if a layer names it."""
    config = load([], {"max_staleness": 4} | overrides)
    assert config.actor.forward == forward
    is_group_asked = any(
        key.startswith("groups.actor_fwd") and value is not None for key, value in overrides.items()
    )
    assert ("actor_fwd" in config.groups) == is_group_asked
    if config.algorithm.name != "m2po":
        correction = config.algorithm.correction
        assert (correction.kind, correction.level) == ("truncate", "token")
    dump(config, tmp_path / "config.yaml")
    assert load([tmp_path / "config.yaml"]) == config, "a run that is resumed keeps its roles"


@pytest.mark.parametrize(
    ("overrides", "instead"),
    [
        ({"max_staleness": 1, "algorithm.passes": 2}, "actor: {forward: [actor_fwd]}"),
        ({"max_staleness": 1}, "with one update per step the policy itself is the newest"),
        ({"algorithm.passes": 2}, ""),
    ],
)
def test_a_group_with_scores_older_than_the_policy_is_noted(overrides, instead):
    config = load(
        [],
        {"data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits", "groups.actor_fwd": {}}
        | overrides,
    )
    warnings = [
        note
        for note in notes(config)
        if note.startswith("groups.actor_fwd.roles: found actor_fwd with")
    ]
    assert bool(warnings) == bool(instead) and all(instead in note for note in warnings)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            {"name": "reinforce_pp", "kl_in_reward": 0.1},
            "needs field ref_logprobs, but its role reference is in no group",
        ),
        (
            {"name": "tests.algorithms.test_algorithm_settings:Needy"},
            "needs field judgement, which no role produces",
        ),
    ],
)
def test_a_field_without_producer_is_a_finding(
    tmp_path: Path, overrides: dict[str, object], expected: str
):
    run = {
        "run_dir": str(tmp_path / "run"),
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "data.max_prompt_tokens": 32,
    }
    run |= {"rollout.max_new_tokens": 5}
    (finding,) = check(load([], {"algorithm": overrides, "actor.forward": ["reference"]} | run))
    assert finding.startswith("algorithm.name: found ") and expected in finding
    assert check(load([], {"algorithm": {"name": "reinforce_pp", "kl_in_reward": 0.1}} | run)) == []


@dataclasses.dataclass(kw_only=True)
class Needy(Grpo):
    """Needs a field that no role produces, and has a setting of a type that the schema lacks."""

    needs = ("reward", "judgement")
    few: tuple[int, int] | None = None


def test_help_of_options_names_their_algorithms():
    settings = {option.key: option for option in options() if option.key.startswith("algorithm.")}
    assert settings["algorithm.clip_cap"].help.endswith("[at least 1.0] (dual_clip)")
    assert (
        "(" not in settings["algorithm.passes"].help
        and settings["algorithm.kl.cap"].default == 10.0
    )
