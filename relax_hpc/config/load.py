"""Loading of a `Config` from files and overrides: every layer is checked by itself, so that errors
name its file.

Layers compose from left to right. Sections merge; lists are replaced whole; `groups`, `env`,
`flags` and `eval` sets merge by key, and null takes a key out (of `flags` it is a value like any
other).

jsonargparse parses the options of the command line (`config/options.py`), and no files. Its own
action for configuration files, as of 4.53, was tried with the cases of this loader:
- it stops at the first mistake, and names neither file nor line; values have no origin, which
  `print_config` and findings of `check` show (`Layers.sources`, `read.Source`);
- a second file replaces a mapping of the first, such as `groups` or `eval`, where layers merge;
- a key that appears twice, an alias, and nan are accepted, `010` is 8, `yes` is true and a quoted
  number is a number, where `read` and `clean` refuse them or take YAML 1.2 literally;
- a section without lines (`actor:` above nothing but comments) is an error;
- the class of a section follows from `class_path`, not from a `name` (`variants`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from relax_hpc.algorithms import RECORD_KINDS, Algorithm, recorded
from relax_hpc.base.engine_classes import KIND_KEY, declared_fields
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import ROUTES, declare_fields, roles_for
from relax_hpc.base.foreign_files import check_link
from relax_hpc.base.packaged_configs import find_config, find_model
from relax_hpc.base.plugins import imports_allowed
from relax_hpc.base.rundir import RunDir, read_map, write_atomic
from relax_hpc.config.differences import leaves
from relax_hpc.config.layer_validation import COMMAND_LINE, DROPPED, Cleaner, Mistake, near
from relax_hpc.config.roles import OF_DRAWN_ROWS
from relax_hpc.config.schema import Config, default_groups, optional_groups
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.config.variants import FAMILIES, chosen, own_fields
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
)


@dataclasses.dataclass(slots=True)
class Layers:
    """A configuration before it becomes a `Config`, and where each value came from."""

    tree: dict[str, Any]
    sources: dict[str, Source]
    """Dotted key of every leaf that a layer set -> file or `command line`."""
    mistakes: list[Mistake] = dataclasses.field(default_factory=list)
    """Mistakes in the layers, whose values were left out."""

    def placed(self, finding: str) -> str:
        """``finding``, which begins with its key, after the file and line that set it, if one
        did."""
        key = finding.partition(":")[0]
        while key and key not in self.sources:
            key = key.rpartition(".")[0]
        return f"{self.sources[key].at(key)}: {finding}" if key else finding

    @property
    def lack_one(self) -> bool:
        """Whether a whole layer could not be read: most that is found is then about what stands in
        it."""
        return not all(mistake.key for mistake in self.mistakes)

    def explain(self, finding: str) -> bool:
        """Whether ``finding`` may follow from a mistake: it speaks of a key that has its default
        for that reason."""
        wrong = "|".join(re.escape(mistake.key) for mistake in self.mistakes)
        return self.lack_one or bool(wrong and re.search(rf"(?<![\w.])({wrong})(?!\w)", finding))


def load(files: Sequence[Path | str], overrides: Mapping[str, Any] | None = None) -> Config:
    """Compose defaults, `files` from left to right and `overrides` (nested, or by dotted key) into
    a `Config`.

    ConfigError, one line with source, key, found and allowed, for unknown keys, wrong types and
    values out of range. What concerns several fields is found by `relax_hpc.ops.checks.settings`.
    """
    config = build(Config, compose(files, overrides).tree)
    if imports_allowed():
        declare_fields(KIND_KEY, declared_fields(config.rollout.engine.kind))
    if config.model.routing_replay != "off":
        declare_fields("model.routing_replay", (ROUTES,))
    return config


def load_resolved(run_dir: Path | str, group: str = "") -> Config:
    """The configuration of an existing run, with what was changed since for `group`.

    Its `run_dir` is the directory given, even if it was moved. A change that is none is left out,
    and said: those that commands keep were judged before, so nobody of ours wrote it.
    """
    from relax_hpc.config.changes import change_files

    run = RunDir(Path(run_dir))
    run.check_format()
    try:
        check_link(run.config)
    except OSError as error:
        raise ConfigError(f"{run.config}: {error.strerror}") from error
    files = [run.config]
    with recorded(_algorithm_record(run)):
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
    """Record of an algorithm of the user's own, see `record_of`; empty: the run has none."""
    record = read_map(run.algorithm, **RECORD_KINDS)
    names = [*record.get("needs", ()), *record.get("gives", ())]
    return record if all(isinstance(name, str) for name in names) and record.get("gives") else {}


def dump(config: Config, path: Path) -> None:
    """Write `config` as YAML in the order of the schema; readers see the whole file or the one
    before."""
    write_atomic(path, dump_yaml(_complete(to_dict(config))).encode(), sync=True)


def to_dict(config: Config) -> dict[str, Any]:
    """`config` as nested dicts of plain values, in the order of the schema."""
    return dataclasses.asdict(config)


def print_config(layers: Layers) -> str:
    """`layers` as YAML in which every value that a layer set names that layer in a comment; `load`
    reads it back."""
    text = dump_yaml(_complete(layers.tree))
    lines = text.splitlines()
    for key, line in key_lines(text).items():
        if key in layers.sources:
            lines[line] += f"  # {layers.sources[key]}"
    return "\n".join(lines) + "\n"


def resolve(config: Config) -> Config:
    """`config` with `run_dir` filled in and every path made absolute, so that a resume may start
    elsewhere."""
    tree = to_dict(config)
    tree["run_dir"] = tree["run_dir"] or f"runs/{config.name}"
    for *sections, field in _PATHS:
        section = functools.reduce(dict.__getitem__, sections, tree)
        path = find_model(section[field]) if "model" in sections else section[field]
        section[field] = _absolute(path)
    if (template := tree["data"]["chat_template"]) != "model":
        tree["data"]["chat_template"] = _absolute(template)
    for key in ("train_sets", "eval"):
        tree["data"][key] = {name: _absolute(path) for name, path in tree["data"][key].items()}
    return build(Config, tree)


def compose(files: Sequence[Path | str], overrides: Mapping[str, Any] | None = None) -> Layers:
    """Layers of `load`, before the dataclasses are made."""
    layers = gather(files, overrides)
    if layers.mistakes:
        raise ConfigError(*(mistake.text for mistake in layers.mistakes))
    return layers


def gather(files: Sequence[Path | str], overrides: Mapping[str, Any] | None = None) -> Layers:
    """Layers of `compose` with all their mistakes: these are kept, and the values that they are
    about are not."""
    found = Layers(to_dict(Config()), {})
    for file in files:
        try:
            _lay(found, *read_yaml(find_config(file)))
        except ConfigError as error:
            found.mistakes += [Mistake("", text) for text in error.mistakes]
    _lay(found, _nest(overrides or {}), Source(COMMAND_LINE))
    needed = [name for name in _needed_groups(found.tree) if f"groups.{name}" not in found.sources]
    if "actor_fwd" in needed and found.tree["max_staleness"]:
        needed.remove("actor_fwd")
        found.tree = _with_inner_actor_fwd(found.tree)
    found.tree = _with_optional(found.tree, {name: {} for name in needed})
    if found.tree["model"]["device"] == "cuda" and "model.dtype" not in found.sources:
        found.tree = found.tree | {"model": found.tree["model"] | {"dtype": "bfloat16"}}
    if found.tree["environment"]["kind"] == AGENT:
        found.tree = _with_gateway(found.tree)
    if sequences := chosen(Algorithm, found.tree["algorithm"]).sequences:
        found.tree = _of_files(found, sequences)
    return found


def _lay(found: Layers, raw: Any, source: Source) -> None:
    """Lay one more layer over those that were found."""
    cleaner = Cleaner(source, found.tree)
    layer = cleaner.clean(Config, raw)
    if layer is not DROPPED:
        _begin_anew(found, layer, source)
        named = (key.split(".")[1] for key in found.sources if key.startswith("groups."))
        known = {*found.tree["groups"], *optional_groups(), *named}
        _check_removals(layer.get("groups", {}), known, cleaner)
        found.tree = merge(Config, _with_optional(found.tree, layer.get("groups", {})), layer)
        found.sources |= {key: source for key, _ in leaves(layer)}
    found.mistakes += cleaner.mistakes


def _begin_anew(found: Layers, layer: Mapping[str, Any], source: Source) -> None:
    """A section that ``layer`` gives another name has the defaults of that one, and what was set
    before of fields that all of its family have. What was set of others is a mistake: the same word
    may mean something else now."""
    for key, hint in get_type_hints(Config).items():
        before, now = found.tree[key], layer.get(key, {})
        if hint not in FAMILIES or now.get("name", before["name"]) == before["name"]:
            continue
        said = {leaf.split(".")[1] for leaf in found.sources if leaf.startswith(f"{key}.")}
        for name in own_fields(hint, said.difference(now)):
            place = found.sources.pop(f"{key}.{name}").at(f"{key}.{name}")
            text = (
                f"{place}: {key}.{name}: set for {before['name']}, but "
                f"{source.at(f'{key}.name')} names {now['name']}"
            )
            found.mistakes.append(
                Mistake(f"{key}.{name}", f"{text}; set it there too, or remove it here")
            )
        shared = said.intersection(field.name for field in dataclasses.fields(hint))
        fresh = dataclasses.asdict(chosen(hint, now)())
        found.tree = found.tree | {key: fresh | {name: before[name] for name in shared}}


def merge(hint: Any, base: Any, layer: Any) -> Any:
    """`layer` laid over `base`, both clean values of type `hint`; neither is changed."""
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(chosen(hint, layer, base))
        return base | {
            key: merge(hints[key], base.get(key, {}), value) for key, value in layer.items()
        }
    if get_origin(hint) is not dict:
        return layer
    item = get_args(hint)[1]
    merged = base | {
        key: merge(item, base.get(key, {}), value)
        if dataclasses.is_dataclass(item) and value is not None
        else value
        for key, value in layer.items()
    }
    keeps_null = item is Any or type(None) in get_args(item)
    return (
        merged if keeps_null else {key: value for key, value in merged.items() if value is not None}
    )


def build(hint: Any, tree: Any) -> Any:
    """A clean tree as an instance of `hint`; fields that it lacks keep their defaults."""
    if dataclasses.is_dataclass(hint):
        make = cast(Any, chosen(hint, tree))
        hints = get_type_hints(make)
        return make(**{key: build(hints[key], value) for key, value in tree.items()})
    if get_origin(hint) is dict:
        return {key: build(get_args(hint)[1], value) for key, value in tree.items()}
    return list(tree) if isinstance(tree, list) else tree


def _with_optional(tree: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with the defaults of those optional groups that a layer speaks of."""
    made = {
        name: dataclasses.asdict(group)
        for name, group in optional_groups().items()
        if asked.get(name) is not None and name not in tree["groups"]
    }
    return tree | {"groups": tree["groups"] | made}


def _needed_groups(tree: Mapping[str, Any]) -> list[str]:
    """Optional groups whose roles give what the algorithm needs, and which nobody else is there to
    give."""
    algorithm: Algorithm = build(Algorithm, tree["algorithm"])
    placed = [
        *(group.get("roles", ()) for group in tree["groups"].values()),
        tree["actor"]["forward"],
    ]
    missing = roles_for(
        (*algorithm.needs, *algorithm.loss_needs(tree["max_staleness"] > 0))
    ).difference(*placed)
    return [name for name, group in optional_groups().items() if missing.intersection(group.roles)]


def _with_inner_actor_fwd(tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with role `actor_fwd` inside of the actor.

    There its scores are those of the policy before the step. A group scores rows when they come: at
    a staleness above 0 the clip would be around a policy that is several versions old, which costs
    most of what staleness costs.
    """
    actor = tree["actor"]
    return tree | {"actor": actor | {"forward": [*actor["forward"], "actor_fwd"]}}


def _with_gateway(tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with role `gateway`, in the hub unless a layer says otherwise."""
    groups = tree["groups"]
    if "hub" not in groups or any("gateway" in group["roles"] for group in groups.values()):
        return tree
    hub = groups["hub"] | {"roles": [*groups["hub"]["roles"], "gateway"]}
    return tree | {"groups": groups | {"hub": hub}}


def _of_files(found: Layers, sequences: int) -> dict[str, Any]:
    """The tree of a run whose rows are those of files, ``sequences`` in each: without the roles
    that draw, whatever layers say of their groups, as those of a cluster do, and with role `data`,
    in the hub unless one says otherwise."""
    tree, usual = found.tree, {"samples_per_prompt": sequences, "weights.file_every": 0}
    groups = {
        name: group | {"roles": [role for role in group["roles"] if role not in OF_DRAWN_ROWS]}
        for name, group in tree["groups"].items()
    }
    if "hub" in groups and not any("data" in group["roles"] for group in groups.values()):
        groups["hub"]["roles"].append("data")
    left = {name: group for name, group in groups.items() if group["roles"] or name == "hub"}
    said = _nest({key: value for key, value in usual.items() if key not in found.sources})
    inside = [role for role in tree["actor"]["forward"] if role not in OF_DRAWN_ROWS]
    return merge(
        Config, tree | {"groups": left, "actor": tree["actor"] | {"forward": inside}}, said
    )


def _check_removals(groups: Mapping[str, Any], known: Collection[str], cleaner: Cleaner) -> None:
    for name, value in groups.items():
        if value is None and name not in known:
            cleaner.mistake(
                f"groups.{name}",
                "null removes a group, but there is none of that name, allowed: "
                f"{', '.join(sorted(known))}{near(name, sorted(known))}",
            )


def _nest(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Nested maps of dotted keys: {"a": {"b": 1}} of {"a.b": 1}."""
    nested: dict[str, Any] = {}
    # Sections before the fields inside them, so that neither hides the other.
    for dotted, value in sorted(overrides.items(), key=lambda item: item[0].count(".")):
        *sections, name = dotted.split(".")
        section = nested
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(
                    f"{COMMAND_LINE}: {dotted}: given beside a value for {part}, keep one of "
                    "the two"
                )
        section[name] = copy.deepcopy(value)
    return nested


def _complete(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with null for every group that it lacks and that reading it would bring back."""
    back = [*default_groups(), *_needed_groups(tree)]
    return tree | {
        "groups": tree["groups"] | {name: None for name in back if name not in tree["groups"]}
    }


def _absolute(path: str) -> str:
    if not path:
        return ""
    whole = Path(path).expanduser().absolute()
    # Links stay as they were named, unless `..` stands behind one: only the filesystem knows where
    # that leads.
    return str(whole.resolve() if ".." in whole.parts else whole)
