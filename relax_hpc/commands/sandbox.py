"""`relax-hpc sandbox VERB`: a private Slurm."""

from __future__ import annotations

from functools import partial
from typing import Any

from relax_hpc.cluster.sandbox.command import VERBS, add_arguments, usage
from relax_hpc.commands.command import Command, Verbs


def _handle(verb: str, given: dict[str, Any]) -> int:
    from relax_hpc.cluster.sandbox.command import main

    return main(verb, given.pop("words", ()), **given)


SANDBOX = Verbs(
    "A private, real Slurm of several nodes on this machine, without root.",
    {
        verb: Command(
            f"{about[0].upper()}{about[1:]}.",
            usage(verb),
            partial(add_arguments, verb),
            partial(_handle, verb),
            # munged refuses a socket that not everybody can reach.
            for_others=True,
        )
        for verb, about in VERBS.items()
    },
)
