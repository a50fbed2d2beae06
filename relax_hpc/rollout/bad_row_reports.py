"""Reports to the queue which training rows cannot be used. The queue counts them."""

from __future__ import annotations

from relax_hpc.data.prompt_file import PromptFile, PromptSets
from relax_hpc.queue.client import QueueClient


def note_bad_lines(client: QueueClient, rows: PromptFile | PromptSets) -> None:
    """Report them once a run: an earlier incarnation of the group may have done so."""
    noted = client.status.get().result().noted
    if not any(name.startswith("bad_prompt/") for name in noted):
        for place, reason in rows.bad_rows():
            client.status.note("bad_prompt", place, reason)
