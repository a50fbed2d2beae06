"""The TransferQueue: the data bus between the groups. Import `QueueClient`, `Claim`, `Controller` and `Plan` from here.

Neither the controller nor the client imports torch.
"""

from relax_hpc.transfer_queue.client import Claim, QueueClient
from relax_hpc.transfer_queue.controller import Controller
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.schema import FIELDS, Row

__all__ = ["FIELDS", "Claim", "Controller", "Plan", "QueueClient", "Row"]
