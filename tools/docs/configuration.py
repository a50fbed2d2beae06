"""Pages of docs/configuration: every setting, made from the schema, and an index with the most used
ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from relax_hpc.config.options import Option, options
from relax_hpc.config.schema import GroupConfig

PAGES = {
    "run": ("The run", ("run", "warm_start")),
    "model": ("Model", ("model",)),
    "data": ("Data and media", ("data",)),
    "algorithm": ("Algorithm", ("algorithm",)),
    "rollout": ("Rollout and engines", ("rollout", "genrm")),
    "environment": ("Environments of episodes", ("environment",)),
    "reward": ("Rewards", ("reward",)),
    "trainers": (
        "Trainers and forward roles",
        ("actor", "actor_fwd", "reference", "teacher", "critic"),
    ),
    "storage": ("Queue, weights and checkpoints", ("queue", "weights", "checkpoint")),
    "observation": (
        "Evaluation, samples, metrics, events, profiles and liveness",
        ("eval", "samples", "metrics", "events", "profile", "liveness"),
    ),
    "service": ("The HTTP service", ("service",)),
    "cluster": ("Slurm, sites and groups", ("slurm", "site", "groups")),
}
"""File name of a page -> its title, and the top-level sections that it describes."""
MOST_USED = (
    *("run_dir", "steps", "prompts_per_step", "samples_per_prompt", "max_staleness"),
    *("model.path", "model.dtype", "model.device"),
    *("data.train", "data.eval", "data.chat_template", "data.max_prompt_tokens"),
    *(
        "algorithm.name",
        "rollout.reward",
        "rollout.filter",
        "rollout.max_new_tokens",
        "rollout.temperature",
    ),
    *("rollout.replicas", "rollout.engine.flags"),
    *("actor.optimizer.lr", "actor.parallel.tensor", "actor.max_tokens_per_micro_batch"),
    *("checkpoint.every", "eval.every", "groups"),
)
"""The 25 settings that most files in configs/ and most command lines of the README set."""

_INDEX = """# Configuration

After reading this page you can find any setting of a run and set it in a file or on the command line.

```
relax-hpc run --config configs/runs/quickstart.yaml --rollout.replicas 2 --steps 100
```

A run is composed of YAML files, from left to right, and of options on the command line. Options come last and win.

| command | what it shows |
|---|---|
| `relax-hpc check --config run.yaml` | every mistake in a configuration; starts nothing |
| `relax-hpc run --config run.yaml --print_config` | the composed configuration, and the source of each value |
| `relax-hpc run --help rollout` | every setting of one section |

These pages are generated from [the schema](../../relax_hpc/config/schema/) by `python tools/docs`.

## The 25 settings that most runs touch

"""
_PAGE = """# Settings: {title}

After reading this page you can set every option of {sections}.
The [index](index.md) lists the most used settings and explains how files and options combine.

```
relax-hpc run --help {topic}
```

Each entry gives the type and the default of the setting. Files and the command line use the same names.

"""
_GROUPS = (
    "Names of groups, each with its roles and resources; see [groups.NAME](cluster.md#groupsname)"
)


def pages() -> dict[str, str]:
    """Text of each page by its path below docs/."""
    every = [*options(), *options(GroupConfig, "groups.NAME.", "groups.NAME")]
    made = {f"configuration/{name}.md": _page(name, every) for name in PAGES}
    return {"configuration/index.md": _index(every), **made}


def page_of(option: Option) -> str:
    """File name of the page that describes an option, such as `model`."""
    top = _title(option).partition(".")[0]
    top = "groups" if option.key == "groups" else top
    return next(name for name, (_, sections) in PAGES.items() if top in sections)


def _index(every: list[Option]) -> str:
    by_key = {option.key: option for option in every}
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for key in MOST_USED:
        option = by_key[key]
        anchor = "groupsname" if key == "groups" else _title(option).replace(".", "")
        cells = [f"[`{key}`]({page_of(option)}.md#{anchor})"]
        if key == "groups":
            cells += [
                "mapping to group",
                "one group a role",
                "Which roles run together, and on which resources",
            ]
        else:
            cells += [
                _kind(option.hint),
                f"`{_shown(option.default)}`",
                " ".join(option.help.split()),
            ]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines += ["", "## All pages", "", "| page | sections |", "|---|---|"]
    for name, (title, sections) in PAGES.items():
        lines.append(
            f"| [{title}]({name}.md) | {', '.join(f'`{section}`' for section in sections)} |"
        )
    return _INDEX + "\n".join(lines) + "\n"


def _page(name: str, every: list[Option]) -> str:
    title, sections = PAGES[name]
    head = _PAGE.format(
        title=title, sections=", ".join(f"`{s}`" for s in sections), topic=sections[0]
    )
    own = [option for option in every if page_of(option) == name]
    return head + "\n".join(_sections(own)).rstrip() + "\n"


def _title(option: Option) -> str:
    return option.section.partition(": ")[0]


def _sections(own: list[Option]) -> Iterator[str]:
    by_section: dict[str, list[Option]] = {}
    for option in own:
        # The setting `groups` belongs to `run` in the schema, but is described with the groups.
        section = (
            "groups: Processes that start and stop together"
            if option.key == "groups"
            else option.section
        )
        by_section.setdefault(section, []).append(option)
    for section, entries in by_section.items():
        name, _, summary = section.partition(": ")
        yield f"## {name}\n\n{summary}.\n"
        yield from map(_entry, entries)
        yield ""


def _entry(option: Option) -> str:
    if option.key == "groups":
        return f"- **`groups`**. {_GROUPS}."
    text = option.help and f" {_text(option)}"
    return f"- **`{option.key}`** ({_kind(option.hint)}, `{_shown(option.default)}`).{text}"


def _text(option: Option) -> str:
    """Description in one line; `<` outside of code would begin an HTML tag."""
    parts = " ".join(option.help.split()).split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _kind(hint: Any) -> str:
    """Name of a type as a YAML author would call it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(
            f"`{json.dumps(value)}`".replace('"', "") if value else '`""`' for value in inner
        )
    if origin is list:
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return f"mapping to {_kind(inner[1])}"
    if origin in (Union, UnionType):
        return " or ".join(map(_kind, inner))
    if dataclasses.is_dataclass(hint):
        return "section"
    return {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
        "Any": "anything",
        "NoneType": "null",
    }.get(hint.__name__, hint.__name__)


def _shown(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    return json.dumps(value)
