"""GPUs of groups, and the vendor that a site names: variables and options of containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.machine.gpu_vendors import select_vendor
from relax_hpc.cluster.slurm.container import container_command
from relax_hpc.cluster.slurm.layout import components
from relax_hpc.cluster.supervise.processes import role_environment
from relax_hpc.config import Config, load
from relax_hpc.config.gpus import device_setting, hidden_gpu_variables
from relax_hpc.config.groups import group_environment
from relax_hpc.net.rendezvous.visible_gpus import check_visible_gpus
from relax_hpc.ops.checks import groups
from relax_hpc.ops.checks.settings import check
from tests.helpers.run_helpers import QUICKSTART

ROCM = {"site.gpu_vendor": "rocm", "model.device": "cuda"}


def make(**over: Any) -> Config:
    return load([QUICKSTART], over)


def test_devices_of_a_group_become_the_variable_of_the_vendor() -> None:
    over = {"groups.actor.devices": [2, 3], "groups.actor.env": {"A": "b"}}
    nvidia = make(**over, **{"site.gpu_vendor": "nvidia"})
    assert group_environment(nvidia, "actor") == {"A": "b", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert group_environment(make(**over, **ROCM), "actor") == {
        "A": "b",
        "ROCR_VISIBLE_DEVICES": "2,3",
    }
    assert group_environment(nvidia, "rollout") == {}
    assert device_setting(nvidia.groups["actor"]).entries == ["2", "3"]


def test_a_variable_in_the_environment_of_a_group_counts_too() -> None:
    group = make(**{"groups.actor.env": {"ROCR_VISIBLE_DEVICES": "0,1"}}).groups["actor"]
    setting = device_setting(group)
    assert (setting.key, setting.entries) == ("env.ROCR_VISIBLE_DEVICES", ["0", "1"])


def test_a_run_on_cpus_hides_the_gpus_of_all_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    assert hidden_gpu_variables() == hidden
    assert hidden.items() <= role_environment(make()).items()
    assert role_environment(make(**ROCM))["ROCR_VISIBLE_DEVICES"] == "0"


def test_a_container_makes_the_gpus_of_the_vendor_visible(tmp_path: Path) -> None:
    container = {"runtime": "apptainer", "image": "/images/relax.sif"}
    config = make(**ROCM, **{"layout": "jobs", "site.container": container})
    command = container_command(config, tmp_path)
    assert "--rocm" in command and "--nv" not in command
    config.model.device = "cpu"
    assert "--rocm" not in container_command(config, tmp_path)


def test_devices_belong_to_the_layout_local(tmp_path: Path) -> None:
    over = {"groups.actor.devices": [0], "run_dir": str(tmp_path / "run")}
    (finding,) = check(make(**over))
    assert finding.startswith("groups.actor.devices: found '0' with model.device cpu")
    with pytest.raises(ConfigError, match=r"groups\.actor\.devices: found '0', allowed with layo"):
        components(make(**over, **{"layout": "jobs", "model.device": "cuda"}))


def test_too_few_devices_for_the_ranks_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "find_vendor", lambda: select_vendor("nvidia"))
    over = {
        "run_dir": str(tmp_path / "run"),
        "model.device": "cuda",
        "actor.parallel.data": 2,
        "groups.actor.devices": [0],
    }
    (finding,) = check(make(**over))
    assert finding == (
        "groups.actor.devices: found '0' (1 GPUs), needed: 2 for actor; name more, or lower its "
        "ranks or engines"
    )
    over["groups.actor.devices"] = [0, 1]
    assert check(make(**over)) == []
    config = make(**over)
    check_visible_gpus(config, "actor", "actor", {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    with pytest.raises(ConfigError, match=r"found '3' \(1 GPUs\), needed: 2 \(ranks of actor\)"):
        check_visible_gpus(config, "actor", "actor", {"CUDA_VISIBLE_DEVICES": "3"})
    with pytest.raises(ConfigError, match=r"needed: 1 \(devices of the engines of rollout\)"):
        check_visible_gpus(config, "rollout", "rollout", {"CUDA_VISIBLE_DEVICES": ""})
    config.rollout.engine.kind = "simulated"
    check_visible_gpus(config, "rollout", "rollout", {"CUDA_VISIBLE_DEVICES": ""})


def test_a_rank_that_slurm_gives_another_number_of_gpus() -> None:
    over = {"layout": "jobs", "model.device": "cuda", "groups.actor.resources.gpus_per_node": 2}
    config = make(**over)
    for value in ("0", "0,1,2"):
        with pytest.raises(ConfigError, match=r"groups\.actor\.resources\.gpus_per_node") as caught:
            check_visible_gpus(config, "actor", "actor", {"CUDA_VISIBLE_DEVICES": value})
        assert caught.value.exit_code == 78
    config.site.gpu_request = "none"
    check_visible_gpus(config, "actor", "actor", {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    config.model.device = "cpu"
    check_visible_gpus(config, "actor", "actor", {"CUDA_VISIBLE_DEVICES": ""})
