"""MPI libraries and launchers: the options for srun, the groups that need MPI, and the messages
about combinations that do not work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_hpc.config.groups import group_roles, rank_count
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config


def mpi_plugin(config: Config) -> str:
    """Value of `srun --mpi`."""
    return "none" if config.site.mpi.launcher == "mpiexec" else config.site.mpi.launcher


def needs_mpi(config: Config, *groups: str) -> bool:
    """Whether a role of the groups has several ranks, which exchange their addresses by MPI."""
    for group in groups:
        for role in group_roles(config, group):
            if role in RANKED and rank_count(config, group, role) > 1:
                return True
    return False


def mpi_defaults(config: Config) -> dict[str, str]:
    """Default variables for the mpich wheel: it uses libfabric instead of UCX."""
    # MPICH 5.0.2 prefers UCX. With UCX each rank publishes a 4 KiB buffer that it does not clear,
    # and only zero bytes are compressed. The text then sometimes exceeds the 1,024 bytes that the
    # pmi2 plugin of Slurm 22.05 accepts. The plugin truncates it, and MPI_Init hangs or aborts with
    # an invalid address. Addresses of libfabric have a few dozen bytes.
    return {"MPIR_CVAR_CH4_NETMOD": "ofi"} if config.site.mpi.library == "wheel" else {}


def mpi_variables(config: Config) -> dict[str, str]:
    """Variables that name the MPI library for mpi4py."""
    # mpi4py 4.1.2 uses an empty MPI4PY_LIBMPI as a path, so the variable is left out.
    library = config.site.mpi.library
    return {"MPI4PY_LIBMPI": library} if library != "wheel" else {}


def try_mpi() -> dict[str, object]:
    """Initialise and finalise MPI as ranks do; the number of ranks and the name of the library. A
    broken MPI ends the process or hangs."""
    from mpi4py import MPI

    world: dict[str, object] = {
        "ranks": MPI.COMM_WORLD.Get_size(),
        "library": MPI.Get_library_version().splitlines()[0][:80],
    }
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    return world


def find_mpi_problem(
    config: Config, worlds: Sequence[dict[str, Any]], wanted: int, last: str
) -> str:
    """Description of a problem of MPI; empty if there is none.

    ``worlds``: the results of `try_mpi` from ``wanted`` tasks of a step. ``last``: the last output
    of the step.
    """
    mpi = config.site.mpi
    settings = (
        f"see site.mpi.launcher (found {mpi.launcher}) and site.mpi.library (found {mpi.library})"
    )
    if len(worlds) < wanted:
        return f"MPI_Init did not succeed ({last}); {settings}"
    if any(world["ranks"] != wanted for world in worlds):
        # Without support for the plugin, an MPI library may start each task as a world of one rank.
        ranks = f"MPI: {worlds[0]['library']} found {worlds[0]['ranks']} of {wanted} ranks"
        return f"{ranks}, so it does not work with srun --mpi={mpi_plugin(config)}; {settings}"
    return ""
