"""`relax-hpc doctor`: check a run against this cluster before it waits in Slurm's queue.

Only `deep` submits a job, a short probe. A property that Slurm does not report is listed as not
checked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from textwrap import indent

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.layout import components
from relax_hpc.config.load import Layers, resolve
from relax_hpc.config.schema import Config
from relax_hpc.ops.checks.files import notes
from relax_hpc.ops.doctor.cluster import Cluster, check_cluster, query_cluster
from relax_hpc.ops.doctor.deep import check_local_planes, check_nodes
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning
from relax_hpc.ops.doctor.gpus import check_compilers, check_requirements
from relax_hpc.ops.doctor.host import check_disk, check_layout, check_programs, check_settings
from relax_hpc.ops.doctor.media import check_media
from relax_hpc.ops.doctor.modules import check_staging

__all__ = ["Finding", "diagnose", "main"]


def main(config: Config, deep: bool, as_json: bool, layers: Layers | None = None) -> int:
    """Print all findings. Each names the file and line of ``layers`` that sets its key.

    Returns exit code 78 if a finding is an error, else 0.
    """
    findings = _findings(config, deep, layers or Layers({}, {}))
    if as_json:
        print(json.dumps([_as_json(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{finding.severity:<8} {finding.text}")
            if finding.detail:
                print(indent(finding.detail, " " * 9))
    sys.stdout.flush()
    return EXIT_CONFIG if _failed(findings) else EXIT_DONE


def _findings(config: Config, deep: bool, layers: Layers) -> list[Finding]:
    """Mistakes in the files of ``layers``, then findings that these mistakes do not explain."""
    mistakes = [error(mistake.text) for mistake in layers.mistakes]
    if layers.lost_layer:
        return mistakes
    slurm = Slurm() if config.layout != "local" else None
    findings = list(mistakes)
    for finding in diagnose(config, slurm, deep and not mistakes):
        if layers.may_cause(finding.text):
            continue
        if finding.severity != "ok":
            finding = replace(finding, text=layers.with_source(finding.text))
        findings.append(finding)
    return findings


def diagnose(config: Config, slurm: Slurm | None, deep: bool = False) -> list[Finding]:
    """All findings about ``config``, area by area; an area without mistakes has one finding `ok`.

    ``slurm``: None skips the checks of the cluster. ``deep``: if no other check failed, a job of
    one minute checks the nodes. Without a cluster two local processes try the planes.
    """
    config = resolve(config)
    findings = [
        *_area("settings", [*check_settings(config), *map(warning, notes(config))]),
        *check_media(config),
        *_area("layout", check_layout(config)),
        *_area("interpreter, MPI and container", check_programs(config)),
        *_area("modules and staging", check_staging(config)),
    ]
    cluster = query_cluster(slurm) if slurm else Cluster()
    requirements = check_requirements(config, cluster.is_this_host())
    findings += _area("minimum requirements", requirements)
    findings += check_compilers(config)
    if slurm is None:
        several_hosts = False
        if config.layout != "local":
            findings.append(warning("Slurm: not queried, so the cluster was not checked"))
    else:
        several_hosts = cluster.hosts > 1
        findings += _area("cluster", [*cluster.problems, *_cluster(config, slurm, cluster)])
    findings += _area("run directory", check_disk(config, several_hosts))
    if deep and _failed(findings):
        findings.append(warning("nodes: not probed, because there are errors; correct them first"))
    elif deep and slurm is not None:
        findings += _area("nodes", check_nodes(config, slurm))
    elif deep and config.layout == "local":
        findings += _area("planes", check_local_planes(config))
    return findings


def _cluster(config: Config, slurm: Slurm, cluster: Cluster) -> Iterable[Finding]:
    try:
        allocations = components(config)
    except ConfigError:
        return [warning("cluster: the request was not checked; correct the layout first")]
    return check_cluster(config, allocations, slurm, cluster) if cluster.answers else []


def _as_json(finding: Finding) -> dict[str, str]:
    return {name: value for name, value in asdict(finding).items() if value}


def _area(name: str, findings: Iterable[Finding]) -> list[Finding]:
    return list(findings) or [ok(f"{name}: no mistakes")]


def _failed(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
