"""Command-line options from the schema: one per leaf, with the text below the field as its help."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, get_origin, get_type_hints

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.layer_validation import (
    COMMAND_LINE,
    DROPPED,
    Cleaner,
    bounds,
    found_and_allowed,
    keys,
    near,
)
from relax_hpc.config.other_trainers import explain_other_name, suggest_other_name
from relax_hpc.config.schema import Config
from relax_hpc.config.variants import FAMILIES
from relax_hpc.config.yaml_files import Source, parse_yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A leaf of the schema."""

    key: str
    """Dotted key."""
    hint: Any
    default: Any
    metadata: Any
    help: str
    section: str
    """Title of the group of options in which it is shown."""


def options(cls: Any = Config, prefix: str = "", title: str = "") -> Iterator[Option]:
    """Yield every leaf of the dataclass `cls` in the order of the schema."""
    if cls in FAMILIES:
        yield from _family_options(cls, prefix, title)
        return
    hints, defaults, texts = get_type_hints(cls), cls(), _descriptions(cls)
    section = f"{title or 'run'}: {_summary(cls)}"
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from options(hint, f"{key}.", key)
            continue
        default = getattr(defaults, field.name)
        span = bounds(field.metadata)
        text = texts.get(field.name) or ""
        if span:
            text = f"{text} [{span}]".lstrip()
        yield Option(key, hint, default, field.metadata, text, section)


def _family_options(family: Any, prefix: str, title: str) -> Iterator[Option]:
    """Yield the leaves of all members of a family, each once. If only some members have a leaf, its
    help names them."""
    section = f"{title}: {_summary(family)}"
    members = FAMILIES[family].members
    owners: dict[str, tuple[Option, list[str]]] = {}
    for name, member in members.items():
        for option in options(member, prefix, title):
            owners.setdefault(option.key, (option, []))[1].append(name)
    for option, names in owners.values():
        suffix = "" if len(names) == len(members) else f" ({', '.join(names)})"
        nested = option.section if option.key.count(".") > 1 else section
        yield dataclasses.replace(option, help=f"{option.help}{suffix}", section=nested)


def _summary(cls: Any) -> str:
    """Return the whole docstring of ``cls`` in one line, without its last full stop."""
    return " ".join(cls.__doc__.split()).rstrip(".")


@functools.cache
def _descriptions(cls: Any) -> dict[str, str | None]:
    """Return the text below each field. If several base classes describe it, the most derived class
    counts."""
    from docstring_parser import parse_from_object

    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    descriptions = {}
    for base in bases:
        for param in parse_from_object(base).params:
            descriptions[param.arg_name] = param.description
    return descriptions


FREE = (
    "--groups.",
    *(f"--{name}." for name, hint in get_type_hints(Config).items() if hint in FAMILIES),
)
"""Prefixes of options whose names depend on the configuration."""


def add_options(parser: ArgumentParser) -> None:
    """Add an option `--a.b.c` for every leaf of `Config`."""
    groups: dict[str, Any] = {}
    for option in options():
        if option.section not in groups:
            title, _, summary = option.section.partition(": ")
            groups[option.section] = parser.add_argument_group(title, f"{summary}.")
        group = groups[option.section]
        hint, default = option.hint, option.default
        if option.key == "groups":
            hint = dict[str, Any]
            default = {name: dataclasses.asdict(value) for name, value in default.items()}
        # argparse formats help with %.
        text = option.help.replace("%", "%%") or option.key
        group.add_argument(f"--{option.key}", type=hint, default=default, help=text)


def split_free(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `argv` into options for the parser and overrides that no parser can know.

    These are `--groups.NAME...`, of which jsonargparse keeps only one item below a name, and fields
    of the user's own algorithm.

    >>> split_free(["--steps", "5", "--groups.actor.roles", "[actor]", "--groups.hub=null"])
    (['--steps', '5'], {'groups.actor.roles': ['actor'], 'groups.hub': None})
    """
    parsed: list[str] = []
    overrides: dict[str, Any] = {}
    arguments = iter(argv)
    for argument in arguments:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith(FREE) or key in keys():
            parsed.append(argument)
            continue
        if not equals:
            value = next(arguments, None)
            if value is None:
                raise ConfigError(f"{COMMAND_LINE}: --{key}: expected one argument")
            text = value
        # Environment variables are always text, even if they look like numbers.
        is_variable = re.fullmatch(r"groups\.[^.]+\.env\..+", key)
        overrides[key] = text if is_variable else parse_yaml(text, f"{COMMAND_LINE}: --{key}")
    return parsed, overrides


class OptionError(ConfigError):
    """A mistake in one option. Other mistakes can be looked for without this option."""

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f"{COMMAND_LINE}: {text}")
        self.option = option
        """The option as it was written, without a value."""


def explain(message: str) -> NoReturn:
    """Raise the parser's message as a ConfigError in one line, in the form of errors about
    files."""
    bad_value = re.search(r'Parser key "([^"]+)":.*(?:Got|Given) value: (.*)', message, re.DOTALL)
    if bad_value:
        raise OptionError(f"--{bad_value[1]}", _bad_value(bad_value[1], bad_value[2].strip()))
    unknown = re.search(r"unrecognized arguments: (.*)", message, re.DOTALL)
    if unknown:
        arguments = unknown[1].split()
        argument = next((item for item in arguments if item.startswith("-")), arguments[0])
        option = argument.partition("=")[0]
        raise OptionError(option, _unknown(argument, option.lstrip("-")))
    raise ConfigError(f"{COMMAND_LINE}: {' '.join(message.split())}")


def without(argv: Sequence[str], option: str) -> list[str]:
    """Return ``argv`` without ``option`` and its values.

    >>> without(["--steps", "5", "--lr=1", "--seed", "x", "y", "--resume"], "--seed")
    ['--steps', '5', '--lr=1', '--resume']
    """
    remaining = []
    is_removed = False
    for argument in argv:
        is_value = is_removed and not argument.startswith("--")
        is_removed = argument.partition("=")[0] == option or is_value
        if not is_removed:
            remaining.append(argument)
    return remaining


def _unknown(argument: str, key: str) -> str:
    leaves = [option.key for option in options()]
    if key in keys():
        inside = [leaf for leaf in leaves if leaf.startswith(f"{key}.")]
        return f"{argument}: a section, allowed: its fields, like --{inside[0]}"
    explanation = explain_other_name(key)
    if explanation:
        return f"{argument}: unknown option; {explanation}"
    hint = near(key, leaves)
    suggestion = "" if hint else suggest_other_name(key)
    if suggestion:
        return f"{argument}: unknown option; {suggestion}"
    return f"{argument}: unknown option{hint}; see --help"


def _bad_value(key: str, value: str) -> str:
    option = next((item for item in options() if item.key == key), None)
    if option is not None and get_origin(option.hint) is dict:
        allowed = f"--{key}.NAME VALUE or --{key} '{{NAME: VALUE}}'"
        return f"{key}: {found_and_allowed(value, allowed)}"
    cleaner = Cleaner(Source(COMMAND_LINE))
    if option is not None and cleaner.clean(option.hint, value, key, option.metadata) is DROPPED:
        return cleaner.mistakes[0].text.removeprefix(f"{COMMAND_LINE}: ")
    return f"{key}: found {value!r}, which is not allowed; see --help"
