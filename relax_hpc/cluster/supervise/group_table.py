"""The groups that a supervisor looks after: which run here, which elsewhere, and which are done."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.supervise.group import Incarnation
from relax_hpc.cluster.supervise.launch_records import all_ended, is_done, last_beat_s, members_of
from relax_hpc.config import Config
from relax_hpc.config.groups import roles_of, trainers_of


class Roll:
    """Groups of one supervisor."""

    def __init__(self, run: RunDir, config: Config, names: Sequence[str]) -> None:
        self._run, self._config = run, config
        self.names = list(names)
        """Groups that it looks after, wherever they run."""
        self.here: dict[str, Incarnation] = {}
        """Groups that run under this supervisor, by name."""
        self.elsewhere: dict[str, str] = {}
        """Slurm job that supervises a group now, by group; empty until that is submitted."""
        self.unfit: dict[str, str] = {}
        """Groups whose nodes must not be used, and why."""
        self.released: set[str] = set()
        """Groups that have other jobs by now, or are to get them: they were asked for."""
        self.done: set[str] = set()
        """Roles that have come to their good end, as `group/role`."""

    def all_released(self) -> bool:
        """Whether nothing is left to look after here."""
        return self.released.issuperset(self.names)

    def finished(self) -> bool:
        """Every role of these groups but the controller is done; with the hub here, of all groups
        of the run."""
        if not all(self.all_done(name) for name in self.names):
            return False
        return "hub" not in self.names or all(self._left(name) for name in self.others())

    def all_done(self, name: str) -> bool:
        """Whether every role of a group but the controller is done."""
        roles = {f"{name}/{role}" for role in roles_of(self._config, name)} - {"hub/controller"}
        if name not in self.here:
            self.done |= {
                key for key in roles - self.done if is_done(self._run, name, key.partition("/")[2])
            }
        return roles <= self.done

    def remove(self, name: str) -> None:
        """Strike a group off that runs here no more; what its roles have done is done again."""
        del self.here[name]
        self.done -= {f"{name}/{role}" for role in roles_of(self._config, name)}

    def others(self) -> list[str]:
        """Groups of the run that are supervised elsewhere."""
        return [name for name in members_of(self._run, self._config) if name not in self.here]

    def lives(self, name: str) -> bool:
        """Whether a group of the run still runs, here or elsewhere."""
        group = self.here.get(name)
        return group.alive() if group else not all_ended(self._run, self._config, name)

    def _left(self, name: str) -> bool:
        """Whether a group that is supervised elsewhere needs the hub no more."""
        gone = (
            self._run.finished.exists()
            and last_beat_s(self._run, name) > self._config.liveness.lease_s
        )
        return gone or all_ended(self._run, self._config, name)

    def stop_order(self) -> list[list[str]]:
        """Order in which all groups of the run are stopped: trainers while they can still be fed,
        the others together, the hub last."""
        names: Collection[str] = [*self.here, *self.others()]
        trainers = set(trainers_of(self._config.groups).values())
        fed = [name for name in names if name != "hub" and name in trainers]
        rest = [name for name in names if name not in (*fed, "hub")]
        return [fed, rest, ["hub"] if "hub" in names else []]
