"""Conversion between Hugging Face models and megatron-core's distributed checkpoints; which way,
the source decides."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.foreign_files import INDEX_BYTES, read_json_object
from relax_hpc.base.weight_files import read_header, weight_files
from relax_hpc.convert import verify
from relax_hpc.convert.frozen_tensors import Passengers
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
"""Version of what is written; with another, a conversion that was interrupted starts again."""
_OF_A_RUN = re.compile(r"(\w+-)?[ei]\d{6}-step-\d{6}|\..*")
"""Names of checkpoints that count by their marker alone, and of those that never came to their
end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Request for a conversion."""

    source: Path
    target: Path
    dtype: str = ""
    """Type of the result: float32, bfloat16 or float16; empty: as it is."""
    shard_bytes: int = 0
    """Bytes of a file at most; 0: as the model's files were, else 5 GB."""
    model: Path | None = None
    """Hugging Face directory of the model that a megatron checkpoint is of; None: what lies with it
    or its run."""
    verify: str = ""
    """Comparison afterwards: "digests", "all" (logits too) or empty."""
    prompt: str = ""
    """Prompt for comparing logits: a text, or token ids with commas between."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of config.json to ignore, as `model.ignore_keys`."""


def convert(
    request: Request, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Convert, or go on with a conversion that was interrupted; a report in JSON values.

    In memory at a time: one parameter of one layer (or expert, or the embedding) and copies of it,
    at most six times the size of the largest; for logits a whole model in float32.

    ConfigError: the source is not whole, or not what its config.json says, or the target is there.
    RelaxError: the target cannot be written.
    """
    started = time.monotonic()
    check_paths(request)
    try:
        report = (_to_megatron if is_hf(request.source) else _to_hf)(request, progress)
    except OSError as error:
        raise RelaxError(
            f"convert: {error}; run the same again, what is finished is kept"
        ) from error
    about = {"source": str(request.source), "target": str(request.target)}
    return about | report | {"seconds": round(time.monotonic() - started, 3)}


def check_paths(request: Request) -> None:
    """ConfigError unless the source looks like something that can be converted, and the target is
    free."""
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
    return any((directory / name).exists() for name in (METADATA, CONFIG, MARKER)) or any(
        directory.glob("*.distcp")
    )


def _to_megatron(request: Request, progress: Callable[[str], None]) -> dict[str, Any]:
    check_listed(request.source)
    spec = spec_from_config(read_config(request.source), request.ignore_keys, "convert")
    source = HfTensors(request.source, spec)
    job = ToMegatron(source, spec, _dtype(request), request.shard_bytes or DEFAULT_SHARD_BYTES)
    job.parts()
    ids = _prompt(request, request.source, spec)
    work, found = Workspace(request.target, _plan(request, request.source)), {}

    def check(path: Path) -> None:
        target = MegatronTensors(StoredState(path), spec)
        found.update(_verify(request, source, target, (request.source, path), spec, ids, progress))

    job.write(work, progress, check)
    return {"direction": "megatron", "files_kept": work.kept} | found


def _to_hf(request: Request, progress: Callable[[str], None]) -> dict[str, Any]:
    _check_ended(request.source)
    model, headers = _model_of(request)
    hf_config = read_config(model)
    spec = spec_from_config(hf_config, request.ignore_keys, "convert")
    state = StoredState(request.source)
    _refuse_critic(state)
    source = MegatronTensors(state, spec)
    check_types(source)
    shard_bytes = request.shard_bytes or DEFAULT_SHARD_BYTES
    passengers = Passengers.of(model, spec)
    job = ToHf(source, spec, hf_config, model, headers, _dtype(request), shard_bytes, passengers)
    job.files()
    ids = _prompt(request, model, spec)
    work, found = Workspace(request.target, _plan(request, request.source, model)), {}

    def check(path: Path) -> None:
        target = HfTensors(path, spec)
        found.update(_verify(request, source, target, (path, request.source), spec, ids, progress))

    job.write(work, progress, check)
    return {"direction": "hf", "files_kept": work.kept} | found


def _check_ended(directory: Path) -> None:
    if _OF_A_RUN.fullmatch(directory.name) and not (directory / MARKER).exists():
        raise ConfigError(
            f"{directory / MARKER}: missing, so saving did not come to its end; take an older "
            "checkpoint"
        )


def _refuse_critic(state: StoredState) -> None:
    head = state.tensors.get("output_layer.weight")
    if head and len(head.size) == 1:
        raise ConfigError(
            f"{state.directory}: found a critic, which says a value of a text and is no language "
            "model; allowed: the "
            "policy's part of the checkpoint, the folder whose name begins with i"
        )


def _model_of(request: Request) -> tuple[Path, dict[str, str] | None]:
    """The folder of config.json and tokenizer, and the headers of the files that the model came
    from."""
    kept = request.source / HUGGINGFACE
    model = request.model or (
        kept if kept.is_dir() else request.source.absolute().parent.parent / "model"
    )
    if not (model / "config.json").exists():
        raise ConfigError(
            f"--model: found no config.json in {model}; name the Hugging Face directory of this "
            "model"
        )
    if request.model is None and model != kept:
        check_unchanged(model.parent / "weights", model)
    if request.shard_bytes:
        return model, None
    if model == kept:
        return model, _kept_headers(kept / HEADERS)
    files = weight_files(model) if any(model.glob("*.safetensors")) else []
    return model, {file.name: read_header(file).text for file in files} or None


def _kept_headers(path: Path) -> dict[str, str]:
    fix = "name the model with --model, or give --shard-size"
    return read_json_object(path, fix, most_bytes=INDEX_BYTES)


def _dtype(request: Request) -> torch.dtype | None:
    return getattr(torch, request.dtype) if request.dtype else None


def _plan(request: Request, *folders: Path) -> dict[str, Any]:
    """Plan of all that decides the bytes that are written, with the state of all files that are
    read."""
    files = sorted(path for folder in folders for path in folder.iterdir() if path.is_file())
    about = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return {
        "version": PLAN_VERSION,
        "dtype": request.dtype,
        "shard_bytes": request.shard_bytes,
        "files": about,
    }


def _prompt(request: Request, tokenizer: Path, spec: ModelSpec) -> list[int]:
    """Token ids for logits; none if they are not asked for."""
    return (
        verify.prompt_ids(request.prompt, tokenizer, spec.vocab) if request.verify == "all" else []
    )


def _verify(
    request: Request,
    source: verify.Pieces,
    target: verify.Pieces,
    places: tuple[Path, Path],
    spec: ModelSpec,
    ids: list[int],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Compare both sides; `places`: the Hugging Face directory and the megatron one."""
    if not request.verify:
        return {}
    progress("verify: all tensors are read again")
    digests = verify.compare(source, target, spec)
    report: dict[str, Any] = {"tensors": len(digests), "digests": digests}
    if ids:
        progress("verify: logits")
        report["logits"] = verify.compare_logits(*places, spec, ids)
    return report
