"""Configuration: every wrong input ends as one line that teaches, and layers compose from left to
right."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import EXIT_CONFIG, ConfigError
from relax_hpc.base.packaged_configs import configs_folder, find_config, packaged_configs
from relax_hpc.config import Config, dump, load, load_resolved, resolve, to_dict
from relax_hpc.config.layer_validation import REMOVED, clean, keys
from relax_hpc.config.load import compose, gather, merge, print_config
from relax_hpc.config.schema import GroupConfig
from relax_hpc.config.yaml_files import MAX_BYTES, dump_yaml, parse_yaml
from tests.effort import effort
from tests.helpers.run_helpers import QUICKSTART


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


WRONG = [
    ("stepz: 5", ["stepz: unknown key", "did you mean steps?"]),
    (
        "temperature: 1.0",
        [
            "temperature: unknown key",
            "did you mean rollout.temperature or reward.judge.temperature",
        ],
    ),
    (
        "rollout: {temprature: 1.0}",
        ["rollout.temprature", "allowed: replicas", "did you mean temperature?"],
    ),
    (
        "actor: {optimizer: {learning: 1}}",
        ["actor.optimizer.learning: unknown key", "lr, final_lr_share"],
    ),
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
    (
        "algorithm: {name: grop}",
        ["algorithm.name: found 'grop'", "dr_grpo", "did you mean 'grpo'?"],
    ),
    ("algorithm: {name: 5}", ["algorithm.name: found 5 (int)", "text"]),
    (
        "algorithm: {advantage: grpo}",
        ["algorithm.advantage: there is no such setting any more: it is algorithm.name now"],
    ),
    (
        "algorithm: {kl_coefficient: 1}",
        ["algorithm.kl_coefficient: ", "it is algorithm.kl.coefficient now"],
    ),
    (
        "algorithm: {correction: off}",
        ["found 'off'", "a mapping of kind,", "it is algorithm.correction.kind now"],
    ),
    (
        "algorithm: {name: gspo, clip_cap: 2}",
        ["algorithm.clip_cap: unknown key, allowed: name,", "dual_clip has it"],
    ),
    (
        "algorithm: {name: dual_clip, clip_cap: 0.5}",
        ["algorithm.clip_cap: found 0.5 (float), allowed: at least 1.0"],
    ),
    ("layout: ray", ["layout: found 'ray'", "allowed: 'local', 'het', 'jobs'"]),
    ("name: 2024", ["name: found 2024 (int)", "text", "quote it: '2024'"]),
    (
        "model: {tiny: {tie_word_embeddings: yes}}",
        ["tie_word_embeddings: found 'yes'", "true or false"],
    ),
    ("data: {eval: {a: 3}}", ["data.eval.a: found 3 (int)", "text"]),
    ('model: {path: "a\\0b"}', ["model.path", "without NUL"]),
    (
        "groups: {hub: {roles: [advantage]}}",
        ["groups.hub.roles[0]: found 'advantage'", "did you mean advantages?"],
    ),
    (
        "groups: {watch: {roles: ['my_roles:ROLE']}}",
        [
            "groups.watch.roles[0]: found 'my_roles:ROLE'",
            "a new role is an entry of ROLES in relax_hpc/config/roles.py",
        ],
    ),
    ("groups: {hub: {role: []}}", ["groups.hub.role: unknown key", "did you mean roles?"]),
    ("groups: {hub: {roles: actor}}", ["groups.hub.roles: found 'actor'", "a list"]),
    ("groups: {../x: {}}", ["groups: found '../x'", "letters, digits"]),
    ("groups: {refernce: null}", ["groups.refernce: null removes", "did you mean reference?"]),
    ("groups: {hub: {env: {A: 1}}}", ["groups.hub.env.A: found 1 (int)", "quote it: '1'"]),
    ("[1, 2]", ["the file: found [1, 2]", "a mapping of name, run_dir"]),
    ("5", ["the file: found 5"]),
    (
        "steps: 5\nname: a\nsteps: 6",
        [":3: not valid YAML", "'steps' appears twice (first on line 1)"],
    ),
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


@pytest.mark.parametrize(("text", "expected_texts"), WRONG, ids=[text[:40] for text, _ in WRONG])
def test_an_error_in_a_file_names_file_and_line(
    tmp_path: Path, text: str, expected_texts: list[str]
) -> None:
    path = write(tmp_path, "wrong.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load([path])
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    assert caught.value.exit_code == EXIT_CONFIG
    for text_part in expected_texts:
        assert text_part in message


def test_all_errors_of_all_layers_are_reported_with_their_lines(tmp_path: Path) -> None:
    first = write(
        tmp_path,
        "a.yaml",
        "steps: 0\n\nrollout:\n  temprature: 1\n  engine: {port: -1}\ngroups:\n  hub:\n    "
        "roles: [x]",
    )
    second = write(tmp_path, "b.yaml", "name: 5\nseed: 3")
    broken = write(tmp_path, "c.yaml", "name: [\n")
    with pytest.raises(ConfigError) as caught:
        load([first, broken, second], {"seed": -1})
    sources_and_keys = [mistake.split(": ")[:2] for mistake in caught.value.mistakes]
    assert sources_and_keys == [
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
    assert (
        layers.with_source("seed: found 3, allowed: none")
        == f"{second}:2: seed: found 3, allowed: none"
    )
    assert layers.with_source("threads: found 1") == "threads: found 1"


def test_a_mapping_with_only_comments_changes_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a.yaml",
        "groups:\n  # actor: {roles: [actor]}\nsite:\n  env:\n  options:\ndata:\n  eval:\n",
    )
    assert load([path]) == load([])
    lower_layer = write(tmp_path, "b.yaml", "site: {env: {A: '1'}}")
    assert load([lower_layer, path]).site.env == {"A": "1"}


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "")
    with pytest.raises(
        ConfigError, match=r"bse\.yaml: cannot be read: No such file.*did you mean .*base\.yaml"
    ):
        load([tmp_path / "bse.yaml"])
    with pytest.raises(ConfigError, match="cannot be read: a directory, expected a regular file"):
        load([tmp_path])
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not valid YAML"):
        load([tmp_path / "latin.yaml"])


def test_an_error_names_the_right_file_of_three(tmp_path: Path) -> None:
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
    lower_layer = """
    rollout: {temperature: 0.5, engine: {flags: {a: 1, b: [1, 2], c: {x: 1}}}}
    data: {eval: {small: s.jsonl, large: l.jsonl}}
    groups: {actor: {env: {A: '1', B: '2'}}}
    """
    upper_layer = """
    rollout: {top_p: 0.9, engine: {flags: {b: [3], c: {y: 2}, d: null}}}
    data: {eval: {large: null}}
    groups: {actor: {env: {B: '3'}}, reference: null, hub: {roles: []}, extra: {roles: [advantages]}}
    """
    config = load(
        [write(tmp_path, "left.yaml", lower_layer), write(tmp_path, "right.yaml", upper_layer)],
        {"rollout.top_p": 0.8},
    )
    assert (config.rollout.temperature, config.rollout.top_p) == (0.5, 0.8)
    assert config.rollout.engine.flags == {"a": 1, "b": [3], "c": {"y": 2}, "d": None}
    assert config.data.eval == {"small": "s.jsonl"}
    assert config.groups == {
        "hub": GroupConfig(roles=["api"]),
        "rollout": GroupConfig(roles=["rollout"]),
        "actor": GroupConfig(roles=["actor"], env={"A": "1", "B": "3"}),
        "extra": GroupConfig(roles=["advantages"]),
    }


def test_two_layers_can_remove_the_same_group(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "groups: {reference: null}")
    assert "reference" not in load([path, path]).groups


def test_the_reference_exists_for_a_kl_or_if_a_layer_names_it(tmp_path: Path) -> None:
    kl = {"algorithm.kl.coefficient": 0.1}
    with_reference = write(
        tmp_path, "a.yaml", "groups: {reference: {env: {A: '1'}, resources: {nodes: 2}}}"
    )
    assert "reference" not in load([]).groups
    assert load([], kl).groups["reference"] == GroupConfig(roles=["reference"])
    assert load([with_reference]).groups["reference"].roles == ["reference"]
    assert load([with_reference], kl).groups["reference"].resources.nodes == 2
    for scores_in_group in (
        {"actor.forward": ["reference"]},
        {"groups.actor_fwd.roles": ["actor_fwd", "reference"]},
    ):
        assert "reference" not in load([], kl | scores_in_group).groups
    for config in (
        load([], kl),
        load([with_reference]),
        load([], kl | {"groups.reference": None}),
        load([]),
    ):
        dump(config, tmp_path / "config.yaml")
        assert load([tmp_path / "config.yaml"]) == config


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ({}, "float32"),
        ({"device": "cpu"}, "float32"),
        ({"device": "cuda"}, "bfloat16"),
        ({"device": "cuda", "dtype": "float32"}, "float32"),
        ({"device": "cpu", "dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_gpu_computes_in_bfloat16_unless_another_type_is_set(
    model: dict[str, str], dtype: str, tmp_path: Path
) -> None:
    """The default, float32, is for CPUs. A run that exists keeps the type that it has."""
    config = load([], {"model": model})
    assert config.model.dtype == dtype
    config.model.dtype = "float32"
    dump(config, tmp_path / "config.yaml")
    assert load([tmp_path / "config.yaml"]).model.dtype == "float32"


@pytest.mark.parametrize(
    ("layer", "has_triton", "kernels"),
    [
        ({"model.device": "cuda"}, True, "fused"),
        ({"model.device": "cuda"}, False, "plain"),
        # Its nodes have another environment than this process.
        ({"model.device": "cuda", "site.python": "/opt/python"}, False, "fused"),
        ({"model.device": "cuda", "model.dtype": "float32"}, True, "plain"),
        ({"model.device": "cuda", "actor.kernels": "plain"}, True, "plain"),
        ({"model.device": "cuda", "actor.kernels": "te"}, False, "te"),
        ({"model.dtype": "bfloat16"}, True, "plain"),
        ({}, True, "plain"),
    ],
)
def test_a_gpu_has_fused_kernels_unless_others_are_set(
    layer: dict[str, str],
    has_triton: bool,
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was chosen at first is kept by the run, whatever is installed later."""
    find = importlib.util.find_spec

    def install(has_triton: bool) -> None:
        spec = find("torch") if has_triton else None
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: spec if name == "triton" else find(name)
        )

    install(has_triton)
    config = load([], layer)
    assert config.actor.kernels == kernels
    critic = "plain" if kernels == "te" else kernels
    assert config.critic.kernels == ("fused" if layer.get("actor.kernels") == "plain" else critic)
    dump(config, tmp_path / "config.yaml")
    install(not has_triton)
    assert load([tmp_path / "config.yaml"]) == config


def test_empty_files_and_sections_change_nothing(tmp_path: Path) -> None:
    assert load(
        [
            write(tmp_path, "a.yaml", "# nothing"),
            write(tmp_path, "b.yaml", "rollout:\ndata: {}"),
        ]
    ) == load([])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("3", 3.0),
        ("+.5", 0.5),
        ("1.", 1.0),
        ("010", 10.0),
        ("2.0e-3", 2e-3),
    ],
)
def test_numbers_of_yaml_1_2(tmp_path: Path, text: str, value: float) -> None:
    config = load([write(tmp_path, "a.yaml", f"rollout: {{temperature: {text}}}")])
    assert config.rollout.temperature == value and type(config.rollout.temperature) is float


def test_text_that_yaml_1_1_would_change(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a.yaml",
        "groups: {actor: {env: {A: yes, B: 1:30, C: 2024-01-01, D: off, E: 0x10}}}",
    )
    assert load([path]).groups["actor"].env == {
        "A": "yes",
        "B": "1:30",
        "C": "2024-01-01",
        "D": "off",
        "E": "0x10",
    }


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


@pytest.mark.parametrize("value", [None, True, False])
def test_null_unsets_a_setting(tmp_path: Path, value: bool | None) -> None:
    config = load([], {"data.enable_thinking": value})
    dump(config, tmp_path / "config.yaml")
    assert load([tmp_path / "config.yaml"]).data.enable_thinking is value
    with pytest.raises(ConfigError, match="steps: found None, allowed: an integer"):
        load([], {"steps": None})
    with pytest.raises(
        ConfigError, match=r"enable_thinking: found 'no'.*, allowed: true or false or null"
    ):
        load([], {"data.enable_thinking": "no"})


def test_dump_and_load_give_the_same(tmp_path: Path) -> None:
    flags = {
        "text": "1e-3",
        "yes": "yes",
        "many": ["a\nb", "", " x", "é\x07"],
        "deep": {"a": [1, 2.5, None, True]},
    }
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


def test_a_moved_run_directory_has_its_new_path(tmp_path: Path) -> None:
    config = load([], {"run_dir": str(tmp_path / "old"), "steps": 7})
    (tmp_path / "new").mkdir()
    dump(config, tmp_path / "new" / "config.yaml")
    resolved = load_resolved(tmp_path / "new")
    assert (resolved.steps, resolved.run_dir) == (7, str(tmp_path / "new"))


def test_parent_folders_in_a_path_follow_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk" / "mine").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "mine")
    monkeypatch.chdir(tmp_path / "link")
    assert resolve(load([], {"run_dir": "../runs/a"})).run_dir == str(
        tmp_path.resolve() / "disk" / "runs" / "a"
    )
    assert resolve(load([], {"run_dir": f"{tmp_path}/link/a"})).run_dir == f"{tmp_path}/link/a", (
        "as the user named it"
    )


def test_resolve_makes_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve(load([], {"name": "a", "data.train": "t.jsonl", "data.eval.x": "e.jsonl"}))
    assert config.run_dir == str(tmp_path / "runs" / "a")
    assert (config.data.train, config.data.eval) == (
        str(tmp_path / "t.jsonl"),
        {"x": str(tmp_path / "e.jsonl")},
    )
    assert config.model.path == "" and resolve(config) == config


def test_print_config_names_the_source_of_every_value(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a.yaml",
        "steps: 5\nrollout: {engine: {flags: {a: 1}}}\ngroups: {hub: {roles: [advantages]}}",
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
    assert load([write(tmp_path, "b.yaml", text)]) == load(
        [path], {"rollout.top_p": 0.5, "groups.reference": None}
    )


def test_the_error_for_a_removed_setting_names_its_replacement(tmp_path: Path) -> None:
    path = write(tmp_path, "old.yaml", "rollout: {max_attempts: 8}")
    with pytest.raises(
        ConfigError,
        match=r"old\.yaml:1: rollout\.max_attempts: .*any more: rollout\.max_failed_share",
    ):
        load([path])
    assert not {*REMOVED} & {*keys()}


names = st.text("abcxyz", min_size=1, max_size=2)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
layers = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(1, 9),
        "rollout": st.fixed_dictionaries(
            {},
            optional={
                "top_p": st.floats(0, 1),
                "engine": st.fixed_dictionaries(
                    {}, optional={"flags": st.dictionaries(names, plain, max_size=3)}
                ),
            },
        ),
        "data": st.fixed_dictionaries({"eval": st.dictionaries(names, st.text("a"), max_size=3)}),
        "groups": st.dictionaries(
            names,
            st.fixed_dictionaries(
                {},
                optional={
                    "roles": st.just(["actor"]),
                    "env": st.dictionaries(names, st.text("a"), max_size=2),
                },
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
def test_written_yaml_is_read_back(value: Any) -> None:
    assert parse_yaml(dump_yaml({"a": value}), "x") == {"a": value}


@given(st.dictionaries(st.sampled_from(list(to_dict(Config()))) | st.text(), plain, max_size=3))
@settings(max_examples=effort(30, 100), deadline=None)
def test_cleaning_anything_gives_a_layer_or_one_line(tree: Any) -> None:
    try:
        clean(Config, tree, "source")
    except ConfigError as error:
        assert str(error).startswith("source: ")


def test_a_short_name_is_a_packaged_file_and_a_path_stays_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a checkout as in an installed wheel, which tests/project/test_wheel.py has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("steps: 5\n")
    (tmp_path / "quickstart").write_text("steps: 6\n")
    assert load(["quickstart"]).steps == 300
    assert load(["./quickstart"]).steps == 6
    assert load(["mine"]).steps == load([tmp_path / "mine"]).steps == 5
    assert find_config("gsm8k-qwen3-0.6b").is_file(), "a name may have a dot"
    with pytest.raises(
        ConfigError, match=r"allowed: the path .* packaged audio, .*; did you mean dapo\?"
    ):
        load(["dap"])


def test_short_names_of_packaged_files_differ() -> None:
    files = list(configs_folder().rglob("*.yaml"))
    assert len(files) == len(packaged_configs()) > 30


def test_a_packaged_model_is_found_by_name_unless_a_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load([], {"model.path": "Qwen3-0.6B"})
    assert resolve(config).model.path == str(configs_folder() / "models" / "Qwen3-0.6B")
    (tmp_path / "Qwen3-0.6B").mkdir()
    assert resolve(config).model.path == str(tmp_path / "Qwen3-0.6B")
    assert resolve(load([], {"model.path": "other"})).model.path == str(tmp_path / "other")
