"""Bad lines of a file of training rows, told to the queue, which counts them."""

from __future__ import annotations

from relax_hpc.data.prompt_file import PromptFile
from relax_hpc.transfer_queue.client import QueueClient


def note_bad_lines(client: QueueClient, rows: PromptFile) -> None:
    """Count them, once a run: an earlier incarnation of the group may have done so."""
    noted = client.status.get().result().noted
    if not any(name.startswith("bad_prompt/") for name in noted):
        for line in rows.bad:
            client.status.note("bad_prompt", rows.place_of(line.line), line.reason)
