"""Loading of a `Config` from files and overrides. Every layer is checked separately, so that errors
name its file.

Layers compose from left to right. Sections merge; lists are replaced. `groups`, `env`, `flags` and
`eval` sets merge by key, and null removes a key (in `flags` null is an ordinary value).

jsonargparse parses the options of the command line (`config/options.py`), but no files. Its own
action for configuration files (version 4.53) was tried with the tests of this loader:
- It stops at the first mistake, and names neither file nor line. Values have no origin, which
  `print_config` and findings of `check` show (`Layers.sources`, `yaml_files.Source`).
- A second file replaces a mapping of the first, such as `groups` or `eval`; layers merge them.
- It accepts a key that appears twice, an alias, and nan. `010` is 8, `yes` is true, and a quoted
  number is a number. `yaml_files` and `layer_validation` refuse them or follow YAML 1.2.
- A section without lines (`actor:` above nothing but comments) is an error.
- The class of a section is selected by `class_path`, not by a `name` (`variants`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from relax_hpc.algorithms import RECORD_KINDS, Algorithm, with_algorithm_record
from relax_hpc.base.engine_classes import KIND_KEY, declared_fields
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import ROUTES, declare_fields, roles_for
from relax_hpc.base.foreign_files import check_link
from relax_hpc.base.packaged_configs import find_config, find_model
from relax_hpc.base.plugins import imports_allowed
from relax_hpc.base.rundir import RunDir, read_map, write_atomic
from relax_hpc.config.differences import leaves
from relax_hpc.config.layer_validation import COMMAND_LINE, DROPPED, Cleaner, Mistake, near
from relax_hpc.config.roles import FOR_GENERATED_ROWS, FOR_GENERATION, FOR_TRAINING
from relax_hpc.config.schema import Config, default_groups, optional_groups
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.config.variants import FAMILIES, own_fields, variant
from relax_hpc.config.yaml_files import Source, dump_yaml, key_lines, read_yaml

_PATHS = (
    ("run_dir",),
    ("model", "path"),
    ("model", "reference_path"),
    ("model", "teacher_path"),
    ("model", "critic_path"),
    ("genrm", "path"),
    ("reward", "judge", "endpoints"),
    ("data", "train"),
    ("rows",),
)

"""Settings that are paths, which `resolve` makes absolute."""


@dataclasses.dataclass(slots=True)
class Layers:
    """A configuration before it becomes a `Config`, and the source of each value."""

    tree: dict[str, Any]
    sources: dict[str, Source]
    """Source (file or `command line`) of every leaf that a layer set, by dotted key."""
    mistakes: list[Mistake] = dataclasses.field(default_factory=list)
    """Mistakes in the layers. Their values were left out."""

    def with_source(self, finding: str) -> str:
        """Return ``finding``, which begins with its key, after the file and line that set the key,
        if a layer did."""
        key = finding.partition(":")[0]
        while key and key not in self.sources:
            key = key.rpartition(".")[0]
        return f"{self.sources[key].at(key)}: {finding}" if key else finding

    @property
    def lost_layer(self) -> bool:
        """Whether a whole layer could not be read. Most findings are then about its settings."""
        return not all(mistake.key for mistake in self.mistakes)

    def may_cause(self, finding: str) -> bool:
        """Whether ``finding`` may follow from a mistake: it names a key that has its default
        because of the mistake."""
        if self.lost_layer:
            return True
        wrong = "|".join(re.escape(mistake.key) for mistake in self.mistakes)
        return bool(wrong and re.search(rf"(?<![\w.])({wrong})(?!\w)", finding))


def load(files: Sequence[Path | str], overrides: Mapping[str, Any] | None = None) -> Config:
    """Compose defaults, `files` from left to right and `overrides` (nested, or by dotted key) into
    a `Config`.

    ConfigError: unknown keys, wrong types and values out of range, each in one line with source,
    key, found and allowed. `relax_hpc.ops.checks.settings` checks settings against each other.
    """
    config = build(Config, compose(files, overrides).tree)
    declare_run_fields(config)
    return config


def declare_run_fields(config: Config) -> None:
    """Add the fields that only this run has to the table of fields: those of the class of its
    engines, and the routes of routing replay.

    ConfigError: the kind of engine is unknown, or a field cannot be added.
    """
    if imports_allowed():
        declare_fields(KIND_KEY, declared_fields(config.rollout.engine.kind))
    if config.model.routing_replay != "off":
        declare_fields("model.routing_replay", (ROUTES,))


def load_resolved(run_dir: Path | str, group: str = "") -> Config:
    """Return the configuration of an existing run, with the later changes for `group`.

    `run_dir` of the result is the given directory, even if the run was moved. A change that is not
    valid is skipped with a message: commands check changes before they store them, so another
    program wrote it.
    """
    from relax_hpc.config.changes import change_files

    run = RunDir(Path(run_dir))
    run.check_format()
    try:
        check_link(run.config)
    except OSError as error:
        raise ConfigError(f"{run.config}: {error.strerror}") from error
    files = [run.config]
    with with_algorithm_record(_algorithm_record(run)):
        config = load(files)
        for path in change_files(run, group) if group else []:
            try:
                config = load([*files, path])
                files.append(path)
            except ConfigError as error:
                print(f"left out: {error}", file=sys.stderr, flush=True)
    config.run_dir = str(run.root)
    return config


def _algorithm_record(run: RunDir) -> dict[str, Any]:
    """Return the record of the user's algorithm, see `algorithm_record`; empty if the run has
    none."""
    record = read_map(run.algorithm, **RECORD_KINDS)
    names = [*record.get("needs", ()), *record.get("gives", ())]
    if not record.get("gives") or not all(isinstance(name, str) for name in names):
        return {}
    return record


def dump(config: Config, path: Path) -> None:
    """Write `config` as YAML in the order of the schema. The write is atomic."""
    write_atomic(path, dump_yaml(_complete(to_dict(config))).encode(), sync=True)


def to_dict(config: Config) -> dict[str, Any]:
    """Return `config` as nested dicts of plain values, in the order of the schema."""
    return dataclasses.asdict(config)


def print_config(layers: Layers) -> str:
    """Return `layers` as YAML, with the source of every value that a layer set in a comment. `load`
    reads it back."""
    text = dump_yaml(_complete(layers.tree))
    lines = text.splitlines()
    for key, line in key_lines(text).items():
        if key in layers.sources:
            lines[line] += f"  # {layers.sources[key]}"
    return "\n".join(lines) + "\n"


def resolve(config: Config) -> Config:
    """Return `config` with `run_dir` set and every path absolute, so that a resume may start in
    another folder."""
    tree = to_dict(config)
    tree["run_dir"] = tree["run_dir"] or f"runs/{config.name}"
    for *sections, field in _PATHS:
        section = functools.reduce(dict.__getitem__, sections, tree)
        path = find_model(section[field]) if "model" in sections else section[field]
        section[field] = _absolute(path)
    template = tree["data"]["chat_template"]
    if template != "model":
        tree["data"]["chat_template"] = _absolute(template)
    for key in ("train_sets", "eval"):
        tree["data"][key] = {name: _absolute(path) for name, path in tree["data"][key].items()}
    return build(Config, tree)


def compose(files: Sequence[Path | str], overrides: Mapping[str, Any] | None = None) -> Layers:
    """Return the layers of `load`, before the dataclasses are created."""
    layers = gather(files, overrides)
    if layers.mistakes:
        raise ConfigError(*(mistake.text for mistake in layers.mistakes))
    return layers


def gather(files: Sequence[Path | str], overrides: Mapping[str, Any] | None = None) -> Layers:
    """Return the layers of `compose` with all their mistakes. Values with a mistake are left
    out."""
    layers = Layers(to_dict(Config()), {})
    for file in files:
        try:
            _add_layer(layers, *read_yaml(find_config(file)))
        except ConfigError as error:
            layers.mistakes += [Mistake("", text) for text in error.mistakes]
    _add_layer(layers, _nest(overrides or {}), Source(COMMAND_LINE))
    needed = [
        name for name in _needed_groups(layers.tree) if f"groups.{name}" not in layers.sources
    ]
    if "actor_fwd" in needed and layers.tree["max_staleness"]:
        needed.remove("actor_fwd")
        layers.tree = _with_inner_actor_fwd(layers.tree)
    layers.tree = _with_optional(layers.tree, {name: {} for name in needed})
    if layers.tree["model"]["device"] == "cuda":
        layers.tree = _with_gpu_defaults(layers)
    if layers.tree["environment"]["kind"] == AGENT:
        layers.tree = _with_hub_role(layers.tree, "gateway")
    if layers.tree["service"]["enabled"]:
        layers.tree = _with_hub_role(layers.tree, "api")
    sequences = variant(Algorithm, layers.tree["algorithm"]).sequences
    if sequences:
        layers.tree = _without_generation(layers, sequences)
    elif layers.tree["only"] == "rollout":
        layers.tree = _without_roles(layers.tree, FOR_TRAINING, "collector")
    elif layers.tree["only"] == "train":
        layers.tree = _without_roles(layers.tree, FOR_GENERATION, "exported_rows")
    return layers


def _with_gpu_defaults(layers: Layers) -> dict[str, Any]:
    """Return the tree with the type and the kernels of a model on GPUs, if no layer sets them.

    The choice is stored with the run, so that groups that restart keep it. For fused kernels,
    tools/bench/results/gpu-nvidia-h200.json has 1.6 times the speed of plain ones.
    """
    tree = layers.tree
    defaults = {"model.dtype": "bfloat16"}
    dtype = tree["model"]["dtype"] if "model.dtype" in layers.sources else "bfloat16"
    if dtype == "bfloat16" and _nodes_have_triton(tree["site"]):
        defaults |= {"actor.kernels": "fused", "critic.kernels": "fused"}
    unset = {key: value for key, value in defaults.items() if key not in layers.sources}
    return merge(Config, tree, _nest(unset))


def _nodes_have_triton(site: Mapping[str, Any]) -> bool:
    """Whether Triton is installed. If nodes use another environment than this process, it is
    assumed, because torch for CUDA requires it; a start without it is refused by name."""
    is_here = not site["python"] and site["container"]["runtime"] == "none"
    return not is_here or importlib.util.find_spec("triton") is not None


def _add_layer(layers: Layers, raw: Any, source: Source) -> None:
    """Validate one more layer and put it on top of ``layers``."""
    cleaner = Cleaner(source, layers.tree)
    layer = cleaner.clean(Config, raw)
    if layer is not DROPPED:
        _reset_renamed_sections(layers, layer, source)
        named = (key.split(".")[1] for key in layers.sources if key.startswith("groups."))
        removable = {*layers.tree["groups"], *optional_groups(), *named}
        _check_removals(layer.get("groups", {}), removable, cleaner)
        layers.tree = merge(Config, _with_optional(layers.tree, layer.get("groups", {})), layer)
        layers.sources |= {key: source for key, _ in leaves(layer)}
    layers.mistakes += cleaner.mistakes


def _reset_renamed_sections(layers: Layers, layer: Mapping[str, Any], source: Source) -> None:
    """Reset each section to which ``layer`` gives another name to the defaults of that name.

    Values that lower layers set for fields of the whole family stay. Values of other fields are a
    mistake, because the same word may mean something else now.
    """
    for key, hint in get_type_hints(Config).items():
        before, after = layers.tree[key], layer.get(key, {})
        if hint not in FAMILIES or after.get("name", before["name"]) == before["name"]:
            continue
        set_fields = {leaf.split(".")[1] for leaf in layers.sources if leaf.startswith(f"{key}.")}
        for name in own_fields(hint, set_fields.difference(after)):
            location = layers.sources.pop(f"{key}.{name}").at(f"{key}.{name}")
            text = (
                f"{location}: {key}.{name}: set for {before['name']}, but "
                f"{source.at(f'{key}.name')} names {after['name']}"
            )
            layers.mistakes.append(
                Mistake(f"{key}.{name}", f"{text}; set it there too, or remove it here")
            )
        shared = set_fields.intersection(field.name for field in dataclasses.fields(hint))
        defaults = dataclasses.asdict(variant(hint, after)())
        kept = {name: before[name] for name in shared}
        layers.tree = layers.tree | {key: defaults | kept}


def merge(hint: Any, base: Any, layer: Any) -> Any:
    """Return `layer` merged over `base`, both validated values of type `hint`. Neither is
    changed."""
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(variant(hint, layer, base))
        return base | {
            key: merge(hints[key], base.get(key, {}), value) for key, value in layer.items()
        }
    if get_origin(hint) is not dict:
        return layer
    item = get_args(hint)[1]
    merged = dict(base)
    for key, value in layer.items():
        if dataclasses.is_dataclass(item) and value is not None:
            value = merge(item, base.get(key, {}), value)
        merged[key] = value
    keeps_null = item is Any or type(None) in get_args(item)
    if keeps_null:
        return merged
    return {key: value for key, value in merged.items() if value is not None}


def build(hint: Any, tree: Any) -> Any:
    """Return a validated tree as an instance of `hint`. Missing fields have their defaults."""
    if dataclasses.is_dataclass(hint):
        make = cast(Any, variant(hint, tree))
        hints = get_type_hints(make)
        return make(**{key: build(hints[key], value) for key, value in tree.items()})
    if get_origin(hint) is dict:
        return {key: build(get_args(hint)[1], value) for key, value in tree.items()}
    return list(tree) if isinstance(tree, list) else tree


def _with_optional(tree: dict[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with the defaults of those optional groups that ``groups`` names."""
    added = {
        name: dataclasses.asdict(group)
        for name, group in optional_groups().items()
        if groups.get(name) is not None and name not in tree["groups"]
    }
    return tree | {"groups": tree["groups"] | added}


def _needed_groups(tree: Mapping[str, Any]) -> list[str]:
    """Return the optional groups whose roles give fields that the algorithm needs and that no other
    role gives."""
    algorithm: Algorithm = build(Algorithm, tree["algorithm"])
    present_roles = set(tree["actor"]["forward"])
    for group in tree["groups"].values():
        present_roles.update(group.get("roles", ()))
    fields = (*algorithm.needs, *algorithm.loss_needs(tree["max_staleness"] > 0))
    missing = roles_for(fields) - present_roles
    return [name for name, group in optional_groups().items() if missing.intersection(group.roles)]


def _with_inner_actor_fwd(tree: dict[str, Any]) -> dict[str, Any]:
    """Return ``tree`` with role `actor_fwd` inside the actor.

    There it scores rows with the policy before the step. A group scores rows when they arrive. With
    a staleness above 0 the clip would then be around a policy that is several versions old, which
    causes most of the cost of staleness.
    """
    actor = tree["actor"]
    return tree | {"actor": actor | {"forward": [*actor["forward"], "actor_fwd"]}}


def _with_hub_role(tree: dict[str, Any], role: str) -> dict[str, Any]:
    """Return ``tree`` with ``role``, in the hub unless a layer assigns it."""
    groups = tree["groups"]
    if "hub" not in groups or any(role in group.get("roles", ()) for group in groups.values()):
        return tree
    hub = groups["hub"] | {"roles": [*groups["hub"].get("roles", ()), role]}
    return tree | {"groups": groups | {"hub": hub}}


def _without_generation(layers: Layers, sequences: int) -> dict[str, Any]:
    """Return the tree of a run whose rows come from files, with ``sequences`` in each row.

    Roles that generate rows are removed, even if layers name their groups, as cluster files do. The
    role `data` is added, in the hub unless a layer assigns it.
    """
    tree = layers.tree
    defaults = {"samples_per_prompt": sequences, "weights.file_every": 0}
    groups = {}
    for name, group in tree["groups"].items():
        roles = [role for role in group["roles"] if role not in FOR_GENERATED_ROWS]
        groups[name] = group | {"roles": roles}
    if "hub" in groups and not any("data" in group["roles"] for group in groups.values()):
        groups["hub"]["roles"].append("data")
    groups = {name: group for name, group in groups.items() if group["roles"] or name == "hub"}
    forward = [role for role in tree["actor"]["forward"] if role not in FOR_GENERATED_ROWS]
    tree = tree | {"groups": groups, "actor": tree["actor"] | {"forward": forward}}
    unset = {key: value for key, value in defaults.items() if key not in layers.sources}
    return merge(Config, tree, _nest(unset))


def _without_roles(tree: dict[str, Any], removed: Collection[str], added: str) -> dict[str, Any]:
    """Return ``tree`` for a part of the loop: without the roles ``removed``, even if layers name
    their groups, and with ``added`` in the hub unless a layer assigns it."""
    groups = {}
    for name, group in tree["groups"].items():
        roles = [role for role in group["roles"] if role not in removed]
        groups[name] = group | {"roles": roles}
    groups = {name: group for name, group in groups.items() if group["roles"] or name == "hub"}
    forward = [role for role in tree["actor"]["forward"] if role not in removed]
    tree = tree | {"groups": groups, "actor": tree["actor"] | {"forward": forward}}
    # A part has no second side with which it could share devices.
    return _with_hub_role(tree | {"colocate": False}, added)


def _check_removals(
    groups: Mapping[str, Any], removable: Collection[str], cleaner: Cleaner
) -> None:
    for name, value in groups.items():
        if value is None and name not in removable:
            cleaner.mistake(
                f"groups.{name}",
                "null removes a group, but no group has this name, allowed: "
                f"{', '.join(sorted(removable))}{near(name, sorted(removable))}",
            )


def _nest(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested maps from dotted keys: {"a": {"b": 1}} from {"a.b": 1}."""
    nested: dict[str, Any] = {}
    # Sections come before the fields inside them, so that a conflict of the two is detected.
    for dotted, value in sorted(overrides.items(), key=lambda item: item[0].count(".")):
        *sections, name = dotted.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(
                    f"{COMMAND_LINE}: {dotted}: {section} has a value, too; keep one of the two"
                )
        target[name] = copy.deepcopy(value)
    return nested


def _complete(tree: dict[str, Any]) -> dict[str, Any]:
    """Return `tree` with null for every missing group that loading would add again."""
    added = [*default_groups(), *_needed_groups(tree)]
    removed = {name: None for name in added if name not in tree["groups"]}
    return tree | {"groups": tree["groups"] | removed}


def _absolute(path: str) -> str:
    if not path:
        return ""
    whole = Path(path).expanduser().absolute()
    # Links keep their names. Only the filesystem knows the target of a `..` after a link, so a path
    # with `..` is resolved.
    return str(whole.resolve() if ".." in whole.parts else whole)
