"""The actor's side: every version becomes a directory that appears whole, then counts once it is journaled."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.versions import Version
from relax_hpc.weights.manifest import MANIFEST, TENSORS, digest, manifest_of

if TYPE_CHECKING:
    from torch import Tensor


def publish(run: RunDir, client: QueueClient, version: Version, tensors: dict[str, Tensor]) -> None:
    """Write ``tensors`` (Hugging Face names, on the CPU) as ``version``, announce it, delete what nobody needs.

    Files go to the operating system, not to the disk: weights can be made again from the checkpoint.
    """
    from safetensors.torch import save

    described = [
        {"name": n, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for n, t in tensors.items()
    ]
    data = save(tensors, metadata={"format": "pt"})
    manifest = manifest_of(str(version), {TENSORS: data}, described)
    target = run.weights / str(version)
    temporary = run.weights / f".{version}.{os.getpid()}"
    temporary.mkdir()
    (temporary / TENSORS).write_bytes(data)
    (temporary / MANIFEST).write_bytes(manifest)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    keep = set(client.call("publish", version=str(version), digest=digest(manifest))["keep"])
    for name in old_directories(run, version):
        if name not in keep:
            shutil.rmtree(run.weights / name, ignore_errors=True)


def old_directories(run: RunDir, version: Version) -> list[str]:
    """What lies in <run>/weights from before ``version``: published or not, half written by a dead actor or whole."""
    found: list[str] = []
    for path in run.weights.iterdir():
        with contextlib.suppress(ValueError):
            if Version.parse(path.name.removeprefix(".").partition(".")[0]) < version:
                found.append(path.name)
    return sorted(found)
