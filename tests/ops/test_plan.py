"""`relax-hpc plan`: what a run takes of memory, what would make it fit, and the sizes that come
with the toolkit."""

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
from relax_hpc.ops.plan.footprint import GIB
from relax_hpc.ops.plan.model_memory import parameters
from relax_hpc.ops.plan.plan import USABLE, plan
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
"""Parameters, as the published models have them."""


def sized(cluster: str, model: str, **overrides: Any) -> Config:
    values = {
        "model.path": str(MODELS / model),
        "data.max_prompt_tokens": 2048,
        "rollout.max_new_tokens": 6144,
    }
    return load([CLUSTERS[cluster]], values | overrides)


def test_models_have_as_many_parameters_as_the_published_ones() -> None:
    assert {path.name for path in MODELS.iterdir()} == {*COUNTS}
    for name, count in COUNTS.items():
        spec = spec_at(ModelConfig(path=str(MODELS / name)))
        assert parameters(spec, ParallelConfig(), 0) == count
        stages = [
            parameters(spec, ParallelConfig(tensor=2, pipeline=2), stage) for stage in range(2)
        ]
        # Norms and towers are on every rank, and a tied embedding on both stages.
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
    found = CLAIM.search(CLUSTERS[cluster].read_text())
    assert found, "say up to which model it is meant for"
    config = sized(cluster, found[1])
    assert config.data.max_prompt_tokens + config.rollout.max_new_tokens == int(
        found[2].replace(",", "")
    )
    assert not [lack for place in plan(config, spec_at(config.model)) for lack in place.lacks]
    assert config.model.dtype == "bfloat16" and "reference" not in {*config.groups} | {
        *config.actor.forward
    }
    parallel = config.actor.parallel
    # Experts that no two ranks have leave them hardly any states to share.
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
def test_models_that_see_take_what_their_decoders_do_and_their_towers(
    model: str, decoder: str, cluster: str
) -> None:
    found = []
    for name in (model, decoder):
        config = sized(cluster, name)
        places = plan(config, spec_at(config.model))
        assert [place.lacks for place in places] == [[]] * len(places)
        found.append(
            next(one for place in places for one in place.footprints if one.role == "actor")
        )
    seeing, plain = found
    towers = spec_at(ModelConfig(path=str(MODELS / model))).towers
    more = seeing.resident["weights"] - plain.resident["weights"]
    # Qwen3-Omni knows 128 words more.
    assert more == pytest.approx(2 * sum(map(tower_memory.parameters, towers)), rel=1e-3)
    assert seeing.phases["backward"]["towers' activations"] > 0
    assert not plain.phases["backward"].get("towers' activations")


@pytest.mark.parametrize(
    ("group", "policy", "more"),
    [
        ("critic", "Qwen3-8B", {}),
        ("teacher", "Qwen3-8B", {"model.teacher_path": str(MODELS / "Qwen3-32B")}),
        ("genrm", "Qwen3-8B", {"genrm.path": str(MODELS / "Qwen3-32B")}),
    ],
)
def test_a_file_that_adds_a_group_gives_it_a_node_in_which_it_fits(
    group: str, policy: str, more: dict
) -> None:
    """Beside the others, of which it changes nothing; also as jobs of their own."""
    base = sized("8-nodes", policy)
    given = {
        "model.path": base.model.path,
        "data.max_prompt_tokens": 2048,
        "rollout.max_new_tokens": 6144,
        **more,
    }
    config = load([CLUSTERS["8-nodes"], ROOT / f"configs/groups/{group}.yaml"], given)
    assert set(config.groups) - set(base.groups) == {group}
    places = plan(config, spec_at(config.model))
    (own,) = [place for place in places if place.groups == (group,)]
    assert [place.lacks for place in places] == [[]] * len(places) and own.footprints[0].gpus == 8
    assert own.footprints[0].resident["weights"] > (3 if group == "critic" else 15) * 2**30
    for layout in ("het", "jobs"):
        config.layout = layout
        more_gpus = sum(part.nodes * part.gpus_per_node for part in components(config))
        base.layout = layout
        assert more_gpus - sum(part.nodes * part.gpus_per_node for part in components(base)) == 8


def test_what_is_said_to_make_it_fit_does() -> None:
    """Each setting, and no other: without any of them it would not."""
    base = {
        "model.dtype": "float32",
        "actor.optimizer.distributed": False,
        "actor.recompute": "none",
    }
    config = sized("4-nodes", "Qwen3-14B", **base)
    (place,) = (place for place in plan(config, spec_at(config.model)) if "actor" in place.groups)
    assert place.lacks and place.remedies
    changes = parse_yaml("\n".join(place.remedies), "remedies")
    for left_out in (None, *changes):
        some = {key: value for key, value in changes.items() if key != left_out}
        tried = plan(sized("4-nodes", "Qwen3-14B", **base | some), spec_at(config.model))
        assert all(one.lacks == [] for one in tried if "actor" in one.groups) == (
            left_out is None
        ), left_out


@pytest.mark.parametrize(
    ("cluster", "model", "place", "mend"),
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
def test_experts_that_do_not_fit_are_dealt_out_or_refused(
    cluster: str, model: str, place: str, mend: list[str]
) -> None:
    scorer = {
        "groups.reference.resources": {"nodes": 1, "gpus_per_node": 8},
        "reference.parallel.data": 8,
    }

    def lacking(**overrides: Any) -> dict[str, list[str]]:
        config = sized(cluster, model, **(scorer if place == "reference" else {}), **overrides)
        places = plan(config, spec_at(config.model))
        return {name: list(one.remedies) for one in places if one.lacks for name in one.groups}

    found = lacking()
    assert found.get(place) == (mend if place else None)
    if mend:
        assert place not in lacking(**parse_yaml("\n".join(mend), "remedies"))


def test_grouped_experts_exist_twice_and_are_given_up_if_that_is_enough() -> None:
    model = "Qwen3-30B-A3B"
    single, auto = (
        sized("2-nodes-moe", model, **{"actor.experts": experts, "actor.recompute": "none"})
        for experts in ("sequential", "auto")
    )
    spec = spec_at(auto.model)
    peaks = []
    for config in (single, auto):
        (actor,) = (
            one for place in plan(config, spec) for one in place.footprints if one.role == "actor"
        )
        peaks.append(dict(actor.phases["backward"]))
    more = peaks[1].pop("experts in one piece")
    # 8 ranks share 29 G parameters of 2 bytes.
    assert peaks[0] == peaks[1] and 6.5 * GIB < more < 7 * GIB
    sizes = [
        max(place.bytes for place in plan(config, spec) if "actor" in place.groups)
        for config in (single, auto)
    ]
    auto.site.gpu_memory_gib = (sizes[0] + sizes[1]) / 2 / GIB / USABLE
    (place,) = (one for one in plan(auto, spec) if "actor" in one.groups)
    assert place.lacks and list(place.remedies) == ["actor.experts: sequential"]


def test_bytes_of_a_parameter_and_of_shared_states() -> None:
    def of_actor(**overrides: Any) -> dict[str, float]:
        config = sized("4-nodes", "Qwen3-8B", **{"actor.kernels": "plain"} | overrides)
        found = [one for place in plan(config, spec_at(config.model)) for one in place.footprints]
        actor = next(one for one in found if one.role == "actor")
        count = parameters(spec_at(config.model), config.actor.parallel, 0)
        sizes = {
            name: size / count
            for name, size in (Counter(actor.resident) + Counter(actor.pinned)).items()
        }
        return sizes | {"peak": actor.peak, "logits": actor.phases["output layer"]["logits"]}

    whole, shared = of_actor(**{"actor.optimizer.distributed": False}), of_actor()
    assert [whole[name] for name in ("weights", "gradients", "optimizer states")] == [2, 4, 12]
    assert [shared[name] for name in ("weights", "gradients", "optimizer states")] == [2, 4, 6]
    offloaded = of_actor(**{"actor.optimizer.offload": True})
    assert offloaded["optimizer states"] == 12 / 2 * 8
    # Two slabs, of which two data-parallel ranks have a half each, on a node with eight ranks.
    assert shared["slabs"] == 2 * 2 / 2 * 8
    assert of_actor(max_staleness=2)["slabs"] == 4 * 2 / 2 * 8
    # A row is never divided; of its logits an eighth is there at a time.
    assert shared["logits"] == 8 * 8192 * 151_936 / 4 / 8
    assert of_actor(**{"rollout.max_new_tokens": 30_720})["logits"] == 4 * shared["logits"]


def test_the_command_prints_it_and_says_what_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["plan", f"--config={CLUSTERS['1-nodes-of-4']}", f"--model.path={MODELS}/Qwen3-14B"]
    assert main(line) == 78
    told = capsys.readouterr().out
    assert "DOES NOT FIT (actor: " in told and "not measured" in told
    found = re.search(
        r"it would fit with (--actor.optimizer.offload=true --actor.parallel.tensor=2 .*)", told
    )
    assert main([*line, *found[1].split(), "--groups.actor.resources.gpus_per_node=2"]) == 0, (
        "as it says"
    )
    assert "fits" in capsys.readouterr().out
    assert "qwen3, 14.77 G parameters, bfloat16, fused kernels\n" in told
    assert main([*line, "--json", "--site.gpu_memory_gib=400", "--actor.kernels=plain"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"]["kernels"], found["model"]["experts"]) == ("plain", "sequential")
    assert [place["fits"] for place in found["places"]] == [True] * 2
    assert {role["role"] for place in found["places"] for role in place["roles"]} == {
        "rollout",
        "actor",
    }


def test_what_cannot_be_reckoned_is_said(capsys: pytest.CaptureFixture[str]) -> None:
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
    # Others say what is wrong with these.
    flags = {
        "rollout.engine.flags": {
            "tp_size": 0,
            "mem_fraction_static": "much",
            "max_total_tokens": None,
        }
    }
    assert not list(check_memory(sized("1-nodes", "Qwen3-4B", **flags)))


def test_what_cannot_fit_is_refused_before_it_is_submitted() -> None:
    (found,) = check_memory(sized("1-nodes", "Qwen3-8B", **{"actor.kernels": "plain"}))
    assert (
        found.startswith("groups.actor: found actor: ")
        and "it fits with actor.optimizer.offload: true;" in found
    )
    assert not list(check_memory(sized("1-nodes", "Qwen3-8B")))
    assert not list(check_memory(sized("1-nodes", "Qwen3-14B", **{"site.gpu_memory_gib": 0})))
    (found,) = check_memory(
        sized("1-nodes", "Qwen3-4B", **{"rollout.engine.flags.mem_fraction_static": 0.1})
    )
    assert (
        "groups.rollout: found rollout: keys and values of one row of 8,192 tokens need 1.1 "
        "GiB, and" in found
    )
    assert "it fits with rollout.engine.flags.mem_fraction_static: 0.85" in found


@pytest.mark.parametrize(
    ("flags", "said"),
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
def test_engines_that_cannot_be_placed_are_refused(flags: dict[str, int], said: str) -> None:
    (found,) = check_memory(sized("1-nodes", "Qwen3-4B", **{"rollout.engine.flags": flags}))
    assert said in found


def test_stored_peaks_are_told(tmp_path: Path) -> None:
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
    """Weights, float32 gradients, and of a step what is on its way; 12 bytes a parameter are in
    host memory."""
    rows = {"data.max_prompt_tokens": 2048, "rollout.max_new_tokens": 14_336, "rollout.replicas": 2}
    settings = {
        "actor.max_tokens_per_micro_batch": 16_384,
        "actor.kernels": kernels,
        "actor.optimizer.offload": True,
    }
    config = sized("1-nodes-of-4", "Qwen3-8B", **rows, **settings)
    [place] = [one for one in plan(config, spec_at(config.model)) if one.groups == ("actor",)]
    assert place.footprints[0].gpus == 1 and not place.lacks
    [actor] = place.footprints
    count = COUNTS["Qwen3-8B"]
    assert actor.resident["weights"] + actor.resident["gradients"] == 6 * count
    assert (
        actor.resident["optimizer states"] == 0 and actor.pinned["optimizer states"] == 12 * count
    )
    assert (
        place.bytes
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
    peaks = [one.peak for one in together.footprints]
    # Each leaves its context alone where the other is at work.
    assert together.bytes == max(peaks) + CONTEXT_BYTES < apart.bytes == sum(peaks)


def test_memory_of_nodes_is_reckoned_too() -> None:
    config = sized("4-nodes", "Qwen3-8B")
    needed = {part.name: host_mib(config, part) / 1024 for part in components(config)}
    assert needed["hub"] == 0.0
    # Eight processes and those that wait to take their places, slabs, room for a checkpoint of two
    # data ranks, and the states of a fourth of the model that each of eight ranks gathers for one.
    count = COUNTS["Qwen3-8B"] / GIB
    expected = 8 * (2 + 1) + 2 * 2 * count + 14 * count + 8 * (24 + 12 / 2) * count / 4
    assert needed["actor"] == pytest.approx(expected, rel=0.01)
    assert needed["rollout"] > 15.2
