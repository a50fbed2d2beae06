"""A second role that trains, added by import: the actor's twin, which learns the same and publishes
nothing.

Both have the same rows, begin with the same weights, and are never told of each other: their parts
of a checkpoint are equal bit for bit, whatever either goes through. A twin can be held at named
points, until it is killed or let go on.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from relax_hpc.config.roles import ROLES, Role

NAME, FOLDER = "twin", "TWIN_POINTS"
"""The role, and the variable that says in which folder points are asked for."""
ROLES[NAME] = Role(
    "tests.runs.twin_role", needs=ROLES["actor"].needs, trains=True, finishes_first=True
)

_LOOK_S = 0.02
_HELD_S = 240.0
"""A test that is at its end, or was killed, says go no more."""


def install(folder: Path) -> dict[str, str]:
    """What the environment needs for every process of a run to know the role."""
    (folder / "sitecustomize.py").write_text("import tests.runs.twin_role\n")
    paths = [
        str(folder),
        str(Path(__file__).parents[2]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {"PYTHONPATH": os.pathsep.join(paths), FOLDER: str(folder)}


def ask_for(folder: Path, point: str) -> None:
    """The twin that comes to ``point`` first is held there."""
    (folder / f"{point}.asked").touch()


def is_held(folder: Path, point: str) -> bool:
    return (folder / f"{point}.held").exists()


def let_go(folder: Path, point: str) -> None:
    (folder / f"{point}.go").touch()


def come_to(point: str) -> None:
    """`trained-3`: the queue knows that step 3 is trained; `part-4`: that part is written, and not
    journaled."""
    folder = Path(os.environ[FOLDER])
    if (folder / f"{point}.asked").exists():
        (folder / f"{point}.asked").rename(folder / f"{point}.held")
        deadline = time.monotonic() + _HELD_S
        while not (folder / f"{point}.go").exists():
            assert time.monotonic() < deadline, f"{point}: held for {_HELD_S} s"
            time.sleep(_LOOK_S)


def reward(sample: Any) -> float:
    """Of any response, so that there is something to learn: by its letters."""
    return sum(map(ord, sample.response_text)) % 8 / 8


def run(context: Any) -> None:
    """Train to the last step."""
    from relax_hpc.training.parallel import import_libraries

    import_libraries(context.config.model.device, 0, trains=True)
    from relax_hpc.roles.actor import trainer_of
    from relax_hpc.roles.ranks import Ranks
    from relax_hpc.roles.trainer_role import TrainerHooks, TrainerRole
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.models.hf_files import read_config

    class Twin(TrainerRole):
        def train(self, step: int) -> bool:
            due = super().train(step)
            self.await_step_ack(step)
            come_to(f"trained-{step}")
            return due

    config = context.config
    ranks = Ranks(context, config.actor.parallel)
    model = PolicyModel(read_config(context.model), config.model, config.actor.parallel)
    model.load_hf(context.model)
    twin = Twin(context, ranks, config.actor, trainer_of(model, config), TrainerHooks(), {})
    journal = twin.checkpoints.journal
    twin.checkpoints.journal = lambda step, *about: come_to(f"part-{step}") or journal(step, *about)
    twin.run()
