"""A published set of weights: one directory a version, its manifest names every file with its digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from relax_hpc.errors import RelaxError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TENSORS = "model.safetensors"


class WeightsError(RelaxError):
    """Published weights that are missing, truncated or not what the controller journaled."""


def digest(data: bytes | memoryview) -> str:
    """sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def manifest_of(version: str, files: dict[str, bytes | memoryview], tensors: list[dict[str, Any]]) -> bytes:
    """The manifest as it is written; its own digest is what the controller journals."""
    entries = [{"name": name, "bytes": len(data), "sha256": digest(data)} for name, data in sorted(files.items())]
    value = {"format_version": FORMAT_VERSION, "version": version, "files": entries, "tensors": tensors}
    return json.dumps(value, indent=1).encode()


def read_verified(directory: Path, expected: str) -> dict[str, bytes]:
    """All files of a published directory, checked against its manifest and the journaled digest ``expected``."""
    try:
        text = (directory / MANIFEST).read_bytes()
        if digest(text) != expected:
            raise WeightsError(f"{directory / MANIFEST}: digest is not the journaled one; it was replaced or corrupted")
        manifest = json.loads(text)
        if manifest["format_version"] != FORMAT_VERSION:
            found = manifest["format_version"]
            raise WeightsError(f"{directory / MANIFEST}: format {found}, this program reads {FORMAT_VERSION}")
        files = {entry["name"]: (directory / entry["name"]).read_bytes() for entry in manifest["files"]}
    except OSError as error:
        raise WeightsError(f"{error.filename}: {error.strerror}") from error
    for entry in manifest["files"]:
        if digest(files[entry["name"]]) != entry["sha256"]:
            raise WeightsError(f"{directory / entry['name']}: digest does not match its manifest")
    return files
