"""MPI libraries and launchers: what srun is told, who needs MPI at all, and what is said where they
do not meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_hpc.config.groups import ranks_of, roles_of
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config


def mpi_plugin(config: Config) -> str:
    """Value of `srun --mpi`."""
    return "none" if config.site.mpi.launcher == "mpiexec" else config.site.mpi.launcher


def with_ranks(config: Config, *groups: str) -> bool:
    """Whether any role of the groups has ranks that MPI has to introduce to each other."""
    roles = (
        (group, role) for group in groups for role in roles_of(config, group) if role in RANKED
    )
    return any(ranks_of(config, group, role) > 1 for group, role in roles)


def mpi_defaults(config: Config) -> dict[str, str]:
    """Variables for the mpich wheel unless somebody has chosen: it introduces ranks by libfabric.

    By UCX, its own choice, each hands out 4 KiB that it does not clear, packed only where they are
    zero. With what had lain there the lines came to over the 1,024 bytes that Slurm's pmi2 plugin
    takes, now and then: it cut them, and MPI_Init waited for ever, or was aborted by an address
    that was none. Addresses of libfabric are some dozen bytes.
    """
    return {"MPIR_CVAR_CH4_NETMOD": "ofi"} if config.site.mpi.library == "wheel" else {}


def mpi_variables(config: Config) -> dict[str, str]:
    """Variables that tell mpi4py of its library; an empty value would be taken for a path."""
    library = config.site.mpi.library
    return {"MPI4PY_LIBMPI": library} if library != "wheel" else {}


def try_mpi() -> dict[str, object]:
    """Begin and end MPI as ranks do: how many there are, and whose library it is. Where it is
    broken, it ends the process or waits for ever."""
    from mpi4py import MPI

    found = {
        "ranks": MPI.COMM_WORLD.Get_size(),
        "library": MPI.Get_library_version().splitlines()[0][:80],
    }
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    return found


def mpi_problem(config: Config, worlds: Sequence[dict[str, Any]], wanted: int, last: str) -> str:
    """Problem of MPI where ``worlds`` are the answers of `try_mpi` from ``wanted`` tasks of a step;
    empty: none.

    ``last``: the last words of the step.
    """
    mpi = config.site.mpi
    settings = (
        f"see site.mpi.launcher (found {mpi.launcher}) and site.mpi.library (found {mpi.library})"
    )
    if len(worlds) < wanted:
        return f"MPI_Init did not succeed ({last}); {settings}"
    if any(world["ranks"] != wanted for world in worlds):
        alone = f"MPI: {worlds[0]['library']} found {worlds[0]['ranks']} of {wanted} ranks"
        return f"{alone}, so it does not speak with srun --mpi={mpi_plugin(config)}; {settings}"
    return ""
