"""Places of media in requests, which are looked at before anything is asked of an engine.

SGLang answers a request with more places than media, or media in other places, without a word, by
wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from relax_hpc.data.media import spans_of
from relax_hpc.queue.storage.media import BadMedia, check_media
from relax_hpc.rollout.engines.engine import BadAnswer, GenerateRequest


def check_places(request: GenerateRequest, placeholders: Mapping[str, int]) -> None:
    """BadAnswer unless the media of a request have all ``placeholders``, token ids by kind, of its
    prompt, and those of no other place."""
    if not placeholders:
        return
    drawn = request.draft.token_versions if request.draft else []
    ids = (*request.prompt_ids, *(request.draft.token_ids[: len(drawn)] if request.draft else ()))
    row = {
        "row_id": request.prompt_id,
        "token_ids": ids,
        "token_versions": np.concatenate([np.zeros(len(request.prompt_ids), np.int32), drawn]),
        "spans": spans_of(request.media),
    }
    try:
        check_media(row, placeholders)
    except BadMedia as bad:
        raise BadAnswer("bad_media", str(bad)) from None
