"""`relax-hpc doctor`: what would go wrong with a run on this cluster, found before it waits in a
queue.

Nothing is submitted, but for a short probe job with `deep`. What Slurm cannot say is listed as not
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
from relax_hpc.ops.doctor.cluster import Cluster, check_cluster, look
from relax_hpc.ops.doctor.deep import check_here, check_nodes
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning
from relax_hpc.ops.doctor.gpus import check_gpus
from relax_hpc.ops.doctor.host import check_disk, check_layout, check_programs, check_settings
from relax_hpc.ops.doctor.media import check_media
from relax_hpc.ops.doctor.modules import check_staging

__all__ = ["Finding", "diagnose", "main"]


def main(config: Config, deep: bool, as_json: bool, layers: Layers | None = None) -> int:
    """Print what is found, after the line of ``layers`` that it is about; 0, or 78 if anything is
    an error."""
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
    """Mistakes of ``layers``, and findings about the rest."""
    mistakes = [error(mistake.text) for mistake in layers.mistakes]
    if layers.lack_one:
        return mistakes
    found = diagnose(config, Slurm() if config.layout != "local" else None, deep and not mistakes)
    rest = [one for one in found if not layers.explain(one.text)]
    return mistakes + [
        replace(one, text=layers.placed(one.text)) if one.severity != "ok" else one for one in rest
    ]


def diagnose(config: Config, slurm: Slurm | None, deep: bool = False) -> list[Finding]:
    """Everything found about ``config``, area by area; an area without mistakes has one finding
    `ok`.

    ``slurm``: None leaves the cluster out. ``deep``: a job of a minute looks from the nodes, once
    nothing else failed; without a cluster two processes try the planes between them.
    """
    config = resolve(config)
    findings = [
        *_area("settings", [*check_settings(config), *map(warning, notes(config))]),
        *check_media(config),
        *_area("layout", check_layout(config)),
        *_area("interpreter, MPI and container", check_programs(config)),
        *_area("modules and staging", check_staging(config)),
        *check_gpus(config),
    ]
    if slurm is None:
        several = False
        if config.layout != "local":
            findings.append(warning("Slurm: not asked, so nothing about the cluster was checked"))
    else:
        cluster = look(slurm)
        several = cluster.hosts > 1
        findings += _area("cluster", [*cluster.problems, *_cluster(config, slurm, cluster)])
    findings += _area("run directory", check_disk(config, several))
    if deep and _failed(findings):
        findings.append(warning("nodes: not probed, as there are errors; mend them first"))
    elif deep and slurm is not None:
        findings += _area("nodes", check_nodes(config, slurm))
    elif deep and config.layout == "local":
        findings += _area("planes", check_here(config))
    return findings


def _cluster(config: Config, slurm: Slurm, cluster: Cluster) -> Iterable[Finding]:
    try:
        parts = components(config)
    except ConfigError:
        return [warning("cluster: the request was not checked against it; mend the layout first")]
    return check_cluster(config, parts, slurm, cluster) if cluster.answers else []


def _as_json(finding: Finding) -> dict[str, str]:
    return {name: value for name, value in asdict(finding).items() if value}


def _area(name: str, found: Iterable[Finding]) -> list[Finding]:
    return list(found) or [ok(f"{name}: no mistakes")]


def _failed(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
