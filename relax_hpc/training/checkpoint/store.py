"""Checkpoints: megatron-core's sharded state of model and optimizer, random states, and a marker
written last.

A checkpoint is a directory that appears by rename. Its COMPLETE.json holds the checksum (XXH3, 128
bits) of every other file and the caller's `meta`; a checkpoint without it, or with a file that
differs from it, is never loaded. `saver` writes them.
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
_NEW = torch.zeros(())
_FORMERLY = {"actor.optimizer.states": "float32"}
"""Settings of checkpoints that were saved before there was a choice."""
_OWNED = re.compile(r"__(\d+)_\d+\.distcp$|random-(\d+)\.safetensors$")
"""Files that each rank writes; all others are rank 0's."""


class CheckpointError(RelaxError):
    """A checkpoint is incomplete, damaged or of another format; an older one may do."""


def load(
    directory: Path, trainer: Trainer, channel: RankChannel, digest: str | None = None
) -> dict[str, Any]:
    """Verify `directory`, put its state into `trainer`, and return its meta. Collective.

    Every file is checked against the marker, and the marker against `digest`, what was journaled,
    if given. Another split over ranks than the one that saved is fine; random states are restored
    only under the same split. CheckpointError, in every rank and before anything is changed, names
    the file that is missing or damaged. ConfigError: the checkpoint is of another parameter type,
    or its optimizer was sharded and this one is not (or the reverse).
    """
    marker = channel.broadcast(_read_marker(directory, digest) if channel.rank == 0 else None)
    _check_marker(directory, marker, trainer)
    gathered = channel.gather(
        checksums_of(directory, sorted(marker["files"])[channel.rank :: channel.size])
    )
    _check_files(directory, marker, channel.broadcast(joined(gathered)))
    _load_state(directory, trainer)
    if marker["layout"] == layout_of(trainer):
        load_random_state(directory / random_file(channel.rank))
    return marker["meta"]


def remove_others(root: Path, keep: Collection[str], incarnation: int, role: str = "") -> list[str]:
    """Delete every checkpoint of `role` (see `checkpoint_name`) in `root`, partial ones too, whose
    name is not in `keep`, nor of a later incarnation than `incarnation`; the names deleted. What
    cannot be deleted stays.

    Each loses its marker first, so that an interrupted deletion leaves nothing that looks whole.
    """
    doomed = sorted(path for path in root.iterdir() if path.is_dir() and path.name not in keep)
    own = re.compile(rf"\.?{re.escape(role + '-' if role else '')}i(\d{{6}})-")
    mine = [
        path for path in doomed if (found := own.match(path.name)) and int(found[1]) <= incarnation
    ]
    for path in mine:
        with contextlib.suppress(OSError):
            (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in mine]


def _read_marker(directory: Path, digest: str | None) -> dict[str, Any]:
    """The marker, or {"error": why not}, so that rank 0 can tell the others."""
    path = directory / MARKER
    try:
        marker = read_json_object(path, "take an older checkpoint", is_optional=True)
    except ConfigError as error:
        return {"error": str(error)}
    if not marker:
        # It is written last.
        return {
            "error": f"{path}: missing or empty, so the save did not finish; take an older "
            "checkpoint"
        }
    if marker.get("format") != FORMAT_VERSION:
        return {
            "error": f"{path}: not a marker of format {FORMAT_VERSION}, which this version reads"
        }
    if digest is not None and digest_of(path) != digest:
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
            "start there"
        )
    for key, wanted in optimizer_of(trainer).items():
        saved = marker["optimizer"].get(key, _FORMERLY.get(key))
        if saved != wanted:
            raise ConfigError(
                f"{directory / MARKER}: saved with {key} {saved}, the run has {wanted}; "
                "resume with the setting it was saved with"
            )


def _check_files(directory: Path, marker: dict[str, Any], found: dict[str, str]) -> None:
    for name, digest in marker["files"].items():
        if not found[name]:
            raise CheckpointError(
                f"{directory / name}: missing, or cannot be read; take an older checkpoint"
            )
        if found[name] != digest:
            raise CheckpointError(
                f"{directory / name}: damaged (its checksum differs); take an older checkpoint"
            )


def files_of(directory: Path, rank: int) -> list[str]:
    """Files that ``rank`` has written into a checkpoint; its own node knows of them, whatever
    others have seen."""
    names = sorted(path.name for path in directory.iterdir())
    owners = [_OWNED.match(name) for name in names]
    return [
        name
        for name, found in zip(names, owners, strict=True)
        if int(found[1] or found[2] if found else 0) == rank
    ]


def checksums_of(directory: Path, names: Sequence[str], sync: bool = False) -> dict[str, str]:
    """The checksums of files by name; "" of one that is missing or cannot be read. Synced too if
    asked."""
    found = {}
    for name in names:
        found[name] = checksum(directory / name)
        if sync:
            sync_directory(directory / name)
    return found


def joined(found: Sequence[dict[str, str]] | None) -> dict[str, str]:
    """The checksums that all ranks have found; none where they were not gathered."""
    return {name: sum_ for mine in found or [] for name, sum_ in mine.items()}


def checksum(path: Path) -> str:
    """XXH3, 128 bits in hex, of the file's bytes; "" if it is missing or cannot be read."""
    try:
        with open_regular(path) as file:
            found = xxhash.xxh3_128()
            while piece := file.read(_PIECE_BYTES):
                found.update(piece)
            return found.hexdigest()
    except OSError:
        return ""


def digest_of(marker: Path) -> str:
    """SHA-256 of a marker: what is journaled."""
    return hashlib.sha256(marker.read_bytes()).hexdigest()


def layout_of(trainer: Trainer) -> list[int]:
    """Sizes of the layout by which random states can be restored."""
    layout = trainer.model.layout
    sizes = [layout.tensor_size, layout.pipeline_size, layout.data_size, layout.context_size]
    # Those who deal out no experts resume what was saved before there was such a size.
    return sizes if layout.expert_size == 1 else [*sizes, layout.expert_size]


def optimizer_of(trainer: Trainer) -> dict[str, Any]:
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

    mine = sharded_state(trainer, loading=True)
    # Experts that are dealt out have a part of the optimizer by themselves. What is not sharded is
    # of the parts that were saved, so it is kept apart from those that there are now.
    found = dist_checkpointing.load(
        {"model": mine["model"], "parts": mine["optimizer"]}, str(directory)
    )
    trainer.model.module.load_state_dict(found["model"])
    parts, own = found["parts"], trainer.optimizer.chained_optimizers
    for part, one in zip([parts] if len(own) == 1 else parts.values(), own, strict=True):
        _complete(part, one.state_dict(), _steps(found["optimizer"]))
    trainer.optimizer.load_state_dict(parts)


def _steps(saved: Any) -> Tensor:
    """Steps that the optimizer has taken, wherever ``saved`` says so: all parameters have as many.
    None are not stored."""
    inner = (
        list(saved.values())
        if isinstance(saved, dict)
        else saved
        if isinstance(saved, list)
        else []
    )
    here = (
        [saved[key] for key in ("common_step", "step") if key in saved]
        if isinstance(saved, dict)
        else []
    )
    return max(
        (torch.as_tensor(one, dtype=torch.float32) for one in (*here, *map(_steps, inner))),
        default=_NEW,
    )


def _complete(part: dict[str, Any], now: dict[str, Any], steps: Tensor) -> None:
    """Add to what was loaded of a ``part`` of the optimizer what is not sharded: its settings as
    they are ``now``."""
    inner, present = (
        (part.setdefault("optimizer", {}), now["optimizer"]) if "optimizer" in now else (part, now)
    )
    inner["param_groups"] = present["param_groups"]
    if "state" in inner:
        inner["state"]["common_step"] = steps
    if "param_state" in part:
        part["param_state_sharding_type"] = _SHARDING
        for group in inner["param_groups"]:
            group["step"] = float(steps)


def sharded_state(trainer: Trainer, loading: bool) -> dict[str, Any]:
    """Model and optimizer as megatron-core describes them for a checkpoint. Collective."""
    # The optimizer's state in the parameters' own shapes loads under every other split.
    metadata = {"distrib_optim_sharding_type": _SHARDING, "chained_optim_avoid_prefix": True}
    state = {"model": trainer.model.module.sharded_state_dict(prefix="")}
    state["optimizer"] = trainer.optimizer.sharded_state_dict(
        state, is_loading=loading, metadata=metadata
    )
    return state
