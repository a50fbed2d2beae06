"""Options of sbatch and srun that relax_hpc writes, changed by a site, a kind of nodes, a group."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.layout import components
from relax_hpc.cluster.slurm.render import render
from relax_hpc.cluster.slurm.srun import changed_srun, check_srun_options, placing_options
from relax_hpc.config.load import load, resolve
from relax_hpc.config.schema import Config

pytestmark = pytest.mark.unit

STEP = ["srun", "--overlap", "--mem=0", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--wait=0"]


def run_of(layout: str = "het", **settings: Any) -> Config:
    """A run of two groups: `hub` without GPUs and `actor` with eight on each of two nodes."""
    tree: dict[str, Any] = {
        "run_dir": "/scratch/demo",
        "layout": layout,
        "model": {"device": "cuda"},
        "actor": {"parallel": {"data": 16}},
        "groups": {
            "hub": {"roles": ["advantages"], "resources": {"nodes": 2}},
            "actor": {
                "roles": ["actor"],
                "resources": {"nodes": 2, "gpus_per_node": 8, "memory": "0"},
            },
            "rollout": {
                "roles": ["rollout"],
                "resources": {"gpus_per_node": 8, "memory": "0"},
            },
        },
    }
    return resolve(load([], merged(tree, settings)))


def merged(tree: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with values at dotted keys."""
    for key, value in settings.items():
        *folders, last = key.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = value
    return tree


def sbatch_options(config: Config) -> dict[str, list[str]]:
    """#SBATCH options by the first group of their component."""
    texts = list(render(config).values())
    components = "".join(texts).split("#SBATCH --job-name=")[1:]
    return {
        component.partition("-")[0]: [
            line.removeprefix("#SBATCH ")
            for line in component.splitlines()
            if line.startswith("#SBATCH")
        ]
        for component in components
    }


def test_null_removes_an_option_of_a_site_a_kind_of_nodes_or_a_group() -> None:
    lines = sbatch_options(run_of(**{"site.options": {"ntasks-per-node": None, "mem": None}}))
    for line in chain.from_iterable(lines.values()):
        assert "ntasks-per-node" not in line and "mem" not in line
    lines = sbatch_options(run_of(**{"site.cpu_options": {"cpus-per-task": None}}))
    assert "--cpus-per-task=1" in lines["actor"] and "--cpus-per-task=1" not in lines["hub"]
    lines = sbatch_options(run_of(**{"groups.actor.resources.options": {"mem": None}}))
    assert "--mem=0" not in lines["actor"]
    lines = sbatch_options(run_of(**{"site.gpu_options": {"gpus-per-node": None, "gpus": "8"}}))
    assert "--gpus=8" in lines["actor"] and "--gpus-per-node=8" not in lines["actor"]


def test_a_value_replaces_the_default() -> None:
    lines = sbatch_options(run_of(**{"site.options": {"open-mode": "truncate", "export": "NIL"}}))
    assert "--open-mode=truncate" in lines["hub"] and "--export=NIL" in lines["hub"]
    assert "--open-mode=append" not in lines["hub"]
    lines = sbatch_options(run_of("jobs", **{"site.options": {"requeue": "expedite"}}))
    assert all(
        "--requeue=expedite" in component_lines and "--requeue" not in component_lines
        for component_lines in lines.values()
    )
    lines = sbatch_options(run_of("jobs", **{"site.options": {"signal": "B:USR2@600"}}))
    assert all("--signal=B:USR2@600" in component_lines for component_lines in lines.values())


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (
            "het",
            {"signal": None},
            r"site.options.signal: found null, but recovery needs this option",
        ),
        ("het", {"signal": "TERM@60"}, r"site.options.signal: found 'TERM@60'; .*B:USR2@SECONDS"),
        ("jobs", {"requeue": None}, r"site.options.requeue: found null, but recovery needs"),
        ("jobs", {"no-requeue": ""}, r"site.options.no-requeue: .*set layout instead"),
        ("het", {"requeue": "expedite"}, r"site.options.requeue: found in layout het"),
        ("het", {"no-kill": None}, r"site.options.no-kill: found null"),
        (
            "het",
            {"nodes": "3"},
            r"site.options.nodes: .*set groups.<group>.resources.nodes instead",
        ),
        ("het", {"time": None}, r"site.options.time: .*set slurm.time instead"),
        ("het", {"chdir": "/"}, r"site.options.chdir: .*it cannot be changed"),
        ("het", {"output": ""}, r"site.options.output: found nothing, allowed: a value, or null"),
        ("het", {"constraint": ""}, r"site.options.constraint: found nothing"),
    ],
)
def test_options_that_recovery_needs_cannot_change(
    layout: str, options: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        render(run_of(layout, **{"site.options": options}))


def test_options_of_a_step_are_changed_by_site_kind_of_nodes_and_group() -> None:
    config = run_of(
        **{
            "site.srun_options": {"mem": None, "cpu-freq": "high", "unbuffered": ""},
            "site.cpu_srun_options": {"overlap": None},
            "site.gpu_srun_options": {"cpu-bind": "cores"},
            "groups.actor.resources.srun_options": {"wait": "60", "cpu-freq": None},
        }
    )
    check_srun_options(config)
    assert changed_srun(STEP, config, "hub") == [
        "srun", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--wait=0", "--cpu-freq=high", "--unbuffered",
    ]  # fmt: skip
    assert changed_srun([*STEP, *placing_options(config)], config, "actor") == [
        "srun", "--overlap", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--wait=60", "--distribution=block:block",
        "--cpu-bind=cores", "--unbuffered",
    ]  # fmt: skip
    assert changed_srun(STEP, run_of(), "actor") == STEP


def test_steps_inherit_the_limits_of_a_setup() -> None:
    config = run_of(**{"site.setup": ["ulimit -n 65536"]})
    limits = "--propagate=NOFILE,MEMLOCK,NPROC,STACK"
    assert placing_options(config) == [limits, "--distribution=block:block", "--cpu-bind=none"]
    config.site.srun_options = {"propagate": "NONE"}
    assert "--propagate=NONE" in changed_srun(["srun", *placing_options(config)], config, "hub")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mpi": "none"}, "set site.mpi.launcher instead"),
        ({"output": "x"}, "it cannot be changed"),
        ({"--hint": "x"}, "allowed: the long name of an option of srun"),
        ({"hint": "a\nb"}, "without line breaks"),
        ({"hint": ""}, "found nothing, allowed: a value, or null"),
        ({"kill-on-bad-exit": None}, "found null, but recovery needs this option"),
        ({"kill-on-bad-exit": "0"}, "found '0'; allowed: 1"),
        ({"wait": None}, "found null, but recovery needs"),
    ],
)
def test_wrong_options_of_a_step_are_refused(options: dict[str, str | None], message: str) -> None:
    for key in (
        "site.srun_options",
        "site.gpu_srun_options",
        "groups.actor.resources.srun_options",
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            check_srun_options(run_of(**{key: options}))
        assert str(caught.value).startswith(key)


def test_a_launcher_can_be_any_plugin_of_the_site() -> None:
    check_srun_options(run_of(**{"site.mpi.launcher": "cray_shasta"}))
    with pytest.raises(ConfigError, match=r"site.mpi.launcher: found '--x', allowed: mpiexec, or"):
        check_srun_options(run_of(**{"site.mpi.launcher": "--x"}))


def test_names_of_jobs_begin_with_their_group() -> None:
    """squeue shows only eight characters of a name."""
    for layout in ("het", "jobs"):
        assert set(sbatch_options(run_of(layout))) == {"hub", "actor", "rollout"}
    assert [component.name for component in components(run_of())] == ["hub", "actor", "rollout"]
