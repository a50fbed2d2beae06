"""Check of the placeholders of media in a request, before the request is sent to an engine.

SGLang 0.5.21 does not report a request that has more placeholders than media, or media at wrong
positions. It returns wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from relax_hpc.data.generation import GenerateRequest
from relax_hpc.data.media import spans_of
from relax_hpc.queue.storage.media import MediaMismatch, check_media
from relax_hpc.rollout.engines.engine import BadAnswer


def check_places(request: GenerateRequest, placeholders: Mapping[str, int]) -> None:
    """BadAnswer unless the spans of the request's media cover exactly the ``placeholders`` (token
    ids by kind of medium) in its tokens."""
    if not placeholders:
        return
    draft = request.draft
    versions = draft.token_versions if draft else []
    response_ids = draft.token_ids[: len(versions)] if draft else []
    row = {
        "row_id": request.prompt_id,
        "token_ids": (*request.prompt_ids, *response_ids),
        "token_versions": np.concatenate([np.zeros(len(request.prompt_ids), np.int32), versions]),
        "spans": spans_of(request.media),
    }
    try:
        check_media(row, placeholders)
    except MediaMismatch as bad:
        raise BadAnswer("bad_media", str(bad)) from None
