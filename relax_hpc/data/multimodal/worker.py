"""`python -m relax_hpc.data.multimodal.worker`: a process that decodes the media of one model, one
file at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from relax_hpc.base.content_id import hash_content
from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.loading import header, load
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.options import MediumOptions, with_options
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.source import Source
from relax_hpc.net.workers import frames
from relax_hpc.net.workers.serving import bound_memory, serve, write_answer


class Decoder:
    """The work of this process."""

    def __init__(self, first: dict[str, Any]) -> None:
        self._rules, self._limits = Rules.rebuilt(first["rules"]), Limits(**first["limits"])
        self._blob = os.memfd_create("blob")
        bound_memory(self._limits.memory_mb)

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer to a request."""
        try:
            return {"id": message["id"], **self._found(message)}
        except BadMedium as bad:
            error = [bad.reason, bad.detail]
        except MemoryError:
            error = [Reason.MEMORY, f"more than {self._limits.memory_mb} MB"]
        except Exception as other:  # decoders may raise anything
            error = [Reason.CORRUPTED, f"{type(other).__name__}: {other}"]
        return {"id": message["id"], "error": error}

    def _found(self, message: dict[str, Any]) -> dict[str, Any]:
        kind, source = Kind(message["kind"]), _source(message)
        rules = with_options(self._rules, MediumOptions(**message["options"]))
        if not message["content"]:
            return _shown(header(kind, source, rules, self._limits))
        medium = load(kind, source, rules, self._limits)
        return _shown(medium.header) | self._handed_over(medium)

    def _handed_over(self, medium: Medium) -> dict[str, Any]:
        """Memory in which the blob is, until the next request: the reader has it open by then."""
        os.close(self._blob)
        self._blob, parts = os.memfd_create("blob"), medium.parts()
        with os.fdopen(self._blob, "wb", closefd=False) as file:
            file.writelines(parts)
        return {"blob": f"/proc/{os.getpid()}/fd/{self._blob}", "media_id": hash_content(*parts)}


def _source(message: dict[str, Any]) -> Source:
    return Path(message["path"]) if "path" in message else bytes.fromhex(message["bytes"])


def _shown(about: Header) -> dict[str, Any]:
    return {"kind": about.kind, "grid": about.grid, "seconds": about.seconds}


def _serve(asked: BinaryIO, answers: BinaryIO) -> None:
    decoder = Decoder(frames.read(asked))
    write_answer(answers, {"at_once": 1})
    while True:
        write_answer(answers, decoder.answer(frames.read(asked)))


if __name__ == "__main__":
    serve(_serve)
