"""`python -m relax_hpc.data.multimodal.worker`: a process that decodes the media of one model, one
file at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from relax_hpc.base.content_id import hash_content
from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.loading import header, load
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.options import MediumOptions, with_options
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.source import Source
from relax_hpc.net.workers import frames
from relax_hpc.net.workers.serving import bound_memory, serve, write_answer


class Decoder:
    """Decoder of media for requests of a `MediaPool`."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._rules, self._limits = Rules.from_json(setup["rules"]), Limits(**setup["limits"])
        self._blob = os.memfd_create("blob")
        bound_memory(self._limits.memory_mb)

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Response to a request: the header and maybe the medium, or an error."""
        try:
            return {"id": message["id"], **self._decode(message)}
        except UnusableMedium as bad:
            error = [bad.reason, bad.detail]
        except MemoryError:
            error = [Reason.MEMORY, f"more than {self._limits.memory_mb} MB"]
        except Exception as other:  # decoders may raise anything
            error = [Reason.CORRUPTED, f"{type(other).__name__}: {other}"]
        return {"id": message["id"], "error": error}

    def _decode(self, message: dict[str, Any]) -> dict[str, Any]:
        kind, source = Kind(message["kind"]), _source(message)
        rules = with_options(self._rules, MediumOptions(**message["options"]))
        if not message["content"]:
            return _header_fields(header(kind, source, rules, self._limits))
        medium = load(kind, source, rules, self._limits)
        return _header_fields(medium.header) | self._share_blob(medium)

    def _share_blob(self, medium: Medium) -> dict[str, Any]:
        """Write the medium into a memory file. It stays open until the next request. By then the
        reader has mapped it."""
        os.close(self._blob)
        self._blob, pieces = os.memfd_create("blob"), medium.parts()
        with os.fdopen(self._blob, "wb", closefd=False) as file:
            file.writelines(pieces)
        return {"blob": f"/proc/{os.getpid()}/fd/{self._blob}", "media_id": hash_content(*pieces)}


def _source(message: dict[str, Any]) -> Source:
    return Path(message["path"]) if "path" in message else bytes.fromhex(message["bytes"])


def _header_fields(header: Header) -> dict[str, Any]:
    return {"kind": header.kind, "grid": header.grid, "seconds": header.seconds}


def _decode_requests(requests: BinaryIO, answers: BinaryIO) -> None:
    decoder = Decoder(frames.read(requests))
    write_answer(answers, {"at_once": 1})
    while True:
        write_answer(answers, decoder.answer(frames.read(requests)))


if __name__ == "__main__":
    serve(_decode_requests)
