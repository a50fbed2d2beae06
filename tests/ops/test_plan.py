"""`relax-hpc plan`: the memory of a run, settings with which it fits, and the example models."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.cluster.slurm.layout import components
from relax_hpc.commands.program import main
from relax_hpc.config import Config, load
from relax_hpc.config.schema import ModelConfig, ParallelConfig
from relax_hpc.config.yaml_files import parse_yaml
from relax_hpc.ops.checks.memory import check_memory
from relax_hpc.ops.checks.model_files import spec_at
from relax_hpc.ops.doctor.memory import host_mib
from relax_hpc.ops.plan import tower_memory
from relax_hpc.ops.plan.footprint import GIB, Footprint
from relax_hpc.ops.plan.model_memory import parameters
from relax_hpc.ops.plan.plan import USABLE, GpuSet, plan
from relax_hpc.ops.plan.roles import CONTEXT_BYTES
from relax_hpc.ops.plan.view import basis
from tests.helpers.pages import ROOT

MODELS = ROOT / "configs/models"
CLUSTERS = {path.stem: path for path in (ROOT / "configs/clusters").glob("*-nodes*.yaml")}
CLAIM = re.compile(r"# Up to (Qwen3-\S+) in rows of ([\d,]+) tokens on GPUs of 80 GB")
COUNTS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-VL-2B": 2_127_532_032,
    "Qwen3-VL-4B": 4_437_815_808,
    "Qwen3-VL-8B": 8_767_123_696,
    "Qwen3-VL-30B-A3B": 31_070_754_032,
    "Qwen3-Omni-30B-A3B-Thinking": 31_719_205_488,
}
"""Number of parameters of each published model."""


def sized(cluster: str, model: str, **overrides: Any) -> Config:
    values = {
        "model.path": str(MODELS / model),
        "data.max_prompt_tokens": 2048,
        "rollout.max_new_tokens": 6144,
    }
    return load([CLUSTERS[cluster]], values | overrides)


def gpu_sets_with(config: Config, group: str) -> list[GpuSet]:
    """Sets of GPUs on which ``group`` runs."""
    return [gpu_set for gpu_set in plan(config, spec_at(config.model)) if group in gpu_set.groups]


def actor_footprint(gpu_sets: list[GpuSet]) -> Footprint:
    """The only footprint of the actor."""
    footprints = list[Footprint]()
    for gpu_set in gpu_sets:
        footprints += [item for item in gpu_set.footprints if item.role == "actor"]
    (footprint,) = footprints
    return footprint


def test_parameter_counts_are_those_of_the_published_models() -> None:
    assert {path.name for path in MODELS.iterdir()} == {*COUNTS}
    for name, count in COUNTS.items():
        spec = spec_at(ModelConfig(path=str(MODELS / name)))
        assert parameters(spec, ParallelConfig(), 0) == count
        stages = [
            parameters(spec, ParallelConfig(tensor=2, pipeline=2), stage) for stage in range(2)
        ]
        # Each rank has all norms and towers. If the embedding is tied, both stages have it.
        whole = count + sum(map(tower_memory.parameters, spec.towers))
        assert whole < 2 * sum(stages) < whole * (1.3 if spec.tied else 1.001)
        uneven = ParallelConfig(tensor=2, pipeline=2, last_stage_layers=spec.layers // 2 - 3)
        layer = (
            stages[0]
            - parameters(spec, ParallelConfig(tensor=2, pipeline=2, first_stage_layers=1), 0)
        ) / (spec.layers // 2 - 1)
        moved = [parameters(spec, uneven, stage) - stages[stage] for stage in range(2)]
        assert moved == [3 * layer, -3 * layer]


@pytest.mark.parametrize("cluster", sorted(CLUSTERS))
def test_the_largest_model_that_a_cluster_file_names_fits(cluster: str) -> None:
    claim = CLAIM.search(CLUSTERS[cluster].read_text())
    assert claim, "the file must name the largest model that fits"
    largest_model, row_tokens = claim[1], int(claim[2].replace(",", ""))
    config = sized(cluster, largest_model)
    assert config.data.max_prompt_tokens + config.rollout.max_new_tokens == row_tokens
    assert not any(gpu_set.lacks for gpu_set in plan(config, spec_at(config.model)))
    assert config.model.dtype == "bfloat16"
    assert "reference" not in config.groups and "reference" not in config.actor.forward
    parallel = config.actor.parallel
    # If each expert is on one rank only, data ranks share few optimizer states.
    assert config.actor.optimizer.distributed == (parallel.data > 1 and parallel.expert == 1)
    assert parallel.sequence_parallel == (parallel.tensor > 1)


@pytest.mark.parametrize(
    ("model", "decoder", "cluster"),
    [
        ("Qwen3-VL-2B", "Qwen3-1.7B", "1-nodes"),
        ("Qwen3-VL-4B", "Qwen3-4B", "1-nodes"),
        ("Qwen3-VL-8B", "Qwen3-8B", "8-nodes"),
        ("Qwen3-VL-30B-A3B", "Qwen3-30B-A3B", "1-nodes-moe"),
        ("Qwen3-Omni-30B-A3B-Thinking", "Qwen3-30B-A3B", "1-nodes-moe"),
    ],
)
def test_memory_of_a_multimodal_model_is_that_of_its_decoder_plus_towers(
    model: str, decoder: str, cluster: str
) -> None:
    footprints = []
    for name in (model, decoder):
        config = sized(cluster, name)
        gpu_sets = plan(config, spec_at(config.model))
        assert not any(gpu_set.lacks for gpu_set in gpu_sets)
        footprints.append(actor_footprint(gpu_sets))
    multimodal, text_only = footprints
    towers = spec_at(ModelConfig(path=str(MODELS / model))).towers
    tower_bytes = multimodal.resident["weights"] - text_only.resident["weights"]
    # The vocabulary of Qwen3-Omni has 128 more tokens.
    assert tower_bytes == pytest.approx(2 * sum(map(tower_memory.parameters, towers)), rel=1e-3)
    assert multimodal.phases["backward"]["towers' activations"] > 0
    assert not text_only.phases["backward"].get("towers' activations")


@pytest.mark.parametrize(
    ("group", "policy", "overrides"),
    [
        ("critic", "Qwen3-8B", {}),
        ("teacher", "Qwen3-8B", {"model.teacher_path": str(MODELS / "Qwen3-32B")}),
        ("genrm", "Qwen3-8B", {"genrm.path": str(MODELS / "Qwen3-32B")}),
    ],
)
def test_a_group_file_adds_a_node_on_which_the_group_fits(
    group: str, policy: str, overrides: dict
) -> None:
    """The other groups stay the same, in one heterogeneous job and in a job for each group."""
    base = sized("8-nodes", policy)
    settings = {
        "model.path": base.model.path,
        "data.max_prompt_tokens": 2048,
        "rollout.max_new_tokens": 6144,
        **overrides,
    }
    config = load([CLUSTERS["8-nodes"], ROOT / f"configs/groups/{group}.yaml"], settings)
    assert set(config.groups) - set(base.groups) == {group}
    gpu_sets = plan(config, spec_at(config.model))
    (added,) = [gpu_set for gpu_set in gpu_sets if gpu_set.groups == (group,)]
    assert not any(gpu_set.lacks for gpu_set in gpu_sets) and added.footprints[0].gpus == 8
    assert added.footprints[0].resident["weights"] > (3 if group == "critic" else 15) * 2**30
    for layout in ("het", "jobs"):
        config.layout = base.layout = layout
        assert requested_gpus(config) - requested_gpus(base) == 8


def requested_gpus(config: Config) -> int:
    """GPUs that all Slurm components of the run request together."""
    return sum(item.nodes * item.gpus_per_node for item in components(config))


def test_all_suggested_settings_together_make_the_actor_fit() -> None:
    """If one of the settings is left out, the actor does not fit."""
    base = {
        "model.dtype": "float32",
        "actor.optimizer.distributed": False,
        "actor.recompute": "none",
    }
    config = sized("4-nodes", "Qwen3-14B", **base)
    (gpu_set,) = gpu_sets_with(config, "actor")
    assert gpu_set.lacks and gpu_set.remedies
    changes = parse_yaml("\n".join(gpu_set.remedies), "remedies")
    for left_out in (None, *changes):
        applied = {key: value for key, value in changes.items() if key != left_out}
        changed = sized("4-nodes", "Qwen3-14B", **base | applied)
        fits = not any(gpu_set.lacks for gpu_set in gpu_sets_with(changed, "actor"))
        assert fits == (left_out is None), left_out


@pytest.mark.parametrize(
    ("cluster", "model", "group", "expected_remedies"),
    [
        ("8-nodes", "Qwen3-30B-A3B", "actor", ["actor.parallel.expert: 8"]),
        (
            "4-nodes",
            "Qwen3-30B-A3B",
            "actor",
            ["actor.optimizer.offload: true", "actor.parallel.expert: 8"],
        ),
        ("4-nodes", "Qwen3-235B-A22B", "reference", ["reference.parallel.expert: 8"]),
        ("8-nodes", "Qwen3-235B-A22B", "actor", []),
        ("8-nodes-moe", "Qwen3-30B-A3B", "", []),
        ("2-nodes-moe", "Qwen3-235B-A22B", "actor", []),
        ("1-nodes-moe", "Qwen3-235B-A22B", "actor", []),
    ],
)
def test_experts_that_do_not_fit_get_expert_parallelism_or_are_refused(
    cluster: str, model: str, group: str, expected_remedies: list[str]
) -> None:
    reference_on_gpus = {
        "groups.reference.resources": {"nodes": 1, "gpus_per_node": 8},
        "reference.parallel.data": 8,
    }

    def remedies_by_group(**overrides: Any) -> dict[str, list[str]]:
        """Remedies of each group that does not fit."""
        base = reference_on_gpus if group == "reference" else {}
        config = sized(cluster, model, **base, **overrides)
        remedies = dict[str, list[str]]()
        for gpu_set in plan(config, spec_at(config.model)):
            if gpu_set.lacks:
                remedies |= {name: list(gpu_set.remedies) for name in gpu_set.groups}
        return remedies

    assert remedies_by_group().get(group) == (expected_remedies if group else None)
    if expected_remedies:
        changes = parse_yaml("\n".join(expected_remedies), "remedies")
        assert group not in remedies_by_group(**changes)


def test_grouped_experts_exist_twice_and_a_remedy_is_sequential_experts() -> None:
    model = "Qwen3-30B-A3B"
    sequential, auto = (
        sized("2-nodes-moe", model, **{"actor.experts": experts, "actor.recompute": "none"})
        for experts in ("sequential", "auto")
    )
    peaks = []
    for config in (sequential, auto):
        actor = actor_footprint(plan(config, spec_at(config.model)))
        peaks.append(dict(actor.phases["backward"]))
    grouped_bytes = peaks[1].pop("experts in one piece")
    # 8 ranks share 29 G parameters of 2 bytes.
    assert peaks[0] == peaks[1] and 6.5 * GIB < grouped_bytes < 7 * GIB
    sizes_bytes = [
        max(gpu_set.bytes for gpu_set in gpu_sets_with(config, "actor"))
        for config in (sequential, auto)
    ]
    auto.site.gpu_memory_gib = sum(sizes_bytes) / 2 / GIB / USABLE
    (gpu_set,) = gpu_sets_with(auto, "actor")
    assert gpu_set.lacks and list(gpu_set.remedies) == ["actor.experts: sequential"]


def test_bytes_of_a_parameter_and_of_shared_states() -> None:
    def actor_bytes(**overrides: Any) -> dict[str, float]:
        """Bytes per parameter of each item, and the bytes of the peak and of logits."""
        config = sized("4-nodes", "Qwen3-8B", **{"actor.kernels": "plain"} | overrides)
        actor = actor_footprint(plan(config, spec_at(config.model)))
        count = parameters(spec_at(config.model), config.actor.parallel, 0)
        sizes = {
            name: size / count
            for name, size in (Counter(actor.resident) + Counter(actor.pinned)).items()
        }
        return sizes | {"peak": actor.peak, "logits": actor.phases["output layer"]["logits"]}

    whole, shared = actor_bytes(**{"actor.optimizer.distributed": False}), actor_bytes()
    assert [whole[name] for name in ("weights", "gradients", "optimizer states")] == [2, 4, 12]
    assert [shared[name] for name in ("weights", "gradients", "optimizer states")] == [2, 4, 6]
    offloaded = actor_bytes(**{"actor.optimizer.offload": True})
    assert offloaded["optimizer states"] == 12 / 2 * 8
    # Two slabs on a node with eight ranks. Each of two data-parallel ranks has half of a slab.
    assert shared["slabs"] == 2 * 2 / 2 * 8
    assert actor_bytes(max_staleness=2)["slabs"] == 4 * 2 / 2 * 8
    # A row is never split. An eighth of its logits is in memory at a time.
    assert shared["logits"] == 8 * 8192 * 151_936 / 4 / 8
    assert actor_bytes(**{"rollout.max_new_tokens": 30_720})["logits"] == 4 * shared["logits"]


def test_the_command_prints_the_plan_and_names_roles_that_do_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["plan", f"--config={CLUSTERS['1-nodes-of-4']}", f"--model.path={MODELS}/Qwen3-14B"]
    assert main(line) == 78
    output = capsys.readouterr().out
    assert "DOES NOT FIT (actor: " in output and "not measured" in output
    remedy = re.search(
        r"it would fit with (--actor.optimizer.offload=true --actor.parallel.tensor=2 .*)", output
    )
    assert main([*line, *remedy[1].split(), "--groups.actor.resources.gpus_per_node=2"]) == 0, (
        "the suggested options must make it fit"
    )
    assert "fits" in capsys.readouterr().out
    assert (
        "bfloat16, fused kernels, long_row_attention packed, warm_up off, kernel_cache off\n"
        in output
    )
    assert main([*line, "--json", "--site.gpu_memory_gib=400", "--actor.kernels=plain"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"]["kernels"], report["model"]["experts"]) == ("plain", "sequential")
    assert [gpu_set["fits"] for gpu_set in report["places"]] == [True] * 2
    role_names = set[str]()
    for gpu_set in report["places"]:
        role_names.update(role["role"] for role in gpu_set["roles"])
    assert role_names == {"rollout", "actor"}


def test_settings_that_cannot_be_planned_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", f"--config={CLUSTERS['1-nodes']}"]
    assert main([*line, f"--model.path={MODELS}/Qwen3-4B", "--actor.parallel.tensor=3"]) == 78
    assert "actor.parallel.tensor: found 3, allowed: a divisor" in capsys.readouterr().err
    assert main([*line, "--model.path=/nowhere"]) == 78
    assert "found no config.json in /nowhere" in capsys.readouterr().err
    assert main([*line, f"--model.path={MODELS}/Qwen3-4B", "--site.gpu_memory_gib=0"]) == 78
    assert "found 0, allowed: the memory of a GPU" in capsys.readouterr().err
    assert main([*line, f"--model.path={MODELS}/Qwen3-4B", "--site.gpu_memory_gib=81559"]) == 78
    assert (
        "site.gpu_memory_gib: found 81559.0 (float), allowed: 0.0 to 4096.0"
        in capsys.readouterr().err
    )
    # Other checks report these flags.
    flags = {
        "rollout.engine.flags": {
            "tp_size": 0,
            "mem_fraction_static": "much",
            "max_total_tokens": None,
        }
    }
    assert not list(check_memory(sized("1-nodes", "Qwen3-4B", **flags)))


def test_a_run_that_cannot_fit_is_refused_before_it_is_submitted() -> None:
    (finding,) = check_memory(sized("1-nodes", "Qwen3-8B", **{"actor.kernels": "plain"}))
    assert (
        finding.startswith("groups.actor: found actor: ")
        and "it fits with actor.optimizer.offload: true;" in finding
    )
    assert not list(check_memory(sized("1-nodes", "Qwen3-8B")))
    assert not list(check_memory(sized("1-nodes", "Qwen3-14B", **{"site.gpu_memory_gib": 0})))
    (finding,) = check_memory(
        sized("1-nodes", "Qwen3-4B", **{"rollout.engine.flags.mem_fraction_static": 0.1})
    )
    assert (
        "groups.rollout: found rollout: keys and values of one row of 8,192 tokens need 1.1 "
        "GiB, and" in finding
    )
    assert "it fits with rollout.engine.flags.mem_fraction_static: 0.85" in finding


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"tp_size": 3}, "tp_size: found 3, allowed: divisors of the 32 attention heads"),
        ({"tp_size": 4}, "6 engines of tp_size 4 need 24 GPUs, and group rollout has 6"),
        ({"pp_size": 2}, "6 engines of tp_size 1 and pp_size 2 need 12 GPUs"),
        ({"dp_size": 2}, "6 engines of tp_size 1 and dp_size 2 need 12 GPUs"),
        (
            {"base_gpu_id": 1},
            "6 engines of tp_size 1 need 6 GPUs, and group rollout has 5 without the 1 before",
        ),
    ],
)
def test_engines_that_cannot_be_placed_are_refused(flags: dict[str, int], expected: str) -> None:
    (finding,) = check_memory(sized("1-nodes", "Qwen3-4B", **{"rollout.engine.flags": flags}))
    assert expected in finding


def test_stored_peaks_are_reported(tmp_path: Path) -> None:
    assert "no peak of a GPU run" in basis(tmp_path)
    (tmp_path / "gpu-broken.json").write_text("[")
    measured = {
        "0.6B: fused": {"memory_gib": 38.0, "worked_out_gib": 37.0},
        "slab": {},
        "8B": {"error": "out of memory"},
    }
    result = {"machine": {"device": "H100", "commit": "abc"}, "measured": measured}
    (tmp_path / "gpu-h100.json").write_text(json.dumps(result))
    assert basis(tmp_path).endswith(
        "; peaks of GPU runs: 38.0 GiB, calculated 37.0 (0.6B: fused; H100, commit abc)"
    )


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_8b_with_rows_of_16384_fits_one_gpu_with_its_states_on_the_host(kernels: str) -> None:
    """The GPU has weights, float32 gradients and the tensors of a step. Optimizer states, 12 bytes
    per parameter, are in host memory."""
    rows = {"data.max_prompt_tokens": 2048, "rollout.max_new_tokens": 14_336, "rollout.replicas": 2}
    settings = {
        "actor.max_tokens_per_micro_batch": 16_384,
        "actor.kernels": kernels,
        "actor.optimizer.offload": True,
    }
    config = sized("1-nodes-of-4", "Qwen3-8B", **rows, **settings)
    (gpu_set,) = gpu_sets_with(config, "actor")
    assert gpu_set.groups == ("actor",)
    assert gpu_set.footprints[0].gpus == 1 and not gpu_set.lacks
    (actor,) = gpu_set.footprints
    count = COUNTS["Qwen3-8B"]
    assert actor.resident["weights"] + actor.resident["gradients"] == 6 * count
    assert (
        actor.resident["optimizer states"] == 0 and actor.pinned["optimizer states"] == 12 * count
    )
    assert (
        gpu_set.bytes
        == sum(actor.resident.values()) + sum(actor.phases[actor.worst_phase].values())
        < 60 * GIB
    )


def test_engines_and_an_actor_that_take_turns_share_their_gpus() -> None:
    shared = {"groups.rollout": None, "groups.actor.roles": ["rollout", "actor"]}
    turns = {"rollout.engine.flags.mem_fraction_static": 0.5, "rollout.replicas": 2}
    config = sized("1-nodes", "Qwen3-4B", **shared | turns)
    (apart,) = plan(config, spec_at(config.model))
    config.colocate = True
    (together,) = plan(config, spec_at(config.model))
    peaks = [footprint.peak for footprint in together.footprints]
    # While one role works, the other one keeps only its CUDA context on the GPU.
    assert together.bytes == max(peaks) + CONTEXT_BYTES < apart.bytes == sum(peaks)


def test_host_memory_of_nodes_is_estimated() -> None:
    config = sized("4-nodes", "Qwen3-8B")
    needed = {item.name: host_mib(config, item) / 1024 for item in components(config)}
    assert needed["hub"] == 0.0
    # Eight processes and their standbys, slabs, buffers for a checkpoint of two data ranks, and
    # the states of a quarter of the model, which each of eight ranks gathers for a checkpoint.
    count = COUNTS["Qwen3-8B"] / GIB
    expected = 8 * (2 + 1) + 2 * 2 * count + 14 * count + 8 * (24 + 12 / 2) * count / 4
    assert needed["actor"] == pytest.approx(expected, rel=0.01)
    assert needed["rollout"] > 15.2
