"""Conversion between Hugging Face models and megatron-core's distributed checkpoints.

The source determines the direction.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.foreign_files import INDEX_BYTES, read_json_object
from relax_hpc.base.weight_files import read_header, weight_files
from relax_hpc.convert import verify
from relax_hpc.convert.frozen_tensors import FrozenTensors
from relax_hpc.convert.hf_tensors import HfTensors
from relax_hpc.convert.to_hf import MegatronTensors, ToHf, check_types
from relax_hpc.convert.to_megatron import HEADERS, HUGGINGFACE, ToMegatron
from relax_hpc.convert.torch_dist import CONFIG, METADATA, StoredState
from relax_hpc.convert.workspace import Workspace, check_free
from relax_hpc.training.checkpoint.store import MARKER
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.weights.version_files import check_listed, check_unchanged

DEFAULT_SHARD_BYTES = 5_000_000_000
PLAN_VERSION = 1
"""Version of the written format. A conversion that another version has begun starts again."""
_RUN_CHECKPOINT = re.compile(r"(\w+-)?[ei]\d{6}-step-\d{6}|\..*")
"""Names of a run's checkpoints, which are complete only with a marker, and of unfinished ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRequest:
    """Options of a conversion."""

    source: Path
    target: Path
    dtype: str = ""
    """Type of the result: float32, bfloat16 or float16; empty: that of the source."""
    shard_bytes: int = 0
    """Maximum bytes of a file; 0: files as in the original model, else 5 GB."""
    model: Path | None = None
    """Hugging Face directory of the model of a megatron checkpoint; None: the copy in the
    checkpoint, or in its run."""
    verify: str = ""
    """Comparison after the conversion: "digests", "all" (also logits) or empty."""
    prompt: str = ""
    """Prompt for the comparison of logits: a text, or token ids separated by commas."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of config.json to ignore, as `model.ignore_keys`."""


def convert(
    request: ConversionRequest, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Convert a model, or continue an interrupted conversion. Returns a report in JSON values.

    Memory: one parameter of one layer (or expert, or the embedding) and copies of it, at most six
    times the size of the largest. The comparison of logits needs a whole model in float32.

    ConfigError: the source is incomplete or contradicts its config.json, or the target exists.
    RelaxError: the target cannot be written.
    """
    started = time.monotonic()
    check_paths(request)
    try:
        if is_hf(request.source):
            report = _to_megatron(request, progress)
        else:
            report = _to_hf(request, progress)
    except OSError as error:
        raise RelaxError(
            f"convert: {error}; run the same command again, finished files are kept"
        ) from error
    paths = {"source": str(request.source), "target": str(request.target)}
    return paths | report | {"seconds": round(time.monotonic() - started, 3)}


def check_paths(request: ConversionRequest) -> None:
    """ConfigError: the source is no model that can be converted, or the target exists."""
    if not is_hf(request.source) and not is_megatron(request.source):
        raise ConfigError(
            f"{request.source}: found neither *.safetensors (a Hugging Face model) nor {METADATA} "
            "(a megatron-core torch_dist checkpoint); name a directory of one of the two"
        )
    check_free(request.target)


def is_hf(directory: Path) -> bool:
    """Whether a directory looks like a Hugging Face model."""
    return (directory / "config.json").exists() or (
        any(directory.glob("*.safetensors")) and not is_megatron(directory)
    )


def is_megatron(directory: Path) -> bool:
    """Whether a directory looks like a distributed checkpoint."""
    has_description = any((directory / name).exists() for name in (METADATA, CONFIG, MARKER))
    return has_description or any(directory.glob("*.distcp"))


def _to_megatron(request: ConversionRequest, progress: Callable[[str], None]) -> dict[str, Any]:
    check_listed(request.source)
    spec = spec_from_config(read_config(request.source), request.ignore_keys, "convert")
    source = HfTensors(request.source, spec)
    job = ToMegatron(source, spec, _dtype(request), request.shard_bytes or DEFAULT_SHARD_BYTES)
    # Check all types before anything is written.
    job.files()
    ids = _prompt(request, request.source, spec)
    work = Workspace(request.target, _plan(request, request.source))
    report = dict[str, Any]()

    def check(path: Path) -> None:
        target = MegatronTensors(StoredState(path), spec)
        paths = request.source, path
        report.update(_verify(request, source, target, paths, spec, ids, progress))

    job.write(work, progress, check)
    return {"direction": "megatron", "files_kept": work.kept_files} | report


def _to_hf(request: ConversionRequest, progress: Callable[[str], None]) -> dict[str, Any]:
    _check_complete(request.source)
    model, headers = _find_model(request)
    hf_config = read_config(model)
    spec = spec_from_config(hf_config, request.ignore_keys, "convert")
    state = StoredState(request.source)
    _refuse_critic(state)
    source = MegatronTensors(state, spec)
    check_types(source)
    shard_bytes = request.shard_bytes or DEFAULT_SHARD_BYTES
    frozen = FrozenTensors.from_directory(model, spec)
    job = ToHf(source, spec, hf_config, model, headers, _dtype(request), shard_bytes, frozen)
    # Check the headers before anything is written.
    job.files()
    ids = _prompt(request, model, spec)
    work = Workspace(request.target, _plan(request, request.source, model))
    report = dict[str, Any]()

    def check(path: Path) -> None:
        target = HfTensors(path, spec)
        paths = path, request.source
        report.update(_verify(request, source, target, paths, spec, ids, progress))

    job.write(work, progress, check)
    return {"direction": "hf", "files_kept": work.kept_files} | report


def _check_complete(directory: Path) -> None:
    if _RUN_CHECKPOINT.fullmatch(directory.name) and not (directory / MARKER).exists():
        raise ConfigError(
            f"{directory / MARKER}: missing, so the checkpoint is incomplete; name an older "
            "checkpoint"
        )


def _refuse_critic(state: StoredState) -> None:
    head = state.tensors.get("output_layer.weight")
    if head and len(head.size) == 1:
        raise ConfigError(
            f"{state.directory}: found a critic, which returns values and is not a language model; "
            "allowed: the policy's part of the checkpoint, the folder whose name begins with i"
        )


def _find_model(request: ConversionRequest) -> tuple[Path, dict[str, str] | None]:
    """Folder of config.json and tokenizer, and headers of the files of the original model.

    Headers are None if new files are to be written.
    """
    copied = request.source / HUGGINGFACE
    model = request.model
    if model is None:
        of_run = request.source.absolute().parent.parent / "model"
        model = copied if copied.is_dir() else of_run
    if not (model / "config.json").exists():
        raise ConfigError(
            f"--model: found no config.json in {model}; name the Hugging Face directory of this "
            "model"
        )
    if request.model is None and model != copied:
        check_unchanged(model.parent / "weights", model)
    if request.shard_bytes:
        return model, None
    if model == copied:
        return model, _read_headers(copied / HEADERS)
    files = weight_files(model) if any(model.glob("*.safetensors")) else []
    return model, {file.name: read_header(file).text for file in files} or None


def _read_headers(path: Path) -> dict[str, str]:
    fix = "name the model with --model, or give --shard-size"
    return read_json_object(path, fix, most_bytes=INDEX_BYTES)


def _dtype(request: ConversionRequest) -> torch.dtype | None:
    return getattr(torch, request.dtype) if request.dtype else None


def _plan(request: ConversionRequest, *folders: Path) -> dict[str, Any]:
    """All inputs that determine the written bytes, with size and time of each source file."""
    paths = sorted(chain.from_iterable(folder.iterdir() for folder in folders))
    files = [path for path in paths if path.is_file()]
    stats = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return {
        "version": PLAN_VERSION,
        "dtype": request.dtype,
        "shard_bytes": request.shard_bytes,
        "files": stats,
    }


def _prompt(request: ConversionRequest, tokenizer: Path, spec: ModelSpec) -> list[int]:
    """Token ids for the comparison of logits; empty without that."""
    if request.verify != "all":
        return []
    return verify.prompt_ids(request.prompt, tokenizer, spec.vocab)


def _verify(
    request: ConversionRequest,
    source: verify.PieceSource,
    target: verify.PieceSource,
    paths: tuple[Path, Path],
    spec: ModelSpec,
    ids: list[int],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Compare source and target; `paths`: the Hugging Face directory and the megatron one."""
    if not request.verify:
        return {}
    progress("verify: all tensors are read again")
    digests = verify.compare_tensors(source, target, spec)
    report: dict[str, Any] = {"tensors": len(digests), "digests": digests}
    if ids:
        progress("verify: logits")
        report["logits"] = verify.compare_logits(*paths, spec, ids)
    return report
