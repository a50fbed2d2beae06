"""Help of commands, sections and settings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from relax_hpc import __version__
from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE
from relax_hpc.commands.program import COMMANDS, commands, main, parser_of
from relax_hpc.config.options import options

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "relax_hpc" / "config" / "schema"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"relax-hpc {__version__}\n"
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(
        f"{name} " in text and command.help.split()[0] in text for name, command in COMMANDS.items()
    )


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_of_a_command_has_only_its_lines(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main([*name.split(), "--help"]) == EXIT_DONE
    except SystemExit as exit_call:
        assert exit_call.code in (None, EXIT_DONE)
    text = capsys.readouterr().out
    assert text.startswith(f"usage: relax-hpc {name} ") and len(text.splitlines()) < 50
    assert "--rollout.replicas " not in text.partition("Every setting")[0]
    subcommands = {other.split()[1] for other in commands() if " " in other and other != name}
    assert not any(f"({other})" in text for other in subcommands), "help of another command"


def test_help_of_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "rollout"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert (
        "--rollout.engine.port" in text
        and "--actor" not in text
        and "Go on with the run" not in text
    )
    assert main(["submit", "--help", "all"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert all(f"--{option.key} " in text for option in options())
    assert main(["run", "--help", "roll"]) == EXIT_CONFIG
    assert "--help: found 'roll', allowed: all, run, model, " in capsys.readouterr().err
    assert main(["run", "--help", "model.tiny"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "--model.tiny.num_layers" in text and "--model.path" not in text
    assert "that is created offline with its tokenizer" in " ".join(text.split())
    assert main(["run", "--help", "model.path"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "--model.path" in text and "--model.tiny.num_layers" not in text
    assert main(["run", "--help", "model.tyni"]) == EXIT_CONFIG
    assert "did you mean model.tiny?" in capsys.readouterr().err
    for command in ("queue", "sandbox"):
        assert main([command]) == main([command, "--help"]) == EXIT_DONE
        assert f"usage: relax-hpc {command} COMMAND" in capsys.readouterr().out
    assert main(["queue", "audti"]) == EXIT_CONFIG
    assert (
        "queue audti: unknown verb, allowed: audit, export; did you mean audit?"
        in capsys.readouterr().err
    )


def test_help_of_run_documents_the_fields() -> None:
    text = " ".join(parser_of("run").format_help().split())
    assert "--checkpoint.max_failures MAX_FAILURES Number of consecutive checkpoints" in text
    assert "[at least 1] (type: int, default: 4)" in text
    assert "%" not in text
    keys = {option.key for option in options()}
    assert all(f"--{key} " in text for key in keys)


def test_help_shows_whole_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    """Every paragraph of the docstrings in the schema, of sections and of settings."""
    assert main(["run", "--help", "all"]) == EXIT_DONE
    printed = "".join(capsys.readouterr().out.split())
    texts = [*chain.from_iterable(map(schema_docstrings, SCHEMA.glob("*.py")))]
    assert any("\n\n" in text for text in texts), (
        "no description has several paragraphs: the test proves nothing"
    )
    assert not [text for text in texts if "".join(text.split()).rstrip(".") not in printed]


def schema_docstrings(path: Path) -> Iterator[str]:
    """Docstrings of the sections in a file of the schema, and of their settings."""
    for node in ast.parse(path.read_text()).body:
        # Users name groups, so that settings of groups are not fixed options.
        if not isinstance(node, ast.ClassDef) or node.name in (
            "Config",
            "GroupConfig",
            "ResourcesConfig",
        ):
            continue
        for child, following in zip(node.body, [*node.body[1:], None], strict=True):
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if is_text and not isinstance(following, ast.FunctionDef):
                yield child.value.value
