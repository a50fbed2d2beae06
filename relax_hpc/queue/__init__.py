"""The TransferQueue: the data bus between the groups. It works without the rest of the package.

It needs a directory that all processes of a run can access, one controller, and a client in each
process that puts or reads rows. In this example all of them are in one process. In other processes,
a client opens the same run directory and finds the controller's address there. torch is not
imported.

>>> import tempfile
>>> from pathlib import Path
>>> import numpy as np
>>> from relax_hpc.queue import Config, GroupConfig, QueueClient, RunDir, Version, row_id, serving
>>> groups = {"rollout": GroupConfig(roles=["rollout"]), "actor": GroupConfig(roles=["actor"])}
>>> config = Config(groups=groups, steps=1, prompts_per_step=2, samples_per_prompt=2)
>>> run = RunDir(Path(tempfile.mkdtemp()))
>>> version = Version(incarnation=1, number=0)
>>> def row(ticket, k):
...     fields = {"row_id": row_id(ticket, k), "prompt_len": 1, "reward": float(k)}
...     fields["token_ids"] = np.array([7, 8, ticket], np.int32)
...     fields["token_versions"] = np.array([0] + 2 * [version.encode()], np.int32)
...     return {**fields, "weights": np.ones(5)}
>>> run.create()
>>> producer, consumer = (QueueClient(run, config, group, incarnation=1) for group in groups)
>>> with serving(run, config), producer, consumer:
...     _ = consumer.training.resume(step=0).result()
...     _ = consumer.weights.publish(version, digest="").result()
...     _ = producer.weights.serve("engine", version).result()
...     tickets = producer.tickets.admit("engine", count=2).result().tickets
...     rows = [row(ticket, k) for ticket in tickets for k in range(config.samples_per_prompt)]
...     refused = producer.put(rows, ["token_ids", "token_versions", "reward", "weights"])
...     claim = consumer.claim("actor", budget=1000)
...     total = sum(row["weights"].sum() for row in consumer.rows(claim))
...     _ = consumer.training.trained(claim.step, [claim.lease]).result()
>>> tickets, refused, claim.tickets, float(total)
([0, 1], {}, (0, 1), 20.0)

A holder completes a claim by a `put` with the claim's lease, or by training on it. Otherwise the
claim's rows become ready again when the holder is reported down
(``client.status.down(group, incarnation)``) or a later incarnation of its group registers.
"""

from relax_hpc.base.fields import FIELDS, FieldSpec
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, GroupConfig
from relax_hpc.queue.client import Claim, QueueClient
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.plan import Plan, Task
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.serving import serving
from relax_hpc.queue.storage.columns import Column

__all__ = [
    "FIELDS",
    "Claim",
    "Column",
    "Config",
    "Controller",
    "FieldSpec",
    "GroupConfig",
    "Plan",
    "QueueClient",
    "Row",
    "RunDir",
    "Task",
    "Version",
    "row_id",
    "serving",
]
