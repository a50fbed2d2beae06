"""The client side of the queue: methods with typed answers. Only this package knows the names of
the controller's operations."""

from relax_hpc.queue.client.answers import (
    Admission,
    AttemptLog,
    Checkpoint,
    Claim,
    NextAttempt,
    PublishedVersion,
    QueueStatus,
    StepTrained,
)
from relax_hpc.queue.client.connection import BEAT_FILE_S, then
from relax_hpc.queue.client.queue_client import QueueClient
from relax_hpc.queue.client.reading import read_columns, read_rows

__all__ = [
    "BEAT_FILE_S",
    "Admission",
    "AttemptLog",
    "Checkpoint",
    "Claim",
    "NextAttempt",
    "PublishedVersion",
    "QueueClient",
    "QueueStatus",
    "StepTrained",
    "read_columns",
    "read_rows",
    "then",
]
