"""Checkpoints: megatron-core's sharded state of model and optimizer, random states, and a marker written last.

A checkpoint is a directory that appears by rename. Its COMPLETE.json holds the SHA-256 of every other file and the
caller's `meta`; a checkpoint without it, or with a file that differs from it, is never loaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from relax_hpc.checkpoint.random_state import load_random_state, save_random_state
from relax_hpc.checkpoint.ranks import sum_bytes, tell
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.rundir import sync_directory, write_json
from relax_hpc.training.optimizer import uses_torch_adam

if TYPE_CHECKING:
    from relax_hpc.training.trainer import Trainer

FORMAT_VERSION = 1
MARKER = "COMPLETE.json"


class CheckpointError(RelaxError):
    """A checkpoint is incomplete, damaged or of another format; an older one may do."""


def save(directory: Path, trainer: Trainer, meta: dict[str, Any]) -> str:
    """Write weights, optimizer, random states and `meta` (JSON values) to a new `directory`; the marker's SHA-256.

    Collective, between optimizer steps. The name of `directory` must be this incarnation's own: a partial one of the
    same name is replaced. Everything is synced to disk before the directory gets its name. CheckpointError if it has
    it already.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    if dist.get_rank() == 0:
        if directory.exists():
            raise CheckpointError(f"{directory}: is there already; a checkpoint is never overwritten")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    _save_state(partial, trainer)
    save_random_state(partial / _random_file())
    # All files must be there, under their last names, before they are listed.
    dist.barrier()
    device = trainer.model.device
    names = tell(_files(partial) if dist.get_rank() == 0 else None, device)
    digests = _digest_all(partial, names, device, sync=True)
    digest = ""
    if dist.get_rank() == 0:
        marker = {
            "format": FORMAT_VERSION,
            "files": digests,
            "layout": _layout(trainer),
            "optimizer": _optimizer(trainer),
            "meta": meta,
        }
        write_json(partial / MARKER, marker, sync=True)
        digest = _sha256(partial / MARKER)
        partial.rename(directory)
        sync_directory(directory.parent)
    return tell(digest, device)


def load(directory: Path, trainer: Trainer, digest: str | None = None) -> dict[str, Any]:
    """Verify `directory`, put its state into `trainer`, and return its meta. Collective.

    Every file is checked against the marker, and the marker against `digest`, what `save` returned, if given.
    Another split over ranks than the one that saved is fine; random states are restored only under the same split.
    CheckpointError, in every rank and before anything is changed, names the file that is missing or damaged.
    ConfigError: the checkpoint is of another parameter type, or its optimizer was sharded and this one is not (or the
    reverse).
    """
    device = trainer.model.device
    marker = tell(_read_marker(directory, digest) if dist.get_rank() == 0 else None, device)
    _check_marker(directory, marker, trainer)
    _check_files(directory, marker, _digest_all(directory, sorted(marker["files"]), device))
    _load_state(directory, trainer)
    if marker["layout"] == _layout(trainer):
        load_random_state(directory / _random_file())
    return marker["meta"]


def remove_others(root: Path, keep: Collection[str]) -> list[str]:
    """Delete every checkpoint in `root`, partial ones too, whose name is not in `keep`; the names deleted.

    Each loses its marker first, so that an interrupted deletion leaves nothing that looks whole.
    """
    doomed = sorted(path for path in root.iterdir() if path.is_dir() and path.name not in keep)
    for path in doomed:
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
    return [path.name for path in doomed]


def _read_marker(directory: Path, digest: str | None) -> dict[str, Any]:
    """The marker, or {"error": why not}, so that rank 0 can tell the others."""
    path = directory / MARKER
    try:
        marker = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {"error": f"{path}: missing, so saving did not come to its end; take an older checkpoint"}
    except (OSError, ValueError) as error:
        return {"error": f"{path}: {error}; take an older checkpoint"}
    if marker.get("format") != FORMAT_VERSION:
        return {"error": f"{path}: format {marker.get('format')}, this version reads {FORMAT_VERSION}"}
    if digest is not None and _sha256(path) != digest:
        return {"error": f"{path}: not the marker that was recorded for this checkpoint; take an older one"}
    return marker


def _check_marker(directory: Path, marker: dict[str, Any], trainer: Trainer) -> None:
    if "error" in marker:
        raise CheckpointError(marker["error"])
    for key, wanted in _optimizer(trainer).items():
        if marker["optimizer"].get(key) != wanted:
            raise ConfigError(
                f"{directory / MARKER}: saved with {key} {marker['optimizer'].get(key)}, the run has {wanted}; "
                "resume with the setting it was saved with"
            )


def _check_files(directory: Path, marker: dict[str, Any], found: dict[str, str]) -> None:
    for name, digest in marker["files"].items():
        if not found[name].strip("0"):
            raise CheckpointError(f"{directory / name}: missing; take an older checkpoint")
        if found[name] != digest:
            raise CheckpointError(f"{directory / name}: damaged (SHA-256 differs); take an older checkpoint")


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _digest_all(directory: Path, names: list[str], device: torch.device, sync: bool = False) -> dict[str, str]:
    """Digest of each file, computed by the ranks in turn; synced to disk as well if asked. Collective."""
    digests = bytearray(32 * len(names))
    for index in range(dist.get_rank(), len(names), dist.get_world_size()):
        path = directory / names[index]
        # Reading makes a shared filesystem fetch what another node still held back; only then can it be synced here.
        digests[32 * index : 32 * (index + 1)] = bytes.fromhex(_sha256(path))
        if sync:
            sync_directory(path)
    whole = sum_bytes(digests, device)
    return {name: whole[32 * index : 32 * (index + 1)].hex() for index, name in enumerate(names)}


def _sha256(path: Path) -> str:
    """Of the file's bytes; zeros if it is missing."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "0" * 64


def _layout(trainer: Trainer) -> list[int]:
    layout = trainer.model.layout
    return [layout.tensor_size, layout.pipeline_size, layout.data_size]


def _optimizer(trainer: Trainer) -> dict[str, Any]:
    """What the stored optimizer state depends on, by configuration key."""
    return {
        "model.dtype": str(trainer.model.dtype).removeprefix("torch."),
        "actor.optimizer.distributed": trainer.settings.distributed,
    }


def _random_file() -> str:
    return f"random-{dist.get_rank():06d}.safetensors"


def _save_state(directory: Path, trainer: Trainer) -> None:
    from megatron.core import dist_checkpointing

    from relax_hpc.checkpoint.strategy import save_strategy

    strategy = save_strategy(trainer.model.layout.data_size)
    dist_checkpointing.save(_sharded_state(trainer, loading=False), str(directory), strategy)


def _load_state(directory: Path, trainer: Trainer) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(_sharded_state(trainer, loading=True), str(directory))
    trainer.model.module.load_state_dict(state["model"])
    optimizer = state["optimizer"].get("optimizer", state["optimizer"])
    if "state" in optimizer and uses_torch_adam(trainer.optimizer):
        # A step count of zero is not stored; other Adams keep theirs elsewhere.
        optimizer["state"].setdefault("common_step", torch.zeros(()))
    trainer.optimizer.load_state_dict(state["optimizer"])


def _sharded_state(trainer: Trainer, loading: bool) -> dict[str, Any]:
    # The optimizer's state in the parameters' own shapes loads under every other split.
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    state = {"model": trainer.model.module.sharded_state_dict(prefix="")}
    state["optimizer"] = trainer.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return state
