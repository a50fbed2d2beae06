"""Checkpoints: megatron-core's sharded state of model and optimizer, random states, and a marker written last.

A checkpoint is a directory that appears by rename. Its COMPLETE.json holds the checksum (XXH3, 128 bits) of every other
file and the caller's `meta`; a checkpoint without it, or with a file that differs from it, is never loaded. `saver`
writes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from relax_hpc.checkpoint.random_state import load_random_state
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.rundir import sync_directory

if TYPE_CHECKING:
    from relax_hpc.rendezvous.channel import Channel
    from relax_hpc.training.trainer import Trainer

FORMAT_VERSION = 2
MARKER = "COMPLETE.json"
_PIECE_BYTES = 4 << 20
_OWNED = re.compile(r"__(\d+)_\d+\.distcp$|random-(\d+)\.safetensors$")
"""Files that each rank writes; all others are rank 0's."""


class CheckpointError(RelaxError):
    """A checkpoint is incomplete, damaged or of another format; an older one may do."""


def load(directory: Path, trainer: Trainer, channel: Channel, digest: str | None = None) -> dict[str, Any]:
    """Verify `directory`, put its state into `trainer`, and return its meta. Collective.

    Every file is checked against the marker, and the marker against `digest`, what was journaled, if given.
    Another split over ranks than the one that saved is fine; random states are restored only under the same split.
    CheckpointError, in every rank and before anything is changed, names the file that is missing or damaged.
    ConfigError: the checkpoint is of another parameter type, or its optimizer was sharded and this one is not (or the
    reverse).
    """
    marker = channel.tell(_read_marker(directory, digest) if channel.rank == 0 else None)
    _check_marker(directory, marker, trainer)
    gathered = channel.gather(checksums_of(directory, sorted(marker["files"])[channel.rank :: channel.size]))
    _check_files(directory, marker, channel.tell(joined(gathered)))
    _load_state(directory, trainer)
    if marker["layout"] == layout_of(trainer):
        load_random_state(directory / random_file(channel.rank))
    return marker["meta"]


def remove_others(root: Path, keep: Collection[str], incarnation: int, role: str = "") -> list[str]:
    """Delete every checkpoint of `role` (see `checkpoint_name`) in `root`, partial ones too, whose name is not in
    `keep`, nor of a later incarnation than `incarnation`; the names deleted. What cannot be deleted stays.

    Each loses its marker first, so that an interrupted deletion leaves nothing that looks whole.
    """
    doomed = sorted(path for path in root.iterdir() if path.is_dir() and path.name not in keep)
    own = re.compile(rf"\.?{re.escape(role + '-' if role else '')}i(\d{{6}})-")
    mine = [path for path in doomed if (found := own.match(path.name)) and int(found[1]) <= incarnation]
    for path in mine:
        with contextlib.suppress(OSError):
            (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in mine]


def _read_marker(directory: Path, digest: str | None) -> dict[str, Any]:
    """The marker, or {"error": why not}, so that rank 0 can tell the others."""
    path = directory / MARKER
    try:
        marker = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {"error": f"{path}: missing, so saving did not come to its end; take an older checkpoint"}
    except (OSError, ValueError) as error:
        return {"error": f"{path}: {error}; take an older checkpoint"}
    if not isinstance(marker, dict) or marker.get("format") != FORMAT_VERSION:
        return {"error": f"{path}: not a marker of format {FORMAT_VERSION}, which this version reads"}
    if digest is not None and digest_of(path) != digest:
        return {"error": f"{path}: not the marker that was recorded for this checkpoint; take an older one"}
    return marker


def _check_marker(directory: Path, marker: dict[str, Any], trainer: Trainer) -> None:
    if "error" in marker:
        raise CheckpointError(marker["error"])
    if marker["optimizer"] is None:
        raise ConfigError(
            f"{directory}: a converted model, without optimizer; convert it to Hugging Face and start there"
        )
    for key, wanted in optimizer_of(trainer).items():
        if marker["optimizer"].get(key) != wanted:
            raise ConfigError(
                f"{directory / MARKER}: saved with {key} {marker['optimizer'].get(key)}, the run has {wanted}; "
                "resume with the setting it was saved with"
            )


def _check_files(directory: Path, marker: dict[str, Any], found: dict[str, str]) -> None:
    for name, digest in marker["files"].items():
        if not found[name]:
            raise CheckpointError(f"{directory / name}: missing, or cannot be read; take an older checkpoint")
        if found[name] != digest:
            raise CheckpointError(f"{directory / name}: damaged (its checksum differs); take an older checkpoint")


def files_of(directory: Path, rank: int) -> list[str]:
    """Files that ``rank`` has written into a checkpoint; its own node knows of them, whatever others have seen."""
    names = sorted(path.name for path in directory.iterdir())
    owners = [_OWNED.match(name) for name in names]
    return [
        name for name, found in zip(names, owners, strict=True) if int(found[1] or found[2] if found else 0) == rank
    ]


def checksums_of(directory: Path, names: Sequence[str], sync: bool = False) -> dict[str, str]:
    """The checksums of files by name; "" of one that is missing or cannot be read. Synced too if asked."""
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
        with path.open("rb") as file:
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
    return [layout.tensor_size, layout.pipeline_size, layout.data_size, layout.context_size]


def optimizer_of(trainer: Trainer) -> dict[str, Any]:
    """Settings that the stored optimizer state depends on, by configuration key."""
    return {
        "model.dtype": str(trainer.model.dtype).removeprefix("torch."),
        "actor.optimizer.distributed": trainer.settings.distributed,
    }


def random_file(rank: int) -> str:
    """Name of the file of a rank's random states."""
    return f"random-{rank:06d}.safetensors"


def _load_state(directory: Path, trainer: Trainer) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded_state(trainer, loading=True), str(directory))
    trainer.model.module.load_state_dict(state["model"])
    optimizer = state["optimizer"].get("optimizer", state["optimizer"])
    if "state" in optimizer:
        # A step count of zero is not stored.
        optimizer["state"].setdefault("common_step", torch.zeros(()))
    trainer.optimizer.load_state_dict(state["optimizer"])


def sharded_state(trainer: Trainer, loading: bool) -> dict[str, Any]:
    """Model and optimizer as megatron-core describes them for a checkpoint. Collective."""
    # The optimizer's state in the parameters' own shapes loads under every other split.
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    state = {"model": trainer.model.module.sharded_state_dict(prefix="")}
    state["optimizer"] = trainer.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return state
