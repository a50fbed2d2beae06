"""Checkpoints: megatron-core's sharded state of model and optimizer, random states, and a marker
that is written last.

A checkpoint is a directory that appears by rename. Its marker COMPLETE.json has the checksum (XXH3,
128 bits) of every other file, and the caller's `meta`. A checkpoint is loaded only if it has a
marker and all files match it. `saver` writes checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.foreign_files import open_regular, read_json_object
from relax_hpc.base.rundir import sync_directory
from relax_hpc.training.checkpoint.random_state import load_random_state

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.net.rendezvous.channel import RankChannel
    from relax_hpc.training.trainer import Trainer

FORMAT_VERSION = 2
MARKER = "COMPLETE.json"
_PIECE_BYTES = 4 << 20
_SHARDING = "fully_reshardable"
_NO_STEPS = torch.zeros(())
# Settings of checkpoints that were saved before these settings existed.
_DEFAULTS = {"actor.optimizer.states": "float32"}
# Names of files of each rank. Rank 0 writes all other files.
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp$|random-(\d+)\.safetensors$")


class CheckpointError(RelaxError):
    """A checkpoint is incomplete, damaged or of another format. An older one may be usable."""


def load(
    directory: Path, trainer: Trainer, channel: RankChannel, digest: str | None = None
) -> dict[str, Any]:
    """Verify `directory`, load its state into `trainer`, and return its meta. Collective.

    Every file is compared with the marker, and the marker with the journaled `digest`, if given.
    The split over ranks may differ from that of the save; random states are then not restored.
    CheckpointError, on every rank and before any change, names the missing or damaged file.
    ConfigError: the checkpoint has another parameter type, or only one of both optimizers is
    sharded.
    """
    marker = channel.broadcast(_read_marker(directory, digest) if channel.rank == 0 else None)
    _check_marker(directory, marker, trainer)
    # Each rank reads a part of the files.
    names = sorted(marker["files"])[channel.rank :: channel.size]
    gathered = channel.gather(checksums_of(directory, names))
    _check_files(directory, marker, channel.broadcast(merge_checksums(gathered)))
    _load_state(directory, trainer)
    if marker["layout"] == layout_sizes(trainer):
        load_random_state(directory / random_file(channel.rank))
    return marker["meta"]


def remove_others(root: Path, keep: Collection[str], incarnation: int, role: str = "") -> list[str]:
    """Delete the checkpoints of `role` (see `checkpoint_name`) in `root` that are not in `keep`.

    Partial checkpoints are deleted too; those of incarnations after `incarnation` stay. Returns the
    names of the deleted directories. The marker is deleted first, so that an interrupted deletion
    leaves no checkpoint that looks complete. A directory that cannot be deleted stays.
    """
    pattern = re.compile(rf"\.?{re.escape(role + '-' if role else '')}i(\d{{6}})-")
    deleted = []
    for path in sorted(path for path in root.iterdir() if path.is_dir()):
        match = pattern.match(path.name)
        if path.name in keep or match is None or int(match[1]) > incarnation:
            continue
        # A checkpoint without a marker is never loaded.
        with contextlib.suppress(OSError):
            (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        deleted.append(path.name)
    return deleted


def _read_marker(directory: Path, digest: str | None) -> dict[str, Any]:
    """The marker, or {"error": reason}, which rank 0 can send to the other ranks."""
    path = directory / MARKER
    try:
        marker = read_json_object(path, "take an older checkpoint", is_optional=True)
    except ConfigError as error:
        return {"error": str(error)}
    if not marker:
        # The marker is written last.
        return {
            "error": f"{path}: missing or empty, so the save did not finish; take an older "
            "checkpoint"
        }
    if marker.get("format") != FORMAT_VERSION:
        return {
            "error": f"{path}: not a marker of format {FORMAT_VERSION}, which this version reads"
        }
    if digest is not None and marker_digest(path) != digest:
        return {
            "error": f"{path}: not the marker that was recorded for this checkpoint; take an "
            "older one"
        }
    return marker


def _check_marker(directory: Path, marker: dict[str, Any], trainer: Trainer) -> None:
    if "error" in marker:
        raise CheckpointError(marker["error"])
    if marker["optimizer"] is None:
        raise ConfigError(
            f"{directory}: a converted model, without optimizer; convert it to Hugging Face and "
            "start from that directory"
        )
    for key, present in optimizer_settings(trainer).items():
        saved = marker["optimizer"].get(key, _DEFAULTS.get(key))
        if saved != present:
            raise ConfigError(
                f"{directory / MARKER}: saved with {key} {saved}, the run has {present}; "
                "resume with the saved setting"
            )


def _check_files(directory: Path, marker: dict[str, Any], checksums: dict[str, str]) -> None:
    for name, expected in marker["files"].items():
        if not checksums[name]:
            raise CheckpointError(
                f"{directory / name}: missing, or cannot be read; take an older checkpoint"
            )
        if checksums[name] != expected:
            raise CheckpointError(
                f"{directory / name}: damaged (its checksum differs); take an older checkpoint"
            )


def rank_files(directory: Path, rank: int) -> list[str]:
    """Files that ``rank`` has written into a checkpoint.

    Each rank lists its own files, because other nodes may not see them yet on a shared file system.
    """
    names = []
    for name in sorted(path.name for path in directory.iterdir()):
        match = _RANK_FILE.match(name)
        owner = int(match[1] or match[2]) if match else 0
        if owner == rank:
            names.append(name)
    return names


def checksums_of(directory: Path, names: Sequence[str], sync: bool = False) -> dict[str, str]:
    """Checksums of files by name; "" if a file is missing or cannot be read. ``sync``: also sync
    the files to disk."""
    checksums = {}
    for name in names:
        checksums[name] = checksum(directory / name)
        if sync:
            sync_directory(directory / name)
    return checksums


def merge_checksums(gathered: Sequence[dict[str, str]] | None) -> dict[str, str]:
    """Checksums of all ranks; empty on ranks that have not ``gathered`` them."""
    merged: dict[str, str] = {}
    for checksums in gathered or []:
        merged |= checksums
    return merged


def checksum(path: Path) -> str:
    """XXH3, 128 bits in hex, of the file's bytes; "" if it is missing or cannot be read."""
    try:
        with open_regular(path) as file:
            state = xxhash.xxh3_128()
            while piece := file.read(_PIECE_BYTES):
                state.update(piece)
            return state.hexdigest()
    except OSError:
        return ""


def marker_digest(marker: Path) -> str:
    """SHA-256 of a marker, which is journaled."""
    return hashlib.sha256(marker.read_bytes()).hexdigest()


def layout_sizes(trainer: Trainer) -> list[int]:
    """Sizes of the parallel layout. Random states are restored only if they are equal."""
    layout = trainer.model.layout
    sizes = [layout.tensor_size, layout.pipeline_size, layout.data_size, layout.context_size]
    # Older checkpoints lack the last size. They are compatible if experts are not distributed.
    return sizes if layout.expert_size == 1 else [*sizes, layout.expert_size]


def optimizer_settings(trainer: Trainer) -> dict[str, Any]:
    """Settings that the stored optimizer state depends on, by configuration key."""
    return {
        "model.dtype": str(trainer.model.dtype).removeprefix("torch."),
        "actor.optimizer.distributed": trainer.settings.distributed,
        "actor.optimizer.states": trainer.settings.states,
    }


def random_file(rank: int) -> str:
    """Name of the file of a rank's random states."""
    return f"random-{rank:06d}.safetensors"


def _load_state(directory: Path, trainer: Trainer) -> None:
    from megatron.core import dist_checkpointing

    state = sharded_state(trainer, loading=True)
    # With expert parallelism, experts have a separate chained optimizer. The values of "optimizer"
    # that are not sharded follow the optimizers of the save. A separate key keeps them apart from
    # the present optimizers.
    loaded = dist_checkpointing.load(
        {"model": state["model"], "parts": state["optimizer"]}, str(directory)
    )
    trainer.model.module.load_state_dict(loaded["model"])
    states, optimizers = loaded["parts"], trainer.optimizer.chained_optimizers
    steps = _saved_steps(loaded["optimizer"])
    by_optimizer = [states] if len(optimizers) == 1 else states.values()
    for optimizer_state, optimizer in zip(by_optimizer, optimizers, strict=True):
        _complete_state(optimizer_state, optimizer.state_dict(), steps)
    trainer.optimizer.load_state_dict(states)


def _saved_steps(saved: Any) -> Tensor:
    """Number of steps of the optimizer, from any nested entry of ``saved``. All parameters have the
    same number; 0 if none is stored."""
    steps: list[Tensor] = []
    nested: list[Any] = []
    if isinstance(saved, dict):
        steps = [
            torch.as_tensor(saved[key], dtype=torch.float32)
            for key in ("common_step", "step")
            if key in saved
        ]
        nested = list(saved.values())
    elif isinstance(saved, list):
        nested = saved
    steps += map(_saved_steps, nested)
    return max(steps, default=_NO_STEPS)


def _complete_state(loaded: dict[str, Any], present: dict[str, Any], steps: Tensor) -> None:
    """Add the values that are not sharded to the ``loaded`` state of an optimizer, from its
    ``present`` state."""
    inner = loaded
    if "optimizer" in present:
        inner, present = loaded.setdefault("optimizer", {}), present["optimizer"]
    inner["param_groups"] = present["param_groups"]
    if "state" in inner:
        inner["state"]["common_step"] = steps
    if "param_state" in loaded:
        loaded["param_state_sharding_type"] = _SHARDING
        for group in inner["param_groups"]:
            group["step"] = float(steps)


def sharded_state(trainer: Trainer, loading: bool) -> dict[str, Any]:
    """megatron-core's sharded state of model and optimizer for a checkpoint. Collective."""
    # This sharding type stores the optimizer's state in the shapes of the parameters, so that any
    # other split can load it.
    metadata = {"distrib_optim_sharding_type": _SHARDING, "chained_optim_avoid_prefix": True}
    state = {"model": trainer.model.module.sharded_state_dict(prefix="")}
    state["optimizer"] = trainer.optimizer.sharded_state_dict(
        state, is_loading=loading, metadata=metadata
    )
    return state
