"""Layouts: nodes of groups, and layouts that are refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.container import (
    container_command,
    container_srun_options,
    mounts,
    role_python,
    write_container_file,
)
from relax_hpc.cluster.slurm.layout import (
    components,
    gpu_hours,
    group_component,
    node_hours,
    time_limit_s,
)
from relax_hpc.cluster.slurm.render import render
from relax_hpc.commands.submit import cost_line
from relax_hpc.config import Config, load, resolve, to_dict

RUN = RunDir("/scratch/run").root


def make(**overrides: Any) -> Config:
    groups = {
        "rollout": {"resources": {"nodes": 1, "gpus_per_node": 8}},
        "actor": {"resources": {"nodes": 3, "gpus_per_node": 8, "cpus_per_task": 4}},
        "forward": {
            "roles": ["actor_fwd", "reference"],
            "resources": {"nodes": 2, "gpus_per_node": 4},
        },
        "actor_fwd": None,
        "reference": None,
    }
    sizes = {
        "actor.parallel.data": 24,
        "actor_fwd.parallel.data": 8,
        "reference.parallel.data": 4,
        "layout": "het",
        "slurm.time": "10:00:00",
    }
    return load([], {"groups": groups, **sizes, **overrides})


def shape(config: Config) -> list[tuple[str, int, int, int]]:
    return [
        ("+".join(p.groups), p.nodes, p.tasks_per_node, p.gpus_per_node) for p in components(config)
    ]


def test_het_has_the_hub_on_two_nodes_and_one_node_groups_last() -> None:
    config = make()
    assert shape(config) == [
        ("hub", 2, 2, 0),
        ("actor", 3, 8, 8),
        ("forward", 2, 6, 4),
        ("rollout", 1, 1, 8),
    ]


def test_the_hub_shares_the_largest_group_without_cpu_nodes() -> None:
    config = make(**{"site.cpu_nodes": False})
    assert shape(config) == [("actor+hub", 3, 8, 8), ("forward", 2, 6, 4), ("rollout", 1, 1, 8)]


def test_a_first_component_of_one_node_needs_a_setting() -> None:
    small = {"groups": {}, "site.cpu_nodes": False, "layout": "het"}
    with pytest.raises(
        ConfigError, match=r"groups.rollout.resources.nodes: found 1 .*slurm.one_node_hub"
    ):
        components(load([], small))
    assert components(load([], {**small, "slurm.one_node_hub": True}))[0].nodes == 1
    assert components(make(**{"slurm.one_node_hub": True}))[0].nodes == 1


def test_each_group_has_a_job_with_its_time_limit() -> None:
    config = make(layout="jobs")
    config.groups["rollout"].resources.time = "2:00:00"
    assert shape(config) == [
        ("hub", 1, 2, 0),
        ("rollout", 1, 1, 8),
        ("actor", 3, 8, 8),
        ("forward", 2, 6, 4),
    ]
    assert [job.time for job in components(config)] == [
        "10:00:00",
        "2:00:00",
        "10:00:00",
        "10:00:00",
    ]
    assert gpu_hours(config) == 8 * 2 + 3 * 8 * 10 + 2 * 4 * 10
    assert node_hours(config) == 10 + 2 + 3 * 10 + 2 * 10


def test_local_is_one_node_with_all_groups() -> None:
    config = load(
        [],
        {
            "layout": "local",
            "groups": {"actor": {"resources": {"gpus_per_node": 2, "cpus_per_task": 4}}},
        },
    )
    assert shape(config) == [("hub+rollout+actor", 1, 1, 2)]
    assert components(config)[0].cpus_per_task == 2 + 1 + 4
    config.groups["hub"].resources.options = {"account": "cpu-hours"}
    config.groups["actor"].resources.options = {"constraint": "h100"}
    assert components(config)[0].options == {"constraint": "h100"}
    with pytest.raises(
        ConfigError, match=r"groups.actor.resources.nodes: found 3, allowed with layout local: 1"
    ):
        components(make(layout="local"))


def test_gpu_options_apply_only_to_gpu_nodes_and_null_removes_them() -> None:
    site = {
        "site.options": {"reservation": "r"},
        "site.gpu_options": {"constraint": "a100"},
        "site.cpu_nodes": True,
    }
    config = make(**site)
    assert group_component(config, "hub").options == {"reservation": "r"}
    assert group_component(config, "rollout").options == {"reservation": "r", "constraint": "a100"}
    config = make(
        **site,
        **{
            "groups.rollout.resources.options": {
                "constraint": None,
                "reservation": None,
                "nice": "5",
            }
        },
    )
    assert group_component(config, "rollout").options == {"nice": "5"}
    assert load([], to_dict(config)).groups["rollout"].resources.options["constraint"] is None, (
        "kept when it is stored"
    )


def test_an_option_without_a_value_is_refused_unless_it_is_a_flag() -> None:
    config = make(**{"groups.hub.resources.options": {"constraint": ""}})
    with pytest.raises(
        ConfigError,
        match=r"options\.constraint: found nothing, allowed: a value, or null to remove",
    ):
        render(resolve(config))
    assert (
        "#SBATCH --exclusive\n"
        in render(resolve(make(**{"site.options": {"exclusive": ""}})))["run.sbatch"]
    )


def test_the_cost_of_a_run_includes_successors() -> None:
    assert cost_line(make()) == (
        "asks for 400.0 GPU-hours (80.0 node-hours) at most in one job; up to 20 jobs follow until "
        "the run is "
        "finished (slurm.successors): 8400.0 GPU-hours (1680.0 node-hours) at most"
    )
    assert cost_line(make(**{"slurm.successors": 0})).endswith("node-hours) at most")
    assert cost_line(make(layout="jobs")).endswith(
        "the jobs are then requeued until the run is finished"
    )


def test_hub_partition_and_group_options_override_those_of_the_site() -> None:
    config = make(
        **{
            "site.partition": "gpu",
            "site.hub_partition": "cpu",
            "site.account": "a",
            "site.qos": "q",
        }
    )
    config.site.options = {"constraint": "h100", "reservation": "r"}
    config.groups["hub"].resources.options = {"constraint": "cpu", "account": "b"}
    hub, actor, *_ = components(config)
    common = {"qos": "q", "reservation": "r"}
    assert hub.options == {"partition": "cpu", "account": "b", "constraint": "cpu"} | common
    assert actor.options == {"partition": "gpu", "account": "a", "constraint": "h100"} | common
    config.site.cpu_nodes = False
    assert components(config)[0].options["partition"] == "gpu"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"actor.parallel.data": 25},
            r"groups.actor.resources.nodes: found 3, allowed: a divisor of actor's 25 ranks",
        ),
        (
            {"actor.parallel.data": 27, "model.device": "cuda"},
            r"actor.resources.gpus_per_node: found 8, .* at least 9",
        ),
        (
            {"groups.rollout.resources.nodes": 2},
            r"rollout.replicas: found 1, allowed: a multiple of .*nodes, 2",
        ),
        (
            {"slurm.time": "5"},
            r"slurm.signal_s: found 300, allowed: less than the 300 s of slurm.time \(5\)",
        ),
        ({"slurm.time": "1 day"}, r"slurm.time: found '1 day', allowed: minutes, MM:SS"),
        (
            {"groups.actor.env": {"CUDA_VISIBLE_DEVICES": "0"}},
            r"CUDA_VISIBLE_DEVICES: found '0', .* layout het: none",
        ),
    ],
)
def test_an_impossible_layout_has_an_error_with_a_fix(
    overrides: dict[str, Any], message: str
) -> None:
    config = make()
    for key, value in overrides.items():
        *path, last = key.split(".")
        section: Any = config
        for name in path:
            section = section[name] if isinstance(section, dict) else getattr(section, name)
        setattr(section, last, value)
    with pytest.raises(ConfigError, match=message):
        components(config)


def test_a_component_is_selected_by_group_name() -> None:
    config = make()
    assert group_component(config, "hub").nodes == 1, (
        "an ordinary job of the hub is alone on its node"
    )
    assert group_component(config, "rollout-2").groups == ("rollout-2",), (
        "an elastic member has its group's resources"
    )
    assert group_component(config, "rollout-2").gpus_per_node == 8
    with pytest.raises(
        ConfigError, match="groups: found 'critic', allowed: hub, rollout, actor, forward"
    ):
        group_component(config, "critic")


@given(st.integers(0, 50), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_times_have_the_formats_of_sbatch(days: int, hours: int, minutes: int, last: int) -> None:
    total = days * 86400 + hours * 3600 + minutes * 60 + last
    assert time_limit_s(f"{days}-{hours}:{minutes:02}:{last:02}", "t") == total
    assert time_limit_s(f"{days * 24 + hours}:{minutes}:{last}", "t") == total
    assert time_limit_s(f"{minutes}:{last:02}", "t") == minutes * 60 + last
    assert time_limit_s(str(last), "t") == last * 60
    assert time_limit_s(f"{days}-{last}", "t") == days * 86400 + last * 3600
    assert time_limit_s(f"{days}-{hours}:{last}", "t") == days * 86400 + hours * 3600 + last * 60


@pytest.mark.parametrize(
    "time", ["", "0", "00:00:00", "UNLIMITED", "1:2:3:4", "-5", "1-", "5\n", "٣", "1.5"]
)
def test_other_times_are_refused(time: str) -> None:
    with pytest.raises(ConfigError, match=r"t: found .*allowed: minutes, MM:SS, HH:MM:SS"):
        time_limit_s(time, "t")


def test_container_prefix_of_apptainer_and_options_of_pyxis() -> None:
    config = make(
        **{"site.local_dir": "/nvme", "model.path": "/models/m", "site.container.image": "/i.sif"}
    )
    config.site.container.mounts = ["/opt/x:/x", "/data"]
    assert (container_command(config, RUN), container_srun_options(config, RUN)) == ([], [])
    config.site.container.runtime = "apptainer"
    binds = [
        f"--bind={path}" for path in ("/scratch/run", "/models/m", "/nvme", "/opt/x:/x", "/data")
    ]
    assert container_command(config, RUN) == ["apptainer", "exec", "--no-home", *binds, "/i.sif"]
    config.site.container.program = "/opt/bin/singularity"
    assert container_command(config, RUN)[:2] == ["/opt/bin/singularity", "exec"]
    config.model.device = "cuda"
    assert "--nv" in container_command(config, RUN) and role_python(config) == "python3"
    config.site.container.runtime = "pyxis"
    assert container_command(config, RUN) == []
    assert container_srun_options(config, RUN) == [
        "--container-image=/i.sif",
        "--container-mounts=/scratch/run:/scratch/run,/models/m:/models/m,/nvme:/nvme,/opt/x:/x,/data:/data",
        "--no-container-mount-home",
    ]


def test_the_container_engine_of_cscs_has_a_file_with_mounts(tmp_path: Path) -> None:
    image = 'my "image"'
    config = make(**{"site.local_dir": "/nvme", "model.path": "/models/m"})
    write_container_file(config, tmp_path)
    assert not list(tmp_path.iterdir()), "no container"
    config.site.container.runtime, config.site.container.image = "edf", image
    config.site.container.mounts = ["/opt/x:/x"]
    assert container_command(config, tmp_path) == []
    write_container_file(config, tmp_path)
    (option,) = container_srun_options(config, tmp_path)
    file = Path(option.removeprefix("--environment="))
    assert tomllib.loads(file.read_text()) == {
        "base_environment": image,
        "mounts": [
            *(f"{path}:{path}" for path in (str(tmp_path), "/models/m", "/nvme")),
            "/opt/x:/x",
        ],
        "workdir": str(tmp_path),
    }


def test_a_container_of_apptainer_has_no_pmix() -> None:
    config = make(**{"site.container.runtime": "apptainer", "site.container.image": "/i.sif"})
    config.site.mpi.launcher = "pmix"
    config.run_dir = "/scratch/demo"
    with pytest.raises(
        ConfigError, match=r"site.mpi.launcher: found pmix with container runtime apptainer.* pmi2"
    ):
        render(config)
    config.site.container.runtime = "pyxis"
    assert render(config)


def test_errors_in_container_settings_are_reported() -> None:
    config = make(**{"site.container.runtime": "apptainer", "site.local_dir": "/nvme"})
    with pytest.raises(
        ConfigError, match=r"site.container.image: found nothing with runtime apptainer"
    ):
        container_command(config, RUN)
    with pytest.raises(ConfigError, match=r"path '/a,b'"):
        mounts(config, RunDir("/a,b").root)
    config.site.container.mounts = ["relative"]
    with pytest.raises(ConfigError, match=r"site.container.mounts: found 'relative'"):
        mounts(config, RUN)
