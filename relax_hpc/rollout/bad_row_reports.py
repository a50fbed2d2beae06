"""Reports of unusable training rows to the queue, which counts them."""

from __future__ import annotations

from relax_hpc.data.prompt_file import PromptFile, PromptSets
from relax_hpc.queue.client import QueueClient


def report_bad_rows(client: QueueClient, rows: PromptFile | PromptSets) -> None:
    """Report the unusable ``rows`` once in a run: not again after a restart of the group."""
    noted = client.status.get().result().noted
    if not any(name.startswith("bad_prompt/") for name in noted):
        for location, reason in rows.bad_rows():
            client.status.note("bad_prompt", location, reason)
