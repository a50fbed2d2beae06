"""Configuration: every wrong input ends as one line that teaches, and layers compose from left to right."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.checks import files
from relax_hpc.checks.settings import check, check_request
from relax_hpc.config import Config, dump, load, load_resolved, resolve, to_dict
from relax_hpc.config.clean import REMOVED, clean, keys
from relax_hpc.config.load import compose, gather, merge, print_config
from relax_hpc.config.read import MAX_BYTES, dump_yaml, parse_yaml
from relax_hpc.config.schema import GroupConfig
from relax_hpc.errors import EXIT_CONFIG, ConfigError
from tests.effort import effort
from tests.model_files import model_directory

QUICKSTART = Path(__file__).parents[1] / "configs" / "runs" / "quickstart.yaml"

WRONG = [
    ("stepz: 5", ["stepz: unknown key", "did you mean steps?"]),
    ("temperature: 1.0", ["temperature: unknown key", "did you mean rollout.temperature?"]),
    ("rollout: {temprature: 1.0}", ["rollout.temprature", "allowed: replicas", "did you mean temperature?"]),
    ("actor: {optimizer: {learning: 1}}", ["actor.optimizer.learning: unknown key", "lr, final_lr_share"]),
    ("steps: ten", ["steps: found 'ten' (str)", "an integer at least 1"]),
    ("steps: 10.0", ["steps: found 10.0 (float)", "an integer"]),
    ("steps: true", ["steps: found True (bool)", "an integer"]),
    ("steps: null", ["steps: found None", "an integer"]),
    ("steps: 0", ["steps: found 0 (int)", "allowed: at least 1"]),
    ("steps: [1]", ["steps: found [1] (list)", "an integer"]),
    ("steps: 1_000", ["steps: found '1_000' (str)", "an integer"]),
    ("max_staleness: 65", ["max_staleness: found 65", "0 to 64"]),
    ("data: {digits: 7}", ["data.digits: found 7", "1 to 6"]),
    ("rollout: {temperature: -0.1}", ["rollout.temperature: found -0.1", "at least 0.0"]),
    ("rollout: {temperature: .nan}", ["rollout.temperature: found nan", "a finite number"]),
    ("rollout: {temperature: .inf}", ["rollout.temperature: found inf", "a finite number"]),
    ("rollout: {top_p: 1.5}", ["rollout.top_p: found 1.5", "0.0 to 1.0"]),
    ("rollout: {temperature: '0.7'}", ["rollout.temperature: found '0.7' (str)", "a number"]),
    ("rollout: 3", ["rollout: found 3 (int)", "a mapping of replicas"]),
    ("rollout: {engine: {port: 70000}}", ["rollout.engine.port: found 70000", "0 to 65535"]),
    ("rollout: {engine: {flags: [a]}}", ["rollout.engine.flags: found ['a']", "a mapping"]),
    ("rollout: {engine: {flags: {1: 2}}}", ["rollout.engine.flags: found 1", "quote it"]),
    ("rollout: {engine: {flags: {a: .nan}}}", ["rollout.engine.flags.a: found nan", "finite"]),
    ("algorithm: {name: grop}", ["algorithm.name: found 'grop'", "dr_grpo", "did you mean 'grpo'?"]),
    ("algorithm: {name: 5}", ["algorithm.name: found 5 (int)", "text"]),
    (
        "algorithm: {advantage: grpo}",
        ["algorithm.advantage: there is no such setting any more: it is algorithm.name now"],
    ),
    ("algorithm: {kl_coefficient: 1}", ["algorithm.kl_coefficient: ", "it is algorithm.kl.coefficient now"]),
    ("algorithm: {correction: off}", ["found 'off'", "a mapping of kind,", "it is algorithm.correction.kind now"]),
    ("algorithm: {name: gspo, clip_cap: 2}", ["algorithm.clip_cap: unknown key, allowed: name,", "dual_clip has it"]),
    ("algorithm: {name: dual_clip, clip_cap: 0.5}", ["algorithm.clip_cap: found 0.5 (float), allowed: at least 1.0"]),
    ("layout: ray", ["layout: found 'ray'", "allowed: 'local', 'het', 'jobs'"]),
    ("name: 2024", ["name: found 2024 (int)", "text", "quote it: '2024'"]),
    ("model: {tiny: {tie_word_embeddings: yes}}", ["tie_word_embeddings: found 'yes'", "true or false"]),
    ("data: {eval: {a: 3}}", ["data.eval.a: found 3 (int)", "text"]),
    ('model: {path: "a\\0b"}', ["model.path", "without NUL"]),
    ("groups: {hub: {roles: [advantage]}}", ["groups.hub.roles[0]: found 'advantage'", "did you mean advantages?"]),
    ("groups: {hub: {role: []}}", ["groups.hub.role: unknown key", "did you mean roles?"]),
    ("groups: {hub: {roles: actor}}", ["groups.hub.roles: found 'actor'", "a list"]),
    ("groups: {../x: {}}", ["groups: found '../x'", "letters, digits"]),
    ("groups: {refernce: null}", ["groups.refernce: null removes", "did you mean reference?"]),
    ("groups: {hub: {env: {A: 1}}}", ["groups.hub.env.A: found 1 (int)", "quote it: '1'"]),
    ("[1, 2]", ["the file: found [1, 2]", "a mapping of name, run_dir"]),
    ("5", ["the file: found 5"]),
    ("steps: 5\nname: a\nsteps: 6", [":3: not valid YAML", "'steps' appears twice (first on line 1)"]),
    ("data: {digits: 1, digits: 2}", ["'digits' appears twice"]),
    ("model: &m {}\ndata: *m", [":2: not valid YAML", "aliases"]),
    ("a: !!python/object:os.system {}", [":1: not valid YAML", "python/object"]),
    ("a: !!timestamp 2020-01-01", ["not valid YAML"]),
    ("a: !!int abc", ["not valid YAML"]),
    ("a: !!bool abc", ["not valid YAML"]),
    ("steps: 5\n\tname: a", [":2: not valid YAML"]),
    ("steps: [", ["not valid YAML"]),
    ("steps: 5\n---\nsteps: 6", [":2: not valid YAML"]),
    ("name: 'a\x00b'", ["not valid YAML"]),
    ("a: " + "[" * 20000, ["nested too deeply"]),
    ("rollout: {engine: {flags: {a: " + "[" * 20 + "]" * 20 + "}}}", ["nested deeper than 16"]),
    ("#" * (MAX_BYTES + 1), [f"larger than {MAX_BYTES} bytes"]),
]


@pytest.mark.parametrize(("text", "parts"), WRONG, ids=[text[:40] for text, _ in WRONG])
def test_wrong_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path, "wrong.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load([path])
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    assert caught.value.exit_code == EXIT_CONFIG
    for part in parts:
        assert part in message


def test_every_mistake_of_every_layer_is_told_with_its_line(tmp_path: Path) -> None:
    first = write(
        tmp_path,
        "a.yaml",
        "steps: 0\n\nrollout:\n  temprature: 1\n  engine: {port: -1}\ngroups:\n  hub:\n    roles: [x]",
    )
    second = write(tmp_path, "b.yaml", "name: 5\nseed: 3")
    broken = write(tmp_path, "c.yaml", "name: [\n")
    with pytest.raises(ConfigError) as caught:
        load([first, broken, second], {"seed": -1})
    places = [mistake.split(": ")[:2] for mistake in caught.value.mistakes]
    assert places == [
        [f"{first}:1", "steps"],
        [f"{first}:4", "rollout.temprature"],
        [f"{first}:5", "rollout.engine.port"],
        [f"{first}:8", "groups.hub.roles[0]"],
        [f"{broken}:2", "not valid YAML"],
        [f"{second}:1", "name"],
        ["command line", "seed"],
    ]
    layers = gather([first, second])
    assert (layers.tree["seed"], layers.tree["steps"]) == (3, Config().steps)
    assert layers.placed("seed: found 3, allowed: none") == f"{second}:2: seed: found 3, allowed: none"
    assert layers.placed("threads: found 1") == "threads: found 1"


def test_a_mapping_all_of_whose_lines_are_comments_says_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.yaml", "groups:\n  # actor: {roles: [actor]}\nsite:\n  env:\n  options:\ndata:\n  eval:\n"
    )
    assert load([path]) == load([])
    below = write(tmp_path, "b.yaml", "site: {env: {A: '1'}}")
    assert load([below, path]).site.env == {"A": "1"}


def test_unreadable_files(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "")
    with pytest.raises(ConfigError, match=r"bse\.yaml: cannot be read: No such file.*did you mean .*base\.yaml"):
        load([tmp_path / "bse.yaml"])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load([tmp_path])
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not valid YAML"):
        load([tmp_path / "latin.yaml"])


def test_error_names_the_right_one_of_three_files(tmp_path: Path) -> None:
    files = [
        write(tmp_path, "a.yaml", "steps: 5"),
        write(tmp_path, "b.yaml", "steps: 0"),
        write(tmp_path, "c.yaml", "steps: 7"),
    ]
    with pytest.raises(ConfigError, match=r"b\.yaml:1: steps: found 0"):
        load(files)
    with pytest.raises(ConfigError, match=r"^command line: steps: found -1"):
        load([files[0]], {"steps": -1})


def test_layers_compose_from_left_to_right(tmp_path: Path) -> None:
    left = """
    rollout: {temperature: 0.5, engine: {flags: {a: 1, b: [1, 2], c: {x: 1}}}}
    data: {eval: {small: s.jsonl, large: l.jsonl}}
    groups: {actor: {env: {A: '1', B: '2'}}}
    """
    right = """
    rollout: {top_p: 0.9, engine: {flags: {b: [3], c: {y: 2}, d: null}}}
    data: {eval: {large: null}}
    groups: {actor: {env: {B: '3'}}, reference: null, hub: {roles: []}, extra: {roles: [advantages]}}
    """
    config = load([write(tmp_path, "left.yaml", left), write(tmp_path, "right.yaml", right)], {"rollout.top_p": 0.8})
    assert (config.rollout.temperature, config.rollout.top_p) == (0.5, 0.8)
    assert config.rollout.engine.flags == {"a": 1, "b": [3], "c": {"y": 2}, "d": None}
    assert config.data.eval == {"small": "s.jsonl"}
    assert config.groups == {
        "hub": GroupConfig(),
        "rollout": GroupConfig(roles=["rollout"]),
        "actor": GroupConfig(roles=["actor"], env={"A": "1", "B": "3"}),
        "extra": GroupConfig(roles=["advantages"]),
    }


def test_two_layers_may_remove_the_same_group(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "groups: {reference: null}")
    assert "reference" not in load([path, path]).groups


def test_a_reference_is_there_for_a_kl_or_if_asked_for(tmp_path: Path) -> None:
    kl = {"algorithm.kl.coefficient": 0.1}
    asked = write(tmp_path, "a.yaml", "groups: {reference: {env: {A: '1'}, resources: {nodes: 2}}}")
    assert "reference" not in load([]).groups
    assert load([], kl).groups["reference"] == GroupConfig(roles=["reference"])
    assert load([asked]).groups["reference"].roles == ["reference"]
    assert load([asked], kl).groups["reference"].resources.nodes == 2
    for elsewhere in ({"actor.forward": ["reference"]}, {"groups.actor_fwd.roles": ["actor_fwd", "reference"]}):
        assert "reference" not in load([], kl | elsewhere).groups
    for config in (load([], kl), load([asked]), load([], kl | {"groups.reference": None}), load([])):
        dump(config, tmp_path / "config.yaml")
        assert load([tmp_path / "config.yaml"]) == config


def test_empty_files_and_sections_change_nothing(tmp_path: Path) -> None:
    assert load([write(tmp_path, "a.yaml", "# nothing"), write(tmp_path, "b.yaml", "rollout:\ndata: {}")]) == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), ("3", 3.0), ("+.5", 0.5), ("1.", 1.0), ("010", 10.0), ("2.0e-3", 2e-3)],
)
def test_numbers_of_yaml_1_2(tmp_path: Path, text: str, value: float) -> None:
    config = load([write(tmp_path, "a.yaml", f"rollout: {{temperature: {text}}}")])
    assert config.rollout.temperature == value and type(config.rollout.temperature) is float


def test_text_that_yaml_1_1_would_change(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "groups: {actor: {env: {A: yes, B: 1:30, C: 2024-01-01, D: off, E: 0x10}}}")
    assert load([path]).groups["actor"].env == {"A": "yes", "B": "1:30", "C": "2024-01-01", "D": "off", "E": "0x10"}


def test_overrides_nested_and_dotted_agree() -> None:
    assert load([], {"rollout": {"engine": {"port": 5}}}) == load([], {"rollout.engine.port": 5})
    both = {"rollout.top_p": 0.5, "rollout": {"max_new_tokens": 5}}
    assert (
        load([], both)
        == load([], dict(reversed(both.items())))
        == load([], {"rollout": {"top_p": 0.5, "max_new_tokens": 5}})
    )
    with pytest.raises(ConfigError, match="command line: rollout"):
        load([], {"rollout": 1, "rollout.top_p": 0.5})


def test_dump_and_load_give_the_same(tmp_path: Path) -> None:
    flags = {"text": "1e-3", "yes": "yes", "many": ["a\nb", "", " x", "é\x07"], "deep": {"a": [1, 2.5, None, True]}}
    overrides = {
        "groups": {"reference": None, "extra": {}},
        "rollout.engine.flags": flags,
        "actor.optimizer.eps": 1e-20,
    }
    config = load([QUICKSTART], overrides)
    dump(config, tmp_path / "config.yaml")
    assert load([tmp_path / "config.yaml"]) == config
    assert list(parse_yaml((tmp_path / "config.yaml").read_text(), "")) == list(to_dict(Config()))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_moved_run_directory_counts_from_where_it_is(tmp_path: Path) -> None:
    config = load([], {"run_dir": str(tmp_path / "old"), "steps": 7})
    (tmp_path / "new").mkdir()
    dump(config, tmp_path / "new" / "config.yaml")
    resolved = load_resolved(tmp_path / "new")
    assert (resolved.steps, resolved.run_dir) == (7, str(tmp_path / "new"))


def test_a_path_with_dots_is_where_they_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk" / "mine").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "mine")
    monkeypatch.chdir(tmp_path / "link")
    assert resolve(load([], {"run_dir": "../runs/a"})).run_dir == str(tmp_path.resolve() / "disk" / "runs" / "a")
    assert resolve(load([], {"run_dir": f"{tmp_path}/link/a"})).run_dir == f"{tmp_path}/link/a", "as the user named it"


def test_resolve_makes_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve(load([], {"name": "a", "data.train": "t.jsonl", "data.eval.x": "e.jsonl"}))
    assert config.run_dir == str(tmp_path / "runs" / "a")
    assert (config.data.train, config.data.eval) == (str(tmp_path / "t.jsonl"), {"x": str(tmp_path / "e.jsonl")})
    assert config.model.path == "" and resolve(config) == config


def test_print_config_names_the_source_of_every_value(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.yaml", "steps: 5\nrollout: {engine: {flags: {a: 1}}}\ngroups: {hub: {roles: [advantages]}}"
    )
    text = print_config(compose([path], {"rollout.top_p": 0.5, "groups.reference": None}))
    for line in (
        f"steps: 5  # {path}",
        f"a: 1  # {path}",
        f"roles:  # {path}",
        "top_p: 0.5  # command line",
        "seed: 0\n",
    ):
        assert line in text
    assert load([write(tmp_path, "b.yaml", text)]) == load([path], {"rollout.top_p": 0.5, "groups.reference": None})


def test_quickstart_is_good(tmp_path: Path) -> None:
    assert check(load([QUICKSTART], {"run_dir": str(tmp_path / "run")})) == []


names = st.text("abcxyz", min_size=1, max_size=2)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
plain = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
layers = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(1, 9),
        "rollout": st.fixed_dictionaries(
            {},
            optional={
                "top_p": st.floats(0, 1),
                "engine": st.fixed_dictionaries({}, optional={"flags": st.dictionaries(names, plain, max_size=3)}),
            },
        ),
        "data": st.fixed_dictionaries({"eval": st.dictionaries(names, st.text("a"), max_size=3)}),
        "groups": st.dictionaries(
            names,
            st.fixed_dictionaries(
                {}, optional={"roles": st.just(["actor"]), "env": st.dictionaries(names, st.text("a"), max_size=2)}
            ),
            max_size=3,
        ),
    },
)


@given(layers, layers, layers)
@settings(max_examples=effort(20, 60), deadline=None)
def test_merging_is_associative_and_the_last_layer_wins(a: Any, b: Any, c: Any) -> None:
    assert merge(Config, merge(Config, a, b), c) == merge(Config, a, merge(Config, b, c))
    assert merge(Config, a, {}) == a == merge(Config, a, a)
    assert merge(Config, merge(Config, a, b), b) == merge(Config, a, b)
    assert merge(Config, a, b).get("steps") == b.get("steps", a.get("steps"))


@given(plain)
@settings(max_examples=effort(30, 100), deadline=None)
def test_yaml_gives_back_what_was_written(value: Any) -> None:
    assert parse_yaml(dump_yaml({"a": value}), "x") == {"a": value}


@given(st.dictionaries(st.sampled_from(list(to_dict(Config()))) | st.text(), plain, max_size=3))
@settings(max_examples=effort(30, 100), deadline=None)
def test_cleaning_anything_gives_a_layer_or_one_line(tree: Any) -> None:
    try:
        clean(Config, tree, "source")
    except ConfigError as error:
        assert str(error).startswith("source: ")


FINDINGS = [
    ({"model.path": "/nowhere"}, ["model.path: found '/nowhere', which is not a directory"]),
    (
        {"data.task": ""},
        ["data.train: found nothing", "model.path: found nothing", "warm_start.steps: found 80 without"],
    ),
    (
        {"data.train": "/nowhere.jsonl"},
        ["data.train: found '/nowhere.jsonl' beside data.task", "data.train: found '/nowhere.jsonl', which is not"],
    ),
    ({"data.eval.x": "/nowhere.jsonl"}, ["data.eval.x: found '/nowhere.jsonl', which is not a file"]),
    ({"actor.parallel.tensor": 2}, ["actor.parallel.tensor: found 2, allowed: a divisor of the model's num_key_value"]),
    (
        {"model.tiny.num_attention_heads": 3, "model.tiny.num_key_value_heads": 2},
        ["model.tiny.num_attention_heads: found"],
    ),
    ({"actor_fwd.parallel.pipeline": 3}, ["actor_fwd.parallel.pipeline: found 3", "num_hidden_layers, 2"]),
    (
        {"groups.reference": {}, "reference.parallel.sequence_parallel": True},
        ["reference.parallel.sequence_parallel: found true with"],
    ),
    ({"algorithm.mini_batches": 5}, ["algorithm.mini_batches: found 5", "prompts_per_step, 32"]),
    ({"algorithm.mini_batches": 16, "actor.parallel.data": 17}, ["actor.parallel.data: found 17, allowed: at most 16"]),
    (
        {"weights.publish_every": 2, "weights.file_every": 2},
        ["weights.publish_every: found 2, allowed: at most max_staleness + 1, 1"],
    ),
    (
        {"max_staleness": 3, "weights.publish_every": 3, "weights.publish_lag": 1, "weights.keep_every": 10},
        [
            "weights.publish_lag: found 1, allowed: at least weights.publish_every - 1, 2",
            "weights.keep_every: found 10",
        ],
    ),
    (
        {"max_staleness": 4, "queue.max_rows": 1000},
        ["queue.max_rows: found 1000, but max_staleness 4 lets rollout be 1280 rows ahead"],
    ),
    ({"rollout.filter": "rewards_differs"}, ["rollout.filter: found 'rewards_differs', allowed rewards_differ"]),
    (
        {"rollout.partial_rollout": "recompute", "rollout.engine.flags": {"disable_radix_cache": False}},
        ["rollout.partial_rollout: found recompute with rollout.engine.flags.disable_radix_cache false"],
    ),
    ({"weights.slabs": 1}, ["weights.slabs: found 1, allowed: 0, or at least 2"]),
    ({"groups.rollout": None}, ["groups: found role rollout in no group"]),
    (
        {"groups.actor_fwd": None, "algorithm.mini_batches": 2},
        ["algorithm.passes: found 2 without role actor_fwd", "algorithm.mini_batches: found 2 without role actor_fwd"],
    ),
    (
        {"actor.forward": ["reference", "actor_fwd"], "groups.reference": {}, "groups.actor_fwd": {}},
        ["actor.forward: found actor_fwd, which is in a group too", "actor.forward: found reference, which is in a"],
    ),
    (
        {"actor.forward": ["reference"], "algorithm.kl.refresh_every": 5},
        ["algorithm.kl.refresh_every: found 5 with reference in actor.forward"],
    ),
    ({"groups.hub": None}, ["but no hub", "role advantages in no group"]),
    ({"groups.hub.roles": ["advantages", "actor"]}, ["role actor 2 times (in hub, actor)"]),
    ({"groups.idle": {}}, ["groups.idle.roles: found none"]),
    (
        {"groups.reference": None, "algorithm.kl.coefficient": 0.1},
        ["algorithm.kl.coefficient: found 0.1, but role ref"],
    ),
    ({"rollout.max_new_tokens": 300}, ["rollout.max_new_tokens: found 300", "together 332", "of the model, 256"]),
    (
        {"rollout.top_p": 0.9},
        ["rollout.top_p: found 0.9, allowed: 1.0; log-probabilities of rollouts are those before"],
    ),
    ({"rollout.temperature": 0}, ["rollout.temperature: found 0.0"]),
    ({"rollout.reward": "answer_exct"}, ["rollout.reward: found 'answer_exct'", "did you mean"]),
    ({"eval.reward": "no.such:reward"}, ["eval.reward: 'no.such:reward': importing"]),
    ({"rollout.processes": 2, "rollout.replicas": 3}, ["rollout.processes: found 2", "what divides them"]),
    ({"rollout.engine.port": 65535, "rollout.replicas": 2}, ["rollout.engine.port: found 65535", "at most 65534"]),
    (
        {"rollout.engine.flags.model_path": "x"},
        ["rollout.engine.flags.model_path: found 'x'", "set model.path instead"],
    ),
    ({"rollout.engine.flags.api-key": "x"}, ["rollout.engine.flags.api-key", "it cannot be changed"]),
    ({"rollout.engine.flags.host": "0.0.0.0"}, ["rollout.engine.flags.host", "it cannot be changed"]),
    ({"rollout.engine.flags.max-total-tokens": 5}, ["underscores (max_total_tokens)"]),
    ({"rollout.engine.simulated.sigma": 1.0}, ["rollout.engine.simulated: found settings, but kind is sglang"]),
    ({"liveness.lease_s": 1, "liveness.beat_s": 0.5}, ["liveness.lease_s: found 1.0", "more than two beats"]),
    ({"name": "a/b"}, ["name: found 'a/b'"]),
    ({"run_dir": f"{__file__}/run"}, ["run_dir: found", "is a file; name a directory"]),
]


@pytest.mark.parametrize(("overrides", "parts"), FINDINGS, ids=[" ".join(map(str, item[0])) for item in FINDINGS])
def test_findings(tmp_path: Path, overrides: dict[str, Any], parts: list[str]) -> None:
    findings = check(load([QUICKSTART], {"run_dir": str(tmp_path / "run")} | overrides))
    for part in parts:
        assert any(part in finding for finding in findings), findings
    for finding in findings:
        assert any(part in finding for part in parts) and "\n" not in finding


@pytest.mark.parametrize(
    "overrides",
    [
        {"groups.reference": {}},
        {"algorithm.kl.coefficient": 0.1},
        {"groups.actor_fwd": None, "algorithm.passes": 1},
        {"actor.forward": ["actor_fwd"]},
        {"actor.forward": ["reference"], "algorithm.kl.coefficient": 0.1},
    ],
    ids=str,
)
def test_runs_with_and_without_forward_groups_that_are_good(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert check(load([QUICKSTART], {"run_dir": str(tmp_path / "run")} | overrides)) == []


def test_busy_port(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        findings = check(load([QUICKSTART], {"run_dir": str(tmp_path / "run"), "rollout.engine.port": port}))
    assert findings == [f"rollout.engine.port: found {port}, but {port} is in use; name another, or 0 for free ones"]


def test_flags_that_sglang_does_not_have(tmp_path: Path) -> None:
    over = {"run_dir": str(tmp_path / "run"), "rollout.engine.flags": {"nonsense": 1, "max_total_token": 5}}
    findings = check(load([QUICKSTART], over))
    assert len(findings) == 2 and "rollout.engine.flags.nonsense: SGLang has no such server argument" in findings[0]
    assert "did you mean max_total_tokens?" in findings[1]
    assert check(load([QUICKSTART], over | {"site.python": "/opt/other/python"})) == [], "another environment's SGLang"


def test_what_slurm_cannot_be_asked_for_is_a_finding_too(tmp_path: Path) -> None:
    over = {"run_dir": str(tmp_path / "run"), "layout": "het", "site.cpu_nodes": False}
    (line,) = check_request(load([QUICKSTART], over))
    assert line.startswith("groups.rollout.resources.nodes: found 1 for component 0 of a het job")
    assert check(load([QUICKSTART], over)) == [], "a script by hand may have a hub of its own there"
    over = {"run_dir": str(tmp_path / "run"), "layout": "jobs", "site.options.nodes": "2"}
    (line,) = check_request(load([QUICKSTART], over))
    assert line == "options.nodes: found '2', but it is set by relax_hpc; set groups.<group>.resources.nodes instead"


def test_a_setting_that_is_gone_says_what_took_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "old.yaml", "rollout: {max_attempts: 8}")
    with pytest.raises(ConfigError, match=r"old\.yaml:1: rollout\.max_attempts: .*any more: rollout\.max_failed_share"):
        load([path])
    assert not {*REMOVED} & {*keys()}


def test_a_device_is_looked_for_where_the_run_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = {"run_dir": str(tmp_path / "run"), "model.device": "cuda"}
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr(Path, "exists", lambda path, exists=Path.exists: path != Path("/dev/dxg") and exists(path))
    assert check(load([QUICKSTART], over)) == [
        "model.device: found cuda, but this machine has no NVIDIA device (/dev/nvidia0); set cpu"
    ]
    assert check(load([QUICKSTART], over | {"site.name": "cluster"})) == [], "a job's node, not this one"
    without = check(load([QUICKSTART], over | {"layout": "het", "groups.actor.resources.gpus_per_node": 1}))
    assert [line.split(":")[0] for line in without] == [
        f"groups.{name}.resources.gpus_per_node" for name in ("rollout", "actor_fwd")
    ]


PROMPT = {"id": 1, "prompt": "12", "answer": "12"}
PROMPTS = [
    (b"", "no prompts; write one"),
    (json.dumps({"id": 1, "prompt": "12"}).encode(), "1 of 1 lines are bad: 1 missing_field (first line 1: no answer)"),
    (json.dumps(PROMPT).encode("utf-16"), "UTF-16"),
    (json.dumps([PROMPT]).encode(), "one JSON list"),
    (json.dumps(PROMPT | {"prompt": "1" * 500}).encode(), "over_long (first line 1: 501 tokens"),
    (json.dumps(PROMPT | {"prompt": [{"role": "user", "content": "12"}]}).encode(), "a list of chat messages"),
]


@pytest.mark.parametrize(("content", "says"), PROMPTS, ids=[says for _, says in PROMPTS])
def test_prompts_are_read(tmp_path: Path, content: bytes, says: str) -> None:
    path = model_directory(tmp_path / "model")
    (tmp_path / "p.jsonl").write_bytes(content)
    over = {
        "data.task": "",
        "warm_start.steps": 0,
        "data.max_prompt_tokens": 200,
        "data.train": str(tmp_path / "p.jsonl"),
    }
    (finding,) = model_findings(path, **over)
    assert finding.startswith(f"data.train: {tmp_path / 'p.jsonl'}: ") and says in finding
    assert not (path / "run").exists()


def prompt_findings(path: Path, **data: Any) -> tuple[list[str], list[str]]:
    """What `check` says of a file of prompts: mistakes, and notes."""
    config = load([], {"data.train": str(path), "model.path": str(path.parent / "model"), **data})
    mistakes = [line for line in files.check_files(config) if line.startswith("data.train")]
    return mistakes, [line for line in files.notes(config) if line.startswith("data.train")]


def test_every_row_of_the_prompts_is_judged(tmp_path: Path) -> None:
    model_directory(tmp_path / "model")
    path, good = tmp_path / "p.jsonl", [json.dumps(PROMPT | {"id": number}) for number in range(1500)]
    path.write_text("\n".join([*good, "", "{", *["{}"] * 300]))
    says = f"data.train: {path}: 301 of 1801 lines are bad: 300 missing_field (first line 1503: no id, no prompt"
    mistakes, notes = prompt_findings(path, **{"data.max_bad_share": 0.1})
    assert len(mistakes) == 1 and mistakes[0].startswith(says) and notes == []
    assert prompt_findings(path, **{"data.max_bad_share": 0.2}) == ([], [])


def test_a_long_file_of_prompts_is_read_in_part_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_S", 0.0)
    monkeypatch.setattr(files, "BLOCK", 10)
    model_directory(tmp_path / "model")
    path, good = tmp_path / "p.jsonl", [json.dumps(PROMPT | {"id": number}) for number in range(40)]
    share = {"data.max_bad_share": 0.05}
    path.write_text("\n".join(["{", *good, *["{"] * 20]))
    begun = "all of them are read when the run begins"
    assert prompt_findings(path, **share) == ([], [f"data.train: read 10 of 61 rows in 0 s, 1 of them bad; {begun}"])
    path.write_text("\n".join(["{"] * 4 + good))
    mistakes, _ = prompt_findings(path, **share)
    assert len(mistakes) == 1 and "4 of 44 lines are bad: 4 broken_json (first line 1" in mistakes[0], "for certain"
    path.write_text("\n".join(good[:10]))
    assert prompt_findings(path, **share) == ([], []), "it was all there was"


def test_prompts_are_read_once_for_mistakes_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_directory(tmp_path / "model")
    path, read = tmp_path / "p.jsonl", []
    path.write_text(json.dumps(PROMPT | {"prompt": "<s>1"}))
    rows = files.read_rows
    monkeypatch.setattr(files, "read_rows", lambda path: read.append(path) or rows(path))
    for _ in range(2):
        mistakes, notes = prompt_findings(path)
        assert mistakes == [] and len(notes) == 1
    assert len(read) == 1
    path.write_text(json.dumps(PROMPT | {"prompt": "11"}))
    assert prompt_findings(path) == ([], []) and len(read) == 2


def test_names_of_special_tokens_in_prompts_are_said(tmp_path: Path) -> None:
    path, prompts = model_directory(tmp_path / "model"), tmp_path / "p.jsonl"
    prompts.write_text(json.dumps(PROMPT | {"prompt": "<s>1"}) + "\n" + json.dumps(PROMPT | {"id": 2}))
    over = {"model.path": str(path), "data.train": str(prompts)}
    (note,) = files.notes(load([], over))
    assert "data.train: 1 of 2 prompts have names of special tokens, such as <s>" in note
    assert not list(files.notes(load([], over | {"data.special_tokens": ["prompt"]})))


BROKEN = [
    ("model.safetensors", b"", "model.safetensors: not a whole safetensors file"),
    ("model.safetensors", lambda data: data[: len(data) // 2], "model.safetensors: not a whole safetensors file"),
    ("tokenizer.json", b"", "tokenizer.json: not a tokenizer"),
    ("tokenizer.json", b"{}", "tokenizer.json: not a tokenizer"),
    ("tokenizer_config.json", b"{", "tokenizer_config.json: not JSON"),
    (
        "config.json",
        lambda data: data.replace(b'"vocab_size": 64', b'"vocab_size": 32'),
        "64 tokens, but vocab_size of",
    ),
    (
        "config.json",
        lambda data: data.replace(b'_layers": 4', b'_layers": 5'),
        "model.layers.4.input_layernorm.weight is missing",
    ),
    ("config.json", lambda data: data.replace(b'_layers": 4', b'_layers": 3'), "unknown tensor model.layers.3."),
    ("model.safetensors.index.json", b"{", "found an unreadable"),
]


@pytest.mark.parametrize(("name", "content", "says"), BROKEN, ids=[f"{one[0]} {one[2][-20:]}" for one in BROKEN])
def test_files_of_a_model_are_read(tmp_path: Path, name: str, content: Any, says: str) -> None:
    path = model_directory(tmp_path / "model")
    file = path / name
    file.write_bytes(content if isinstance(content, bytes) else content(file.read_bytes()))
    findings = model_findings(path)
    assert findings and all(line.startswith("model.path: ") and "\n" not in line for line in findings)
    assert any(says in line for line in findings)


def test_a_pipe_in_the_place_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model")
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    assert "found no *.safetensors" in model_findings(path)[0]


def model_findings(path: Path, **overrides: Any) -> list[str]:
    return check(load([QUICKSTART], {"run_dir": str(path / "run"), "model.path": str(path)} | overrides))


def test_model_directories(tmp_path: Path) -> None:
    good = model_directory(tmp_path / "good")
    layout = {"actor.parallel.tensor": 2, "actor.parallel.pipeline": 4}
    assert model_findings(good, **layout) == []
    (good / "tokenizer.json").unlink()
    (good / "model.safetensors").unlink()
    findings = model_findings(good)
    assert len(findings) == 2 and "no *.safetensors" in findings[0] and "no tokenizer.json" in findings[1]
    (good / "config.json").unlink()
    assert "model.path: found no config.json in" in model_findings(good)[0]


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "{}", '{"model_type": 5}'])
def test_broken_model_config(tmp_path: Path, text: str) -> None:
    path = model_directory(tmp_path / "model")
    (path / "config.json").write_text(text, encoding="latin-1")
    findings = model_findings(path)
    assert len(findings) == 1 and findings[0].startswith("model.path: ") and "config.json" in findings[0]


def test_index_that_names_a_missing_file(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    assert "no model-2.safetensors" in model_findings(path)[0]


def test_models_that_cannot_be_trained_are_named_with_every_reason(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model", rope_scaling={"type": "yarn"}, logit_scale=0.5)
    findings = model_findings(path)
    assert len(findings) == 2 and all(f"model.path: {path}/config.json: " in finding for finding in findings)
    assert "rope_scaling.type is 'yarn'" in findings[0] or "rope_scaling.type is 'yarn'" in findings[1]
    assert model_findings(path, **{"model.ignore_keys": ["rope_scaling", "logit_scale"]}) == []
    other = model_directory(tmp_path / "other", model_type="llama")
    assert "architectures is ['Qwen3ForCausalLM'], supported is ['LlamaForCausalLM']" in model_findings(other)[0]


def test_every_family_is_sound_or_says_how_its_ranks_may_split_it(tmp_path: Path) -> None:
    llama = model_directory(tmp_path / "llama", model_type="llama", architectures=["LlamaForCausalLM"], head_dim=None)
    assert model_findings(llama, **{"actor.parallel.tensor": 4, "actor.parallel.pipeline": 2}) == []
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    about = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": None} | experts
    mixed = model_directory(tmp_path / "mixed", **about)
    assert model_findings(mixed, **{"actor.parallel.data": 2}) == []
    assert model_findings(mixed, **{"actor.parallel.tensor": 2}) == [
        "actor.parallel.tensor: found 2, allowed: 1, as experts are not split over ranks yet"
    ]


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path
