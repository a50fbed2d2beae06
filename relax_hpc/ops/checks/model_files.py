"""Model of a Hugging Face directory, read without torch or transformers: headers, not weights."""

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
class Model:
    """Model as it was found, and what is wrong with it."""

    problems: list[str] = field(default_factory=list)
    """Findings about its files; with any of them the rest means nothing."""
    tokenizer: Tokenizer | None = None
    """Tokenizer; None: there is none, or it is broken, which is among the problems."""
    spec: ModelSpec | None = None
    """Spec of the model; None: config.json is not in order."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the tensors in its files, by name, as far as these can be read here."""


def find_model(config: ModelConfig, field_name: str = "path") -> Model:
    """The model in the directory `config.<field_name>`, or the tiny one if that is empty."""
    key, name = f"model.{field_name}", getattr(config, field_name)
    try:
        if not name:
            from relax_hpc.training.models.tiny_model import model_config

            return Model(spec=spec_from_config(model_config(config.tiny)))
    except ConfigError as error:
        return Model(problems=[str(error)])
    path = Path(name)
    if not path.is_dir():
        return Model(problems=[f"{key}: found {name!r}, which is not a directory; {_remedy(name)}"])
    if other := _of_a_run(path):
        return Model(problems=[f"{key}: {other}"])
    found = _look(path, config)
    found.problems = [f"{key}: {problem}" for problem in found.problems]
    return found


def _remedy(name: str) -> str:
    """Remedy for ``name`` of a model, where no directory is."""
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


def _of_a_run(path: Path) -> str:
    """Error that says what to name in the place of a run, or of a checkpoint of one; empty: it is
    neither."""
    run = path.parent.parent
    if path.parent.name == "checkpoints" and (run / "config.yaml").is_file():
        made = run / f"{path.name}-hf"
        return f"found a checkpoint of a run; relax-hpc convert {path} {made}, and name {made}"
    if not (path / "config.yaml").is_file() or (path / "config.json").is_file():
        return ""
    versions = sorted(path.glob("weights/i*-v*/model/config.json"))
    newest = (
        f"{versions[-1].parent}, its newest weights"
        if versions
        else "a checkpoint of it, once it is converted"
    )
    return f"found a run, which is no model; name {newest}"


def spec_at(config: ModelConfig) -> ModelSpec:
    """Spec in config.json of `config.path`, all that need be there, or of the tiny model.
    ConfigError: it is not in order."""
    if not config.path:
        from relax_hpc.training.models.tiny_model import model_config

        return spec_from_config(model_config(config.tiny))
    return spec_from_config(read_json_object(Path(config.path) / "config.json"), config.ignore_keys)


def unread() -> list[str]:
    """Packages that are not installed here, without which tokenizers are not read."""
    return [name for name in ("tokenizers",) if find_spec(name) is None]


def _look(path: Path, config: ModelConfig) -> Model:
    """Everything that is wrong with the files, and the sizes if config.json is in order."""
    about, spec = path / "config.json", None
    try:
        found = read_json_object(about)
        wrong = [f"{about}: {one}" for one in config_problems(found, config.ignore_keys)]
        spec = None if wrong else spec_from_config(found, config.ignore_keys)
    except ConfigError as error:
        wrong = [str(error)]
    model = Model(spec=spec)
    wrong += _weights(path, model)
    try:
        model.tokenizer = _tokenizer(path, spec.vocab if spec else 0)
    except ConfigError as error:
        # End tokens are looked for in config.json too.
        wrong += (
            []
            if any(str(about) in one for one in wrong) and str(about) in str(error)
            else [str(error)]
        )
    # Keys and names of tensors are foreign text.
    model.problems = list(map(escape_line, wrong))
    return model


def _tokenizer(path: Path, vocab: int) -> Tokenizer | None:
    if not (path / "tokenizer.json").is_file():
        from relax_hpc.data.tokenizer import making

        raise ConfigError(f"found no tokenizer.json in {path}; {making(path)}")
    if "tokenizers" in unread():
        return None
    found = _load_tokenizer(path, tuple(stamp(path / name) for name in _TOKENIZER_FILES))
    if vocab and found.vocab_size > vocab:
        raise ConfigError(
            f"{path / 'tokenizer.json'}: {found.vocab_size} tokens, but vocab_size of config.json "
            f"is {vocab}; they are of different models"
        )
    return found


@functools.lru_cache(maxsize=4)
def _load_tokenizer(path: Path, _: tuple[tuple[int, ...], ...]) -> Tokenizer:
    """Tokenizer of a directory, kept: large ones take a second, and several checks ask for them."""
    from relax_hpc.data.tokenizer import load_tokenizer

    return load_tokenizer(path)


def stamp(path: Path) -> tuple[int, ...]:
    """Stamp of a file that changes with it; empty if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _weights(path: Path, model: Model) -> Iterator[str]:
    """Mistakes in the weights, by their names and headers; with the tensors if the model is
    known."""
    try:
        files = weight_files(path)
        tensors = _stored_tensors(path, tuple(map(stamp, files)))
        model.shapes |= {name: stored.shape for name, (_, stored) in tensors.items()}
        if model.spec:
            check_names(
                model.spec, split_into_pieces(model.spec, model.shapes, model.shapes)[1], str(path)
            )
            if model.spec.tied:
                _check_tied(path, tuple(map(stamp, files)), model.spec.output, model.spec.embedding)
    except ConfigError as error:
        yield str(error)


@functools.lru_cache(maxsize=8)
def _stored_tensors(
    path: Path, _: tuple[tuple[int, ...], ...]
) -> dict[str, tuple[Path, StoredTensor]]:
    """Tensors of a directory, kept while its files are the same: several checks ask for them."""
    return stored_tensors(path)


@functools.lru_cache(maxsize=8)
def _check_tied(
    path: Path, stamps: tuple[tuple[int, ...], ...], output: str, embedding: str
) -> None:
    """See `check_tied`, which reads two large tensors; repeated if the files change."""
    check_tied(_stored_tensors(path, stamps), output, embedding)
