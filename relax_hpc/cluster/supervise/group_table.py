"""Table of the groups of one supervisor: which it supervises itself, which are detached, and which
are done."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.group import Incarnation
from relax_hpc.cluster.supervise.launch_records import all_ended, is_done, last_beat_s, members_of
from relax_hpc.config import Config
from relax_hpc.config.groups import group_roles, groups_that_train


class GroupTable:
    """Groups of one supervisor."""

    def __init__(self, run: RunDir, config: Config, names: Sequence[str]) -> None:
        self._run, self._config = run, config
        self.names = list(names)
        """Groups that this supervisor is responsible for, wherever they run."""
        self.supervised: dict[str, Incarnation] = {}
        """Groups that run under this supervisor, by name."""
        self.detached: dict[str, str] = {}
        """Slurm job that supervises a detached group now, by group; empty until it is
        submitted."""
        self.unfit: dict[str, str] = {}
        """Reason why the nodes of a group must not be used, by group."""
        self.hopeless: set[str] = set()
        """Groups in `unfit` for which other nodes would not do either."""
        self.released: set[str] = set()
        """Groups that were released to other jobs, which may not have started yet."""
        self.done: set[str] = set()
        """Roles that have finished their work, as `group/role`."""

    def all_released(self) -> bool:
        """Whether all groups of this supervisor were released to other jobs."""
        return self.released.issuperset(self.names)

    def is_finished(self) -> bool:
        """Whether every role of these groups except the controller is done. If the hub is among
        them, this includes all groups of the run."""
        if not all(self.all_done(name) for name in self.names):
            return False
        if "hub" not in self.names:
            return True
        return all(self._needs_no_hub(name) for name in self.supervised_elsewhere())

    def all_done(self, name: str) -> bool:
        """Whether every role of a group except the controller is done."""
        roles = {f"{name}/{role}" for role in group_roles(self._config, name)} - {"hub/controller"}
        if name not in self.supervised:
            self.done |= {
                key for key in roles - self.done if is_done(self._run, name, key.partition("/")[2])
            }
        return roles <= self.done

    def remove(self, name: str) -> None:
        """Remove a group that no longer runs under this supervisor. Its roles will do their work
        again."""
        del self.supervised[name]
        self.done -= {f"{name}/{role}" for role in group_roles(self._config, name)}

    def supervised_elsewhere(self) -> list[str]:
        """Groups of the run that another supervisor is responsible for."""
        return [name for name in members_of(self._run, self._config) if name not in self.supervised]

    def is_alive(self, name: str) -> bool:
        """Whether a group of the run still runs, under any supervisor."""
        group = self.supervised.get(name)
        return group.is_alive() if group else not all_ended(self._run, self._config, name)

    def _needs_no_hub(self, name: str) -> bool:
        """Whether a group under another supervisor has ended, or is silent after the run's end."""
        is_silent = (
            self._run.finished.exists()
            and last_beat_s(self._run, name) > self._config.liveness.lease_s
        )
        return is_silent or all_ended(self._run, self._config, name)

    def stop_order(self) -> list[list[str]]:
        """Order in which all groups of the run are stopped. Trainers stop first, while other
        groups can still deliver rows to them. Then the other groups stop together, then the
        hub."""
        names: Collection[str] = [*self.supervised, *self.supervised_elsewhere()]
        trainers = set(groups_that_train(self._config.groups).values())
        trainer_groups = [name for name in names if name != "hub" and name in trainers]
        worker_groups = [name for name in names if name not in (*trainer_groups, "hub")]
        return [trainer_groups, worker_groups, ["hub"] if "hub" in names else []]
