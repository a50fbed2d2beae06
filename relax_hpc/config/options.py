"""Command-line options made from the schema: one a leaf, its help from the text under the field."""

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
    """Title of the group of options it is shown in."""


def options(cls: Any = Config, prefix: str = "", title: str = "") -> Iterator[Option]:
    """Every leaf of the dataclass `cls` in the order of the schema."""
    if cls in FAMILIES:
        yield from _of_family(cls, prefix, title)
        return
    hints, defaults, texts = get_type_hints(cls), cls(), _texts(cls)
    section = f"{title or 'run'}: {_summary(cls)}"
    for field in dataclasses.fields(cls):
        key, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from options(hint, f"{key}.", key)
            continue
        default = getattr(defaults, field.name)
        span = bounds(field.metadata)
        text = " ".join(
            part for part in (texts.get(field.name), f"[{span}]" if span else "") if part
        )
        yield Option(key, hint, default, field.metadata, text, section)


def _of_family(family: Any, prefix: str, title: str) -> Iterator[Option]:
    """Leaves of all that a section may be, each once; those that not all have say who has them."""
    section = f"{title}: {_summary(family)}"
    members = FAMILIES[family].known
    found: dict[str, tuple[Option, list[str]]] = {}
    for name, member in members.items():
        for option in options(member, prefix, title):
            found.setdefault(option.key, (option, []))[1].append(name)
    for option, names in found.values():
        whose = "" if len(names) == len(members) else f" ({', '.join(names)})"
        nested = option.section if option.key.count(".") > 1 else section
        yield dataclasses.replace(option, help=f"{option.help}{whose}", section=nested)


def _summary(cls: Any) -> str:
    """Whole docstring of ``cls`` in one line, without its last full stop."""
    return " ".join(cls.__doc__.split()).rstrip(".")


@functools.cache
def _texts(cls: Any) -> dict[str, str | None]:
    """The text under each field, where the class that has it last says it."""
    from docstring_parser import parse_from_object

    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    return {
        param.arg_name: param.description
        for base in bases
        for param in parse_from_object(base).params
    }


FREE = (
    "--groups.",
    *(f"--{name}." for name, hint in get_type_hints(Config).items() if hint in FAMILIES),
)
"""Beginnings of options whose names depend on the configuration."""


def add_options(parser: ArgumentParser) -> None:
    """An option `--a.b.c` for every leaf of `Config`."""
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
    """`argv` without options that no parser can know, and these as overrides: `--groups.NAME...`,
    of which jsonargparse keeps one item below a name only, and fields of a user's own algorithm.

    >>> split_free(["--steps", "5", "--groups.actor.roles", "[actor]", "--groups.hub=null"])
    (['--steps', '5'], {'groups.actor.roles': ['actor'], 'groups.hub': None})
    """
    rest, found, words = [], {}, iter(argv)
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith(FREE) or key in keys():
            rest.append(word)
            continue
        try:
            text = text if equals else next(words)
        except StopIteration:
            raise ConfigError(f"{COMMAND_LINE}: --{key}: expected one argument") from None
        # Environment variables are text whatever they look like.
        found[key] = (
            text
            if re.fullmatch(r"groups\.[^.]+\.env\..+", key)
            else parse_yaml(text, f"{COMMAND_LINE}: --{key}")
        )
    return rest, found


class OptionError(ConfigError):
    """A mistake in one option, so that others may be looked for without it."""

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f"{COMMAND_LINE}: {text}")
        self.option = option
        """Option as it was written, without a value."""


def explain(message: str) -> NoReturn:
    """Raise the parser's complaint as a ConfigError of one line like those about files."""
    if bad_value := re.search(
        r'Parser key "([^"]+)":.*(?:Got|Given) value: (.*)', message, re.DOTALL
    ):
        raise OptionError(f"--{bad_value[1]}", _bad_value(bad_value[1], bad_value[2].strip()))
    if unknown := re.search(r"unrecognized arguments: (.*)", message, re.DOTALL):
        word = next(
            (part for part in unknown[1].split() if part.startswith("-")), unknown[1].split()[0]
        )
        option = word.partition("=")[0]
        raise OptionError(option, _unknown(word, option.lstrip("-")))
    raise ConfigError(f"{COMMAND_LINE}: {' '.join(message.split())}")


def without(argv: Sequence[str], option: str) -> list[str]:
    """``argv`` without ``option`` and its values.

    >>> without(["--steps", "5", "--lr=1", "--seed", "x", "y", "--resume"], "--seed")
    ['--steps', '5', '--lr=1', '--resume']
    """
    left, inside = [], False
    for word in argv:
        inside = word.partition("=")[0] == option or (inside and not word.startswith("--"))
        if not inside:
            left.append(word)
    return left


def _unknown(word: str, key: str) -> str:
    leaves = [option.key for option in options()]
    if key in keys():
        inside = [leaf for leaf in leaves if leaf.startswith(f"{key}.")]
        return f"{word}: a section, allowed: its fields, like --{inside[0]}"
    if text := explain_other_name(key):
        return f"{word}: unknown option; {text}"
    hint = near(key, leaves)
    suggestion = "" if hint else suggest_other_name(key)
    if suggestion:
        return f"{word}: unknown option; {suggestion}"
    return f"{word}: unknown option{hint}; see --help"


def _bad_value(key: str, found: str) -> str:
    option = next((item for item in options() if item.key == key), None)
    if option is not None and get_origin(option.hint) is dict:
        allowed = f"--{key}.NAME VALUE or --{key} '{{NAME: VALUE}}'"
        return f"{key}: {found_and_allowed(found, allowed)}"
    cleaner = Cleaner(Source(COMMAND_LINE))
    if option is not None and cleaner.clean(option.hint, found, key, option.metadata) is DROPPED:
        return cleaner.mistakes[0].text.removeprefix(f"{COMMAND_LINE}: ")
    return f"{key}: found {found!r}, which is not allowed; see --help"
