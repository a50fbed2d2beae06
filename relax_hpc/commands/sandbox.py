"""`relax-hpc sandbox VERB`: a private Slurm cluster."""

from __future__ import annotations

from functools import partial
from typing import Any

from relax_hpc.cluster.sandbox.command import VERBS, add_arguments, usage
from relax_hpc.commands.command import Command, CommandGroup


def _handle(verb: str, arguments: dict[str, Any]) -> int:
    from relax_hpc.cluster.sandbox.command import main

    return main(verb, arguments.pop("positional", ()), **arguments)


SANDBOX = CommandGroup(
    "Run a private Slurm cluster with several nodes on this machine, without root.",
    {
        verb: Command(
            f"{about[0].upper()}{about[1:]}.",
            usage(verb),
            partial(add_arguments, verb),
            partial(_handle, verb),
            # munged requires a socket that all users can reach.
            for_others=True,
        )
        for verb, about in VERBS.items()
    },
)
