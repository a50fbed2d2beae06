"""Reads a Hugging Face directory without torch or transformers: headers, but no weights."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.base.terminal_text import escape_line
from relax_hpc.base.weight_files import StoredTensor, check_tied, stored_tensors, weight_files
from relax_hpc.config.schema import ModelConfig
from relax_hpc.training.models.families import config_problems, spec_from_config
from relax_hpc.training.models.hf_mapping import check_names
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stored_pieces import split_into_pieces

if TYPE_CHECKING:
    from relax_hpc.data.tokenizer import Tokenizer

_HUB_NAME = r"[\w.-]+/[\w.-]+"
"""Name of a model on Hugging Face's hub: an owner and a model."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "config.json",
)


@dataclass(kw_only=True, slots=True)
class ModelFiles:
    """A model as read from its files, and the mistakes in them."""

    problems: list[str] = field(default_factory=list)
    """Findings about the files. If there are any, the other fields are incomplete."""
    tokenizer: Tokenizer | None = None
    """Tokenizer; None if it is missing or has a mistake, which is in `problems`."""
    spec: ModelSpec | None = None
    """Spec of the model; None if config.json has a mistake."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the tensors in the files by name, as far as they can be read."""


def find_model(config: ModelConfig, field_name: str = "path") -> ModelFiles:
    """The model in the directory `config.<field_name>`, or the tiny model if that is empty."""
    key, name = f"model.{field_name}", getattr(config, field_name)
    try:
        if not name:
            from relax_hpc.training.models.tiny_model import model_config

            return ModelFiles(spec=spec_from_config(model_config(config.tiny)))
    except ConfigError as error:
        return ModelFiles(problems=[str(error)])
    path = Path(name)
    if not path.is_dir():
        problem = f"{key}: found {name!r}, which is not a directory; {_remedy(name)}"
        return ModelFiles(problems=[problem])
    run_hint = _run_hint(path)
    if run_hint:
        return ModelFiles(problems=[f"{key}: {run_hint}"])
    model = _read_model(path, config)
    model.problems = [f"{key}: {problem}" for problem in model.problems]
    return model


def _remedy(name: str) -> str:
    """Advice for the user if there is no directory of the model ``name``."""
    # A name on the hub has two parts; `resolve` has made relative paths absolute.
    path = Path(name).absolute()
    is_below = path.is_relative_to(Path.cwd())
    hub_name = path.relative_to(Path.cwd()).as_posix() if is_below else ""
    if not re.fullmatch(_HUB_NAME, hub_name) or path.parent.is_dir():
        return "name a Hugging Face directory"
    folder = f"models/{path.name}"
    return (
        "name a Hugging Face directory; a model on the hub is not downloaded: "
        f"hf download {hub_name} --local-dir {folder}, and set {folder}"
    )


def _run_hint(path: Path) -> str:
    """Error for a run or a checkpoint of a run, with the directory to name instead.

    Empty if ``path`` is neither.
    """
    run = path.parent.parent
    if path.parent.name == "checkpoints" and (run / "config.yaml").is_file():
        target = run / f"{path.name}-hf"
        return (
            f"found a checkpoint of a run; run `relax-hpc convert {path} {target}`, and name "
            f"{target}"
        )
    if not (path / "config.yaml").is_file() or (path / "config.json").is_file():
        return ""
    versions = sorted(path.glob("weights/i*-v*/model/config.json"))
    model = "a checkpoint of it, after converting it"
    if versions:
        model = f"{versions[-1].parent}, its newest weights"
    return f"found a run, which is not a model; name {model}"


def spec_at(config: ModelConfig) -> ModelSpec:
    """Spec in config.json of `config.path`, or of the tiny model; other files are not read.

    ConfigError: config.json has a mistake.
    """
    if not config.path:
        from relax_hpc.training.models.tiny_model import model_config

        return spec_from_config(model_config(config.tiny))
    return spec_from_config(read_json_object(Path(config.path) / "config.json"), config.ignore_keys)


def missing_packages() -> list[str]:
    """Packages without which tokenizers cannot be read, and which are not installed here."""
    return [name for name in ("tokenizers",) if find_spec(name) is None]


def _read_model(path: Path, config: ModelConfig) -> ModelFiles:
    """Mistakes in the files of a model, and its spec if config.json has none."""
    config_json = path / "config.json"
    model = ModelFiles()
    try:
        settings = read_json_object(config_json)
        mistakes = [
            f"{config_json}: {text}" for text in config_problems(settings, config.ignore_keys)
        ]
        if not mistakes:
            model.spec = spec_from_config(settings, config.ignore_keys)
    except ConfigError as error:
        mistakes = [str(error)]
    mistakes += _weights(path, model)
    try:
        model.tokenizer = _tokenizer(path, model.spec.vocab if model.spec else 0)
    except ConfigError as error:
        # The tokenizer reads config.json for the end tokens; do not report its mistakes twice.
        is_reported = any(str(config_json) in text for text in mistakes)
        if not (is_reported and str(config_json) in str(error)):
            mistakes.append(str(error))
    # Names of keys and tensors may hold control characters or line breaks.
    model.problems = list(map(escape_line, mistakes))
    return model


def _tokenizer(path: Path, vocab: int) -> Tokenizer | None:
    if not (path / "tokenizer.json").is_file():
        from relax_hpc.data.tokenizer import tokenizer_advice

        raise ConfigError(f"found no tokenizer.json in {path}; {tokenizer_advice(path)}")
    if "tokenizers" in missing_packages():
        return None
    tokenizer = _load_tokenizer(path, tuple(file_stamp(path / name) for name in _TOKENIZER_FILES))
    if vocab and tokenizer.vocab_size > vocab:
        raise ConfigError(
            f"{path / 'tokenizer.json'}: found {tokenizer.vocab_size} tokens, allowed: vocab_size "
            f"of config.json, {vocab}; the two files are of different models"
        )
    return tokenizer


@functools.lru_cache(maxsize=4)
def _load_tokenizer(path: Path, _: tuple[tuple[int, ...], ...]) -> Tokenizer:
    """Tokenizer of a directory; cached, because a large one takes a second to read.

    The second argument has the stamps of its files.
    """
    from relax_hpc.data.tokenizer import load_tokenizer

    return load_tokenizer(path)


def file_stamp(path: Path) -> tuple[int, ...]:
    """Inode, size and time of a file, which change with its content; empty if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _weights(path: Path, model: ModelFiles) -> Iterator[str]:
    """Mistakes in the names and headers of the weights; with a spec also missing tensors."""
    try:
        files = weight_files(path)
        stamps = tuple(map(file_stamp, files))
        tensors = _stored_tensors(path, stamps)
        model.shapes |= {name: stored.shape for name, (_, stored) in tensors.items()}
        if model.spec:
            pieces = split_into_pieces(model.spec, model.shapes, model.shapes)[1]
            check_names(model.spec, pieces, str(path))
            if model.spec.tied:
                _check_tied(path, stamps, model.spec.output, model.spec.embedding)
    except ConfigError as error:
        yield str(error)


@functools.lru_cache(maxsize=8)
def _stored_tensors(
    path: Path, _: tuple[tuple[int, ...], ...]
) -> dict[str, tuple[Path, StoredTensor]]:
    """Tensors of a directory; cached for several checks, until the stamps of its files change."""
    return stored_tensors(path)


@functools.lru_cache(maxsize=8)
def _check_tied(
    path: Path, stamps: tuple[tuple[int, ...], ...], output: str, embedding: str
) -> None:
    """Call `check_tied`, which reads two large tensors; cached until the files change."""
    check_tied(_stored_tensors(path, stamps), output, embedding)
