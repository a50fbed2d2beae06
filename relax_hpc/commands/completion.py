"""`relax-hpc completion bash`: print a script by which bash completes commands, options and values.

The script contains all names, so a completion starts no Python. It has to be printed again after an
upgrade. shtab, which jsonargparse supports, would need one parser with all subcommands, and would
repeat the settings of the configuration for each of them.
"""

from __future__ import annotations

import shlex
from argparse import Action
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args, get_origin

from jsonargparse import ArgumentParser

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.packaged_configs import packaged_configs
from relax_hpc.commands.command import Command, CommandGroup
from relax_hpc.config.layer_validation import COMMAND_LINE, near
from relax_hpc.config.options import options

_SHELLS = ("bash",)
_RUN_METAVARS = ("RUN", "DIR")
"""Names of positional arguments that are run directories or folders of them."""
_SCRIPT = """\
# Completion of relax-hpc. Printed by `relax-hpc completion bash`; print it again after an upgrade.
_relax_hpc_options() {
  case "$1" in
@OPTIONS@
  esac
}
_relax_hpc_settings() {
  echo @SETTINGS@
}
_relax_hpc_values() {
  case "$1" in
@VALUES@
    --config) echo @CONFIGS@; return 2 ;;
    *) return 1 ;;
  esac
}
_relax_hpc() {
  local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} index command=""
  COMPREPLY=()
  # bash makes a word of the sign in --key=value.
  if [[ $word == "=" ]]; then
    word=""
  elif [[ $previous == "=" ]]; then
    previous=${COMP_WORDS[COMP_CWORD-2]}
  fi
  for ((index = 1; index < COMP_CWORD && index < 3; index++)); do
    [[ ${COMP_WORDS[index]} == -* ]] && break
    _relax_hpc_options "${command:+$command }${COMP_WORDS[index]}" >/dev/null || break
    command="${command:+$command }${COMP_WORDS[index]}"
  done
  if [[ $previous == --* ]]; then
    local values status
    values=$(_relax_hpc_values "$previous")
    status=$?
    if ((status != 1)); then
      mapfile -t COMPREPLY < <(compgen -W "$values" -- "$word")
      ((status == 2)) && mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- "$word")
      return
    fi
  fi
  if [[ $word == -* || -z $command || " @PARENTS@ " == *" $command "* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(_relax_hpc_options "$command")" -- "$word")
    # Settings are completed one section at a time, because there are hundreds.
    local prefix=${word%"${word##*.}"} name seen=" "
    if [[ " @CONFIGURED@ " == *" ${command// /_} "* && $word == --* ]]; then
      for name in $(compgen -W "$(_relax_hpc_settings)" -- "$word"); do
        local rest=${name#"$prefix"}
        local part=$prefix${rest%%.*}
        [[ $rest == *.* ]] && part+=.
        [[ $seen == *" $part "* ]] || COMPREPLY+=("$part")
        seen+="$part "
      done
    fi
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]] && compopt -o nospace
    return
  fi
  compopt -o filenames
  local kind=-f
  [[ " @ON_RUNS@ " == *" ${command// /_} "* ]] && kind=-d
  mapfile -t COMPREPLY < <(compgen $kind -- "$word")
}
complete -F _relax_hpc relax-hpc
"""


def completion_arguments(parser: ArgumentParser) -> None:
    """Add the argument that names the shell."""
    parser.add_argument("shell", metavar="SHELL", help="Name of the shell: bash.")


def check_shell(shell: str) -> None:
    """ConfigError: there is no completion for ``shell``."""
    if shell not in _SHELLS:
        allowed = f"allowed: {', '.join(_SHELLS)}{near(shell, _SHELLS)}"
        raise ConfigError(f"{COMMAND_LINE}: completion: found {shell!r}, {allowed}")


def bash_script(
    entries: Mapping[str, Command | CommandGroup],
    by_name: Mapping[str, Command],
    parsers: Mapping[str, ArgumentParser],
) -> str:
    """Completion script for bash.

    ``entries``: commands and groups of commands. ``by_name``, ``parsers``: all commands by their
    full names.
    """
    setting_names = {f"--{option.key}" for option in options()}
    groups = [name for name, entry in entries.items() if isinstance(entry, CommandGroup)]
    names = {"": [*entries, "--help", "--version"]}
    for group in groups:
        names[group] = [name.split()[1] for name in by_name if name.startswith(f"{group} ")]
    for name, parser in parsers.items():
        hidden = setting_names if by_name[name].takes_config else ()
        names[name] = [option for option in _option_names(parser) if option not in hidden]
    names["completion"] = [*_SHELLS]
    replacements = {
        "OPTIONS": "\n".join([*map(_case_of_command, names, names.values()), "    *) return 1 ;;"]),
        "SETTINGS": _words(sorted(setting_names)),
        "VALUES": "\n".join(_cases_of_values(parsers.values())),
        "CONFIGS": _words(packaged_configs()),
        "PARENTS": " ".join([*groups, "completion"]),
        "CONFIGURED": " ".join(_joined(name) for name in by_name if by_name[name].takes_config),
        "ON_RUNS": " ".join(_joined(name) for name in parsers if _takes_folder(parsers[name])),
    }
    script = _SCRIPT
    for name, text in replacements.items():
        script = script.replace(f"@{name}@", text)
    return script


def _joined(name: str) -> str:
    return name.replace(" ", "_")


def _words(names: Iterable[str]) -> str:
    return shlex.quote(" ".join(names))


def _case_of_command(name: str, names: Iterable[str]) -> str:
    return f"    {shlex.quote(name)}) echo {_words(names)} ;;"


def _option_names(parser: ArgumentParser) -> list[str]:
    names: list[str] = []
    for action in parser._actions:
        names += [name for name in action.option_strings if name.startswith("--")]
    return [name for name in names if not name.endswith("+")]


def _takes_folder(parser: ArgumentParser) -> bool:
    """Whether the positional arguments of a command are folders."""
    return any(
        action.metavar in _RUN_METAVARS for action in parser._actions if not action.option_strings
    )


def _cases_of_values(parsers: Iterable[ArgumentParser]) -> Iterator[str]:
    """Lines with the values of the options that take a few."""
    values_by_option: dict[str, list[str]] = {}
    for parser in parsers:
        for action in parser._actions:
            values = _allowed_values(action)
            for name in action.option_strings if values else ():
                values_by_option[name] = values
    for name, values in sorted(values_by_option.items()):
        if not name.endswith("+"):
            yield f"    {name}) echo {_words(values)} ;;"


def _allowed_values(action: Action) -> list[str]:
    """Values of an option whose type is a Literal or bool; empty for others."""
    hint = getattr(action, "_typehint", None)
    if get_origin(hint) is Literal:
        return list(map(str, get_args(hint)))
    return ["true", "false"] if hint is bool else []
