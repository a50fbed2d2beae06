"""An actor_fwd that hears of a version only once it has been asked to score the rows of that
version's step.

`environment`'s variables make it so in every process of a run that serves this role, by a
`sitecustomize`.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

HOOK = "from tests.runs.late_news import hear_late; hear_late()\n"
SAID = "claimed before its weights were heard of: step"


def environment(folder: Path) -> dict[str, str]:
    """Variables for all processes of a run; Python imports `sitecustomize` before anything else.
    Makes `folder`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    folders = [
        str(folder),
        str(Path(__file__).resolve().parents[2]),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def hear_late() -> None:
    """Where this process is an actor_fwd, hold news of versions back until a claim has come that
    needs them."""
    if "actor_fwd" not in sys.orig_argv:
        return
    from relax_hpc.roles import forward

    class Late(forward._Weights):
        """The first version comes in time: without any it would not claim."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.reader.newer = self.withhold
            self.told, self.news = self.news, Future()

        def withhold(self) -> Future:
            self.told = type(self.reader).newer(self.reader)
            return Future()

        def fit(self, claim: Any) -> bool:
            if claim.step > self.reader.serving.number and self.news is not self.told:
                print(SAID, claim.step, flush=True)
                fits, self.news = super().fit(claim), self.told
                return fits
            return super().fit(claim)

    forward._Weights = Late
