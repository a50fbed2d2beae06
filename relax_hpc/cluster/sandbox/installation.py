"""The Slurm whose daemons a sandbox runs: the system's, or one built from source below a prefix."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.net.rendezvous.process import clean_environment

OLDEST = (22, 5)
"""Oldest release that the sandbox runs."""
_NO_CGROUP_AUTOMOUNT, _CAN_DISABLE_CGROUPS = (23, 11), (24, 5)
"""The release that removed CgroupAutomount from cgroup.conf, and the first one that knows
CgroupPlugin=disabled."""
_DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
_CLIENTS = ("scontrol", "sinfo", "squeue", "sbatch", "scancel", "srun")
_SYSTEM_PATH = os.pathsep.join(("/usr/sbin", "/sbin", "/usr/local/sbin"))
_VERSION_S = 20.0
"""Deadline for a program that prints its version, seconds."""


@dataclass(frozen=True, slots=True)
class SlurmInstallation:
    """Programs and plugins of one Slurm. ``prefix``: the folder with its bin/ and sbin/; empty: the
    programs on PATH."""

    prefix: str = ""

    def find(self, program: str) -> str | None:
        """Path of a program, or None if it is not installed."""
        if self.prefix:
            return shutil.which(program, path=self._path)
        # Slurm's daemons are often not on a user's PATH.
        return shutil.which(
            program, path=os.pathsep.join((os.environ.get("PATH", ""), _SYSTEM_PATH))
        )

    def environment(self) -> dict[str, str]:
        """Environment of this process, in which Slurm's programs are those of the installation."""
        variables = clean_environment()
        if self.prefix:
            variables["PATH"] = os.pathsep.join((self._path, variables.get("PATH", "")))
        return variables

    def exports(self) -> str:
        """Line of a shell script that does the same as `environment`; empty if none is needed."""
        return f'export PATH={self._path}:"$PATH"\n' if self.prefix else ""

    def settings(self) -> list[str]:
        """Lines of slurm.conf that name the plugins of the installation."""
        plugins = self._plugins()
        # The folder in the program is that of its configure. It is another one if the installation
        # was moved.
        return [f"PluginDir={plugins}"] if plugins else []

    def slurmd_options(self) -> list[str]:
        """Arguments of slurmd that name the program of its steps."""
        stepd = self.find("slurmstepd") if self.prefix else None
        return ["-d", stepd] if stepd else []

    def cgroup_conf(self) -> str:
        """Text of cgroup.conf: the sandbox uses no cgroups, so that it needs no root."""
        # Without such a line slurmd 24.11 starts the cgroup plugin and needs systemd or root, even
        # with proctrack/linuxproc.
        if self.release() >= _CAN_DISABLE_CGROUPS:
            return "CgroupPlugin=disabled\n"
        return "CgroupAutomount=no\n" if self.release() < _NO_CGROUP_AUTOMOUNT else ""

    def version(self) -> str:
        """Version that slurmctld prints, such as 24.11.5."""
        return _read_version(self.find("slurmctld") or "slurmctld")

    def release(self) -> tuple[int, int]:
        """Year and month of the version: (24, 11)."""
        return _release(self.version())

    def check(self) -> None:
        """ConfigError if the prefix does not contain one whole Slurm that the sandbox can run."""
        if not self.prefix:
            return
        programs = {program: self.find(program) for program in (*_DAEMONS, *_CLIENTS)}
        missing = [program for program, path in programs.items() if path is None]
        if missing:
            raise ConfigError(
                f"sandbox: slurm: found no {', '.join(missing)} in {self.prefix}/sbin and "
                f"{self.prefix}/bin, allowed: the --prefix of a Slurm that was built and installed"
            )
        plugins = self._plugins()
        if not plugins or not (plugins / "auth_munge.so").exists():
            raise ConfigError(
                f"sandbox: slurm: found no plugin auth_munge.so in {self.prefix}, needed "
                "by the sandbox; configure Slurm with munge.h (Debian: libmunge-dev), and "
                "install it again"
            )
        self._check_versions()

    def _check_versions(self) -> None:
        version, slurmd = self.version(), self.find("slurmd") or "slurmd"
        if self.release() < OLDEST:
            raise ConfigError(
                f"sandbox: slurm: found Slurm {version} in {self.prefix}, allowed: "
                f"{OLDEST[0]}.{OLDEST[1]:02d} or newer"
            )
        # Only the daemons print their version without a slurm.conf.
        other = _read_version(slurmd)
        if other != version:
            raise ConfigError(
                f"sandbox: slurm: found slurmctld {version}, but slurmd {other} in {self.prefix}; "
                "install one version there"
            )

    def _plugins(self) -> Path | None:
        """Folder of the plugins below the prefix."""
        for pattern in ("lib*/slurm", "lib/*/slurm", "lib/*/slurm-wlm"):
            for folder in sorted(Path(self.prefix).glob(pattern)) if self.prefix else ():
                return folder
        return None

    @property
    def _path(self) -> str:
        return os.pathsep.join((f"{self.prefix}/bin", f"{self.prefix}/sbin"))


def check_state(path: Path, version: str, folder: Path) -> None:
    """ConfigError if the state of the sandbox in ``folder`` was written by another release of
    Slurm. ``path``: the file with the version that wrote it."""
    # slurmctld discards a state that it cannot read, and jobs with it, or does not start.
    former = path.read_text(encoding="utf-8").strip() if path.exists() else version
    if _release(former) != _release(version):
        raise ConfigError(
            f"sandbox: slurm: found Slurm {version}, but {folder} has the state of Slurm {former}; "
            "choose another folder, or remove it"
        )


def _read_version(program: str) -> str:
    """Version that a program of Slurm prints. ConfigError if it prints none."""
    try:
        done = subprocess.run(
            [program, "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_VERSION_S, env=clean_environment(),
        )  # fmt: skip
        output = done.stdout.strip() or done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    match = re.match(r"slurm(?:-wlm)? (\d+\.\d+\S*)", output)
    if not match:
        raise ConfigError(
            f"sandbox: slurm: {program} -V: found {' '.join(output.split())[:160]!r}, allowed: a "
            "version of Slurm; install it again"
        )
    return match[1]


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
