"""The client's side of the queue: methods with typed answers. The operations' names are known here
and nowhere else."""

from relax_hpc.queue.client.answers import (
    Admission,
    Checkpoint,
    Claim,
    LogPlace,
    News,
    NextAttempt,
    QueueStatus,
    StepTrained,
)
from relax_hpc.queue.client.connection import BEAT_FILE_S, then
from relax_hpc.queue.client.queue_client import QueueClient
from relax_hpc.queue.client.reading import read_columns, read_rows

__all__ = [
    "BEAT_FILE_S",
    "Admission",
    "Checkpoint",
    "Claim",
    "LogPlace",
    "News",
    "NextAttempt",
    "QueueClient",
    "QueueStatus",
    "StepTrained",
    "read_columns",
    "read_rows",
    "then",
]
