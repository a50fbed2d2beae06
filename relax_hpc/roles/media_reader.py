"""Media that rows name. One rank reads them for the towers of its model."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_hpc.data.media import read_placeholder_tokens
from relax_hpc.data.multimodal.medium import Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.queue.client.claims import APPEARS_S
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import MediaError, MediaStore, media_ids
from relax_hpc.training.models.towers.media import RowMedia

_LOOK_S = 0.5


class MediaReader:
    """Reader of the media of a run."""

    def __init__(self, store: Callable[[], MediaStore], model: Path) -> None:
        """``store`` creates or returns the store of media; it is called when there are media.
        ``model`` is a Hugging Face directory."""
        self._store = functools.cache(store)
        self._rules = Rules.from_model(model) if read_placeholder_tokens(model) else None

    def read(self, rows: Sequence[Row]) -> RowMedia | None:
        """Return the media that ``rows`` name, each once; None if they name none.

        MediaError: a medium is missing or damaged, and stays so for as long as a file of another
        node may need to appear.
        """
        if self._rules is None:
            return None
        names = media_ids(rows)
        if not names:
            return None
        return RowMedia.from_media({name: self._read_one(name) for name in names}, self._rules)

    def _read_one(self, media_id: str) -> Medium:
        until = time.monotonic() + APPEARS_S
        while True:
            try:
                return Medium.from_bytes(self._store().read(media_id))
            except MediaError:
                if time.monotonic() > until:
                    raise
            time.sleep(_LOOK_S)
