"""The TransferQueue: the data bus between the groups. It is of use alone, and imports no torch.

A run needs a directory that all its processes see, one controller, and a client in each process
that puts or reads rows. Here all of them are in one; elsewhere, each opens the same run and finds
the controller through its directory.

>>> import tempfile
>>> from pathlib import Path
>>> import numpy as np
>>> from relax_hpc.queue import Config, GroupConfig, QueueClient, RunDir, Version, row_id, serving
>>> groups = {"rollout": GroupConfig(roles=["rollout"]), "actor": GroupConfig(roles=["actor"])}
>>> config = Config(groups=groups, steps=1, prompts_per_step=2, samples_per_prompt=2)
>>> run = RunDir(Path(tempfile.mkdtemp()))
>>> version = Version(incarnation=1, number=0)
>>> def row(ticket, k):
...     about = {"row_id": row_id(ticket, k), "prompt_len": 1, "reward": float(k)}
...     about["token_ids"] = np.array([7, 8, ticket], np.int32)
...     about["token_versions"] = np.array([0] + 2 * [version.encode()], np.int32)
...     return {**about, "mine": np.ones(5)}
>>> run.create()
>>> maker, user = (QueueClient(run, config, group, incarnation=1) for group in groups)
>>> with serving(run, config), maker, user:
...     _ = user.training.resume(step=0).result(), user.weights.publish(version, digest="").result()
...     _ = maker.weights.serve("engine", version).result()
...     tickets = maker.tickets.admit("engine", count=2).result().tickets
...     rows = [row(ticket, k) for ticket in tickets for k in range(config.samples_per_prompt)]
...     refused = maker.put(rows, ["token_ids", "token_versions", "reward", "mine"])
...     claim = user.claim("actor", budget=1000)
...     total = sum(row["mine"].sum() for row in user.rows(claim))
...     _ = user.training.trained(claim.step, [claim.lease]).result()
>>> tickets, refused, claim.tickets, float(total)
([0, 1], {}, (0, 1), 20.0)

A claim that its holder neither answers, by a `put` with it, nor trains on, comes back when the
holder is said to be down (``client.status.down(group, incarnation)``) or a later incarnation of its
group speaks.
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
