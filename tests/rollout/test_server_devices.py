"""The devices of several SGLang servers on one node: counted as SGLang counts them, and none used
twice."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.server_devices import device_mistakes, devices_per_server
from relax_hpc.base.versions import Version
from relax_hpc.config.load import load
from relax_hpc.config.schema import Config
from relax_hpc.ops.checks.settings import check
from relax_hpc.rollout.engines.sglang.engine import server_arguments
from tests.requirements import requires

SIZES = st.integers(1, 4)
FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "tp_size": SIZES,
        "pp_size": SIZES,
        "dp_size": SIZES,
        "ep_size": SIZES,
        "enable_dp_attention": st.booleans(),
        "base_gpu_id": st.integers(0, 3),
    },
)


def devices_of_sglang(arguments: dict[str, Any]) -> list[int]:
    """Device of each rank of a server, by SGLang 0.5.21.

    `launch_dp_schedulers` and `launch_tensor_parallel_group` of data_parallel_controller.py, for
    one node.
    """
    tensor, pipeline, data = (arguments.get(name, 1) for name in ("tp_size", "pp_size", "dp_size"))
    copies = 1 if arguments.get("enable_dp_attention") else data
    ranks = product(range(copies), range(pipeline), range(tensor))
    return [
        arguments["base_gpu_id"] + copy * tensor * pipeline + stage * tensor + rank
        for copy, stage, rank in ranks
    ]


@given(flags=FLAGS, replicas=st.integers(1, 4))
def test_no_device_is_used_by_two_servers(flags: dict[str, Any], replicas: int) -> None:
    config = Config()
    config.model.device, config.rollout.replicas, config.rollout.engine.flags = (
        "cuda",
        replicas,
        flags,
    )
    devices = []
    for replica in range(replicas):
        devices += devices_of_sglang(
            server_arguments(config, replica, Path("model"), Version(1, 0))
        )
    first = flags.get("base_gpu_id", 0)
    assert devices == list(range(first, first + replicas * devices_per_server(flags)))


@given(flags=FLAGS)
def test_they_are_as_many_as_sglang_counts(flags: dict[str, Any]) -> None:
    requires("sglang")
    assert devices_per_server(flags) == _compute_world_size()(
        **{name: flags.get(name, 1) for name in ("tp_size", "pp_size", "dp_size")},
        enable_dp_attention=flags.get("enable_dp_attention", False),
    )


def _compute_world_size() -> Any:
    """SGLang's function, taken from its source: importing the module takes seconds."""
    (folder,) = find_spec("sglang").submodule_search_locations
    tree = ast.parse((Path(folder) / "srt/server_args.py").read_bytes())
    (function,) = (node for node in tree.body if getattr(node, "name", "") == "compute_world_size")
    names: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), "server_args.py", "exec"), names)
    return names["compute_world_size"]


def test_data_parallel_attention_takes_no_further_devices() -> None:
    assert devices_per_server({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}) == 4
    assert devices_per_server({"tp_size": 4, "dwdp_size": 4, "dp_size": 4}) == 4, (
        "which SGLang then turns on"
    )
    assert (
        devices_per_server({"tp_size": 2, "ep_size": 2, "moe_dp_size": 2, "attn_cp_size": 2}) == 2
    )


@pytest.mark.parametrize(
    ("flags", "mistake"),
    [
        ({"tp_size": "2"}, "tp_size: found '2', allowed: an integer, 1 or more"),
        ({"dp_size": 0}, "dp_size: found 0, allowed: an integer, 1 or more"),
        ({"pp_size": True}, "pp_size: found True, allowed: an integer, 1 or more"),
        ({"tp_size": 2.0}, "tp_size: found 2.0, allowed: an integer, 1 or more"),
        ({"base_gpu_id": -1}, "base_gpu_id: found -1, allowed: an integer, 0 or more"),
        ({"enable_dp_attention": "no"}, "enable_dp_attention: found 'no', allowed: true or false"),
        (
            {"gpu_id_step": 2},
            "gpu_id_step: found 2, allowed: 1; a server takes adjacent devices of one node",
        ),
        ({"nnodes": 2}, "nnodes: found 2, allowed: 1; a server takes adjacent devices of one node"),
        (
            {"node_rank": 1},
            "node_rank: found 1, allowed: 0; a server takes adjacent devices of one node",
        ),
    ],
    ids=str,
)
def test_flags_that_hide_the_devices_are_refused(flags: dict[str, Any], mistake: str) -> None:
    (line,) = device_mistakes("rollout.engine.flags", flags)
    assert line.startswith(f"rollout.engine.flags.{mistake}")
    # SGLang's own check may name the mistake first, in other words.
    (flag,) = flags
    for section in ("rollout.engine", "genrm"):
        lines = [
            line for line in check(_config(section, flags)) if line.startswith(f"{section}.flags.")
        ]
        assert [line.startswith(f"{section}.flags.{flag}: found ") for line in lines] == [True], (
            lines
        )


def _config(section: str, flags: dict[str, Any]) -> Config:
    """A configuration with a rollout and a generative reward model, of which ``section`` has
    ``flags``."""
    groups = {"genrm": {"roles": ["genrm"]}}
    return load([], {"groups": groups, f"{section}.flags": flags, "rollout.engine.kind": "sglang"})
