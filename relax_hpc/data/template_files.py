"""Chat templates of a model directory, searched in the same files as in transformers 5.12."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object, read_regular

MAX_CHARS = 1 << 20
"""Maximum length of a template, and of the text that it renders."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the template for any chat, and of the template for chats with tools, if a model has
both."""
_DIRECTORY = "additional_chat_templates"


def find_templates(chosen: str, model_dir: Path) -> dict[str, str]:
    """Sources of templates by name: the templates in ``model_dir`` if ``chosen`` is `model`,
    otherwise the template in the file ``chosen``. ConfigError: no template is found, or one cannot
    be read."""
    if chosen != "model":
        if not Path(chosen).is_file():
            raise ConfigError(
                f"data.chat_template: found {chosen!r}, allowed: model, or a Jinja file; there is "
                "no such file"
            )
        return {DEFAULT: _read_template(Path(chosen))}
    templates = _template_files(model_dir) or _processor_templates(model_dir)
    if not templates:
        path = model_dir / "tokenizer_config.json"
        templates = _templates_in(
            read_json_object(path, is_optional=True).get("chat_template"), path
        )
    if not templates:
        raise ConfigError(
            f"data.chat_template: found model, but {model_dir} has no chat_template.jinja, and no "
            "template in its tokenizer_config.json; name a Jinja file"
        )
    return templates


def choose_template(names: Mapping[str, Any], has_tools: bool) -> str:
    """Name of the template for a chat, as `apply_chat_template` chooses it. ValueError: none
    fits."""
    if has_tools and TOOL_USE in names:
        return TOOL_USE
    if DEFAULT not in names:
        raise ValueError(f"found templates {', '.join(names)}, allowed: one named {DEFAULT}")
    return DEFAULT


def _template_files(model_dir: Path) -> dict[str, str]:
    """Templates in separate files: chat_template.jinja, and the files of a folder."""
    paths = {path.stem: path for path in sorted((model_dir / _DIRECTORY).glob("*.jinja"))}
    if (model_dir / "chat_template.jinja").is_file():
        paths[DEFAULT] = model_dir / "chat_template.jinja"
    return {name: _read_template(path) for name, path in paths.items()}


def _processor_templates(model_dir: Path) -> dict[str, str]:
    """Template of a processor. Models with media were once published with such a file."""
    path = model_dir / "chat_template.json"
    return _templates_in(read_json_object(path, is_optional=True).get("chat_template"), path)


def _templates_in(value: Any, path: Path) -> dict[str, str]:
    """Templates by name. ``value``: `chat_template` in the JSON file ``path``, one source or a list
    of objects with name and source."""
    if value is None:
        return {}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in entries}
    if isinstance(value, str):
        value = {DEFAULT: value}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ConfigError(
            f"data.chat_template: {path}: chat_template is neither a text nor a list of objects "
            "with name and template; name a Jinja file"
        )
    return {name: _check_length(text, path) for name, text in value.items()}


def _read_template(path: Path) -> str:
    try:
        return _check_length(read_regular(path).decode(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template: {path}: cannot be read: {error}; allowed: a Jinja file in UTF-8 "
            "that you may read"
        ) from error


def _check_length(source: str, path: Path) -> str:
    if len(source) > MAX_CHARS:
        raise ConfigError(
            f"data.chat_template: {path}: found {len(source)} characters, allowed {MAX_CHARS}"
        )
    return source
