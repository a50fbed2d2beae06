"""`relax-hpc check`: settings that do not go together, each a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.fields import FIELDS, FieldSpec
from relax_hpc.config import load
from relax_hpc.config.roles import ROLES, Role
from relax_hpc.config.schema import GroupConfig
from relax_hpc.ops.checks.settings import check
from relax_hpc.tasks import Task
from tests.helpers.run_helpers import QUICKSTART
from tests.ops.check_helpers import EXPERTS, SEEING_EXPERTS, same_fields  # noqa: F401


def test_quickstart_is_good(tmp_path: Path) -> None:
    assert check(load([QUICKSTART], {"run_dir": str(tmp_path / "run")})) == []


class Unrewarded(Task):
    """Has rows, and no reward."""

    def rows(self, split: str, data: object) -> Iterator[dict[str, Any]]:
        yield {"id": split, "prompt": "1?", "answer": "1"}


COUNTING = {"environment.kind": "tests.helpers.turn_episodes:Counting"}
PLAYED_BY_THE_TASK = {"data.task": "tests.tasks.test_tasks:TwoTurns", "warm_start.steps": 0}
FINDINGS = [
    (
        {"model.routing_replay": "record"},
        ["model.routing_replay: found record with a qwen3 model, allowed: off"],
    ),
    (
        {"model.frozen_towers": ["audio"]},
        ["model.frozen_towers: found audio, allowed: none; a qwen3 model takes no"],
    ),
    (
        EXPERTS | {"rollout.engine.flags.enable_return_routed_experts": False},
        [
            "rollout.engine.flags.enable_return_routed_experts: found false with "
            "model.routing_replay on"
        ],
    ),
    (
        EXPERTS | {"actor.megatron": {"moe_router_fusion": True}},
        [
            "actor.megatron.moe_router_fusion: found true with model.routing_replay on, allowed: "
            "false"
        ],
    ),
    (
        {"actor.megatron": {"moe_enable_routing_replay": True}},
        [
            "actor.megatron.moe_enable_routing_replay: found True, not allowed: set "
            "model.routing_replay instead"
        ],
    ),
    (
        {"rollout.engine.flags.dtype": "float16"},
        ["rollout.engine.flags.dtype: found", "set rollout.engine.dtype"],
    ),
    ({"model.path": "/nowhere"}, ["model.path: found '/nowhere', which is not a directory"]),
    (
        {"data.task": ""},
        [
            "data.train: found nothing",
            "model.path: found nothing",
            "warm_start.steps: found 80 without",
        ],
    ),
    (
        {"data.train": "/nowhere.jsonl"},
        [
            "data.train: found '/nowhere.jsonl' with data.task",
            "data.train: found '/nowhere.jsonl', which is not",
        ],
    ),
    (
        {"data.eval.x": "/nowhere.jsonl"},
        ["data.eval.x: found '/nowhere.jsonl', which is not a file"],
    ),
    (
        {"actor.parallel.tensor": 4},
        ["actor.parallel.tensor: found 4, allowed: a divisor of the model's num_attention"],
    ),
    (
        {"model.tiny.num_experts": 4},
        ["model.tiny: found tie_word_embeddings true in a qwen3_moe, with engine sglang"],
    ),
    ({"model.tiny.num_experts": 4, "model.tiny.tie_word_embeddings": False}, []),
    (
        {**SEEING_EXPERTS, "model.tiny.moe_intermediate_size": 32},
        ["moe_intermediate_size is 32, supported is neither"],
    ),
    (SEEING_EXPERTS, []),
    (
        {"model.tiny.num_attention_heads": 3, "model.tiny.num_key_value_heads": 2},
        ["model.tiny.num_attention_heads: found"],
    ),
    (
        {"actor_fwd.parallel.pipeline": 3},
        ["actor_fwd.parallel.pipeline: found 3", "num_hidden_layers, 2"],
    ),
    (
        {"groups.reference": {}, "reference.parallel.sequence_parallel": True},
        ["reference.parallel.sequence_parallel: found true with"],
    ),
    (
        {"actor.megatron": {"hidden_size": 8, "recompute_method": "block"}},
        [
            "actor.megatron.hidden_size: found 8, not allowed: config.json",
            "actor.megatron.recompute_method: found a v",
        ],
    ),
    (
        {"actor.megatron": {"bucket_sise": 1, "persist_layer_norm": 1, "bucket_size": None}},
        [
            "bucket_sise: neither TransformerConfig nor Dist",
            "actor.megatron.persist_layer_norm: found 1, allowed: bool",
        ],
    ),
    (
        {
            "actor.megatron": {
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "cuda_graph_impl": "local",
            }
        },
        [
            "overlap_grad_reduce: found True, not allowed: set actor.optimizer.overlap_gradients "
            "instead",
            "overlap_param_gather: found True, not allowed: a version is published right after its "
            "step",
            "cuda_graph_impl: found 'local', not allowed: packs differ in length",
        ],
    ),
    (
        {"actor.kernels": "fused", "actor.megatron": {"apply_rope_fusion": True}},
        [
            "actor.kernels: found fused with model.device cpu",
            "apply_rope_fusion: found True, not allowed: set actor.k",
        ],
    ),
    ({"algorithm.mini_batches": 5}, ["algorithm.mini_batches: found 5", "prompts_per_step, 32"]),
    (
        {"algorithm.mini_batches": 16, "actor.parallel.data": 17},
        ["actor.parallel.data: found 17, allowed: at most 16"],
    ),
    (
        {"service.autoscaler.enabled": True},
        ["service.max_engines: found 0, allowed with service.autoscaler: at least 1"],
    ),
    (
        {"service.min_engines": 3, "service.max_engines": 2},
        ["service.max_engines: found 2, allowed: at least service.min_engines, 3"],
    ),
    (
        {"weights.publish_every": 2, "weights.file_every": 2},
        ["weights.publish_every: found 2, allowed: at most max_staleness + 1, 1"],
    ),
    (
        {
            "max_staleness": 3,
            "weights.publish_every": 3,
            "weights.publish_lag": 1,
            "weights.keep_every": 10,
        },
        [
            "weights.publish_lag: found 1, allowed: at least weights.publish_every - 1, 2",
            "weights.keep_every: found 10",
        ],
    ),
    (
        {"max_staleness": 4, "queue.max_rows": 1000},
        ["queue.max_rows: found 1000, but max_staleness 4 lets rollout be 1280 rows ahead"],
    ),
    (
        {"rollout.filter": "rewards_differs"},
        ["rollout.filter: found 'rewards_differs', allowed rewards_differ"],
    ),
    (
        {
            "rollout.partial_rollout": "recompute",
            "rollout.engine.flags": {"disable_radix_cache": False},
        },
        [
            "rollout.partial_rollout: found recompute with "
            "rollout.engine.flags.disable_radix_cache false"
        ],
    ),
    ({"environment.kind": "tool"}, ["environment.kind: found 'tool', allowed tools"]),
    (
        {
            "environment.kind": "tests.helpers.turn_episodes:Counting",
            "environment.turn_tokens": 999,
        },
        ["environment.turn_tokens: found 999, allowed: at most rollout.max_new_tokens"],
    ),
    (
        {
            "environment.kind": "tests.helpers.turn_episodes:Counting",
            "data.task": "tests.tasks.test_tasks:TwoTurns",
            "warm_start.steps": 0,
        },
        [
            "environment.kind: found 'tests.helpers.turn_episodes:Counting' with task "
            "'tests.tasks.test_tasks:TwoTurns'"
        ],
    ),
    ({"weights.slabs": 1}, ["weights.slabs: found 1, allowed: 0, or at least 2"]),
    ({"groups.rollout": None}, ["groups: found role rollout in no group"]),
    (
        {"groups.actor_fwd": None, "algorithm.mini_batches": 2},
        [
            "algorithm.passes: found 2 without role actor_fwd",
            "algorithm.mini_batches: found 2 without role actor_fwd",
        ],
    ),
    (
        {
            "actor.forward": ["reference", "actor_fwd"],
            "groups.reference": {},
            "groups.actor_fwd": {},
        },
        [
            "actor.forward: found actor_fwd, which is also in a group",
            "actor.forward: found reference, which is also in a",
        ],
    ),
    (
        {"actor.forward": ["reference"], "algorithm.kl.refresh_every": 5},
        ["algorithm.kl.refresh_every: found 5 with reference in actor.forward"],
    ),
    ({"groups.hub": None}, ["but no hub", "role advantages in no group"]),
    ({"groups.hub.roles": ["advantages", "actor"]}, ["role actor 2 times (in hub, actor)"]),
    ({"groups.idle": {}}, ["groups.idle.roles: found none"]),
    (
        {
            "groups.actor.resources.gpus_per_node": 8,
            "groups.rollout.env": {"CUDA_VISIBLE_DEVICES": "0,1"},
        },
        [
            "groups.actor.resources.gpus_per_node: found 8 with model.device cpu, which uses no "
            "GPU; set model.device",
            "groups.rollout.env.CUDA_VISIBLE_DEVICES: found '0,1' with model.device cpu",
        ],
    ),
    (
        {
            "groups.actor.resources.options": {"gres": "gpu:a100:4"},
            "site.options": {"gres": "gres/gpu:2,tmp:1"},
        },
        [
            "groups.actor.resources.options.gres: found 'gpu:a100:4' with model.device cpu",
            "site.options.gres: found 'gres/gpu:2,tmp:1' with model.device cpu",
        ],
    ),
    ({"site.options": {"gres": "tmp:1"}}, []),
    (
        {
            "groups.rollout.env": {"CUDA_VISIBLE_DEVICES": ""},
            "groups.actor.env": {"CUDA_VISIBLE_DEVICES": "-1"},
        },
        [],
    ),
    (
        {"groups.reference": None, "algorithm.kl.coefficient": 0.1},
        ["algorithm.kl.coefficient: found 0.1, but role ref"],
    ),
    (
        {"algorithm": {"name": "ppo", "critic_warmup_steps": 300}},
        [
            "algorithm.critic_warmup_steps: found 300, allowed: less than steps, 300; the policy "
            "would never be trained"
        ],
    ),
    ({"algorithm": {"name": "ppo", "critic_warmup_steps": 299}}, []),
    (
        {"algorithm.overlong.max_tokens": 7},
        [
            "algorithm.overlong.max_tokens: found 7, allowed: at most rollout.max_new_tokens, 6; "
            "no episode is longer"
        ],
    ),
    ({"algorithm.overlong.max_tokens": 7, **COUNTING}, []),
    ({"algorithm.overlong.max_tokens": 7, **PLAYED_BY_THE_TASK}, []),
    (
        {"algorithm.overlong.max_tokens": 7, **COUNTING, "environment.sampled_tokens": 6},
        ["algorithm.overlong.max_tokens: found 7, allowed: at most environment.sampled_tokens, 6"],
    ),
    (
        {"algorithm.overlong.max_tokens": 9, **COUNTING, "environment.episode_tokens": 8},
        ["algorithm.overlong.max_tokens: found 9, allowed: at most environment.episode_tokens, 8"],
    ),
    *(
        ({"samples_per_prompt": 1, "algorithm": {"name": name}}, [])
        for name in ("ppo", "reinforce_pp")
    ),
    *(
        (
            {"samples_per_prompt": 1, "algorithm": {"name": name}},
            [
                f"samples_per_prompt: found 1, allowed with {name}: at least 2; the rewards of a "
                "prompt's episodes are c"
            ],
        )
        for name in (
            "grpo",
            "dr_grpo",
            "rloo",
            "gspo",
            "cispo",
            "sapo",
            "m2po",
            "dual_clip",
            "reinforce_pp_baseline",
        )
    ),
    (
        {"samples_per_prompt": 1, "algorithm": {"name": "reinforce_pp", "baseline": "prompt"}},
        ["samples_per_prompt: found 1, allowed with reinforce_pp: at least 2"],
    ),
    (
        {"samples_per_prompt": 1, "algorithm": {"name": "ppo"}, "rollout.filter": "rewards_differ"},
        [
            "rollout.filter: found rewards_differ with samples_per_prompt 1, which drops "
            "every prompt"
        ],
    ),
    (
        {"rollout.max_new_tokens": 300},
        ["rollout.max_new_tokens: found 300", "which is 332 with", "of the model, 256"],
    ),
    (
        {"rollout.top_p": 0.9},
        [
            "rollout.top_k: found 0 with top_p 0.9 and min_p 0, allowed: 2 to 4096",
            "SGLang does not report",
        ],
    ),
    (
        {"rollout.top_p": 0.9, "rollout.top_k": 50, "algorithm.correction.kind": "off"},
        ["rollout.top_k: found 50 with algorithm.correction.kind off, allowed: truncate or mask"],
    ),
    (
        {"rollout.top_k": 50, "algorithm.correction.level": "sequence"},
        ["rollout.top_k: found 50 with algorithm.correction.level sequence, allowed: token"],
    ),
    (
        {
            "rollout.min_p": 0.1,
            "rollout.top_k": 8,
            "rollout.engine.flags": {"speculative_algorithm": "EAGLE"},
        },
        ["rollout.engine.flags.speculative_algorithm: found it together with rollout.top_k"],
    ),
    (
        {"rollout.engine.flags": {"quantization": "fp8"}},
        [
            "rollout.engine.flags.quantization: found 'fp8', allowed: none; SGLang cannot load updated"
        ],
    ),
    ({"rollout.engine.flags": {"quantization": "fp8", "load_format": "flash_rl"}}, []),
    (
        {"rollout.top_p": 0.9, "rollout.engine.kind": "simulated"},
        ["rollout.top_p: found 0.9 with engine simulated, which samples tokens uniformly"],
    ),
    (
        {"rollout.top_p": 0.9, "rollout.top_k": 50, "algorithm": {"name": "m2po"}},
        [
            "rollout.top_k: found 50 with algorithm m2po, allowed: 0; its ratio uses the engine's "
            "log-probabilities"
        ],
    ),
    (
        {
            "rollout.min_p": 0.1,
            "rollout.top_k": 50,
            "algorithm.kl": {"coefficient": 0.1, "importance": True},
        },
        [
            "rollout.top_k: found 50 with algorithm.kl.importance, allowed: 0, or kl.importance "
            "false"
        ],
    ),
    ({"rollout.top_k": 50, "algorithm.kl": {"importance": True}}, []),
    (
        {"rollout.engine.flags.preferred_sampling_params": {"top_k": 5, "repetition_penalty": 1.3}},
        [
            "rollout.engine.flags.preferred_sampling_params: found {'top_k': 5",
            "set rollout.temperature, top_p",
        ],
    ),
    (
        {"rollout.engine.flags.preferred-sampling-params": '{"min_p": 0.1}'},
        [
            "rollout.engine.flags.preferred-sampling-params: found '{\"min_p\": 0.1}', allowed: "
            "None",
            "underscores (preferred_sampling_params)",
        ],
    ),
    (
        {
            "rollout.engine.flags.speculative_accept_threshold_single": 0.9,
            "rollout.engine.flags.speculative_accept_threshold_acc": 0.5,
            "rollout.engine.flags.enable_strict_thinking": True,
            "rollout.engine.flags.enable_custom_logit_processor": True,
            "rollout.engine.flags.allow_auto_truncate": True,
        },
        [
            "speculative_accept_threshold_single: found 0.9, allowed: 1.0; tokens would be drawn "
            "otherwise",
            "speculative_accept_threshold_acc: found 0.5, allowed: 1.0",
            "enable_strict_thinking: found True, allowed: False",
            "enable_custom_logit_processor: found True, allowed: False",
            "allow_auto_truncate: found True, allowed: False; tokens would be drawn otherwise",
        ],
    ),
    (
        {
            "rollout.engine.flags.speculative_accept_threshold_acc": 1.0,
            "rollout.engine.flags.allow_auto_truncate": False,
            "rollout.engine.flags.preferred_sampling_params": None,
        },
        [],
    ),
    ({"rollout.top_k": 1}, ["rollout.top_k: found 1, which always samples the most probable"]),
    ({"eval.responses": 4}, ["eval.responses: found 4 with eval.temperature 0, allowed: 1"]),
    ({"eval.pass_at": [1, 2]}, ["allowed: 1 to eval.responses, 1; set eval.responses to 2"]),
    (
        {"eval.max_new_tokens": 300},
        ["eval.max_new_tokens: found 300", "which is 332 with", "of the model, 256"],
    ),
    ({"rollout.temperature": 0}, ["rollout.temperature: found 0.0"]),
    ({"rollout.reward": "answer_exct"}, ["rollout.reward: found 'answer_exct'", "did you mean"]),
    (
        {"environment.kind": "zoom", "environment.options": {"zoom": 2}},
        ["environment.options: ZoomIn", "argument 'zoom'"],
    ),
    ({"environment.max_turns": 3}, ["environment: found settings, but neither environment.kind"]),
    (
        {
            "rollout.reward": "",
            "data.task": "tests.ops.test_config_check:Unrewarded",
            "warm_start.steps": 0,
        },
        [
            "rollout.reward: found nothing with data.task 'tests.ops.test_config_check:Unrewarded', "
            "which has no reward, a"
        ],
    ),
    (
        {
            "rollout.reward": "",
            "data.task": "tests.tasks.test_tasks:TwoTurns",
            "warm_start.steps": 0,
        },
        [],
    ),
    ({"rollout.reward": "", "data.task": "tests.helpers.cut_episodes:CutSortDigits"}, []),
    ({"rollout.reward": ""}, []),
    ({"eval.reward": "no.such:reward"}, ["eval.reward: 'no.such:reward': importing"]),
    (
        {"rollout.processes": 2, "rollout.replicas": 3},
        ["rollout.processes: found 2, allowed: a divisor of rollout.replicas, 3"],
    ),
    (
        {"rollout.replicas": 2, "rollout.without": ["rollout/2"]},
        ["found 'rollout/2', allowed: rollout/0 to 1"],
    ),
    (
        {"rollout.without": ["rollout-2/0"]},
        ["which are all engines of process 0 of rollout-2, allowed: all but one"],
    ),
    (
        {"rollout.without": ["actor/0"]},
        ["rollout.without: found 'actor/0', allowed: rollout/0 to 0"],
    ),
    (
        {"rollout.engine.port": 65535, "rollout.replicas": 2},
        ["rollout.engine.port: found 65535", "at most 65534"],
    ),
    (
        {"rollout.engine.flags.model_path": "x"},
        ["rollout.engine.flags.model_path: found 'x'", "set model.path instead"],
    ),
    (
        {"rollout.engine.flags.api-key": "x"},
        ["rollout.engine.flags.api-key", "it cannot be changed"],
    ),
    (
        {"rollout.engine.flags.host": "0.0.0.0"},
        ["rollout.engine.flags.host", "it cannot be changed"],
    ),
    ({"rollout.engine.flags.max-total-tokens": 5}, ["underscores (max_total_tokens)"]),
    (
        {"rollout.engine.simulated.sigma": 1.0},
        ["rollout.engine.simulated: found settings, but kind is sglang"],
    ),
    (
        {"liveness.lease_s": 1, "liveness.beat_s": 0.5},
        ["liveness.lease_s: found 1.0", "more than two beats"],
    ),
    (
        {"liveness.collective_timeout_s": 120.0, "liveness.hang_s": 60.0},
        ["liveness.collective_timeout_s: found 120", "less than liveness.hang_s (60)"],
    ),
    ({"name": "a/b"}, ["name: found 'a/b'"]),
    ({"run_dir": f"{__file__}/run"}, ["run_dir: found", "is a file; name a directory"]),
]


@pytest.mark.parametrize(
    ("overrides", "texts"), FINDINGS, ids=[" ".join(map(str, item[0])) for item in FINDINGS]
)
def test_findings(tmp_path: Path, overrides: dict[str, Any], texts: list[str]) -> None:
    findings = check(load([QUICKSTART], {"run_dir": str(tmp_path / "run")} | overrides))
    for text in texts:
        assert any(text in finding for finding in findings), findings
    for finding in findings:
        assert any(text in finding for text in texts) and "\n" not in finding
        assert "Config(" not in finding, "settings, not sections as Python shows them"


@pytest.mark.parametrize(
    "overrides",
    [
        {"groups.reference": {}},
        {"algorithm.kl.coefficient": 0.1},
        {"groups.actor_fwd": None, "algorithm.passes": 1},
        {"actor.forward": ["actor_fwd"]},
        {"actor.forward": ["reference"], "algorithm.kl.coefficient": 0.1},
    ],
    ids=str,
)
def test_runs_with_and_without_forward_groups_that_are_good(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    assert check(load([QUICKSTART], {"run_dir": str(tmp_path / "run")} | overrides)) == []


def test_engines_that_take_turns_with_the_actor_all_serve(tmp_path: Path) -> None:
    over = {
        "run_dir": str(tmp_path / "run"),
        "colocate": True,
        "rollout.replicas": 2,
        "rollout.without": ["rollout/1"],
    }
    findings = check(load([QUICKSTART], over))
    assert any(
        finding.startswith("rollout.without: found rollout/1 with colocate, allowed: none")
        for finding in findings
    )


def test_a_role_that_claims_rows_gives_a_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue has a task only for a role with a field. A role without `needs` claims nothing."""
    config = load([QUICKSTART], {"run_dir": str(tmp_path / "run")})
    config.groups["watch"] = GroupConfig(roles=["watch"])
    monkeypatch.setitem(ROLES, "watch", Role("watch"))
    assert check(config) == []
    monkeypatch.setitem(ROLES, "watch", Role("watch", needs=("reward",)))
    assert [finding for finding in check(config) if "found watch, which needs reward" in finding]
    spec = FieldSpec("watched", "row", "int8", "1: seen", by="watch")
    monkeypatch.setitem(FIELDS, "watched", replace(spec, optional=True))
    assert len(check(config)) == 1
    monkeypatch.setitem(FIELDS, "watched", spec)
    assert check(config) == []


def test_who_trains_gives_no_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load([QUICKSTART], {"run_dir": str(tmp_path / "run")})
    monkeypatch.setitem(
        FIELDS, "values", FieldSpec("values", "token", "float32", "expected reward", by="actor")
    )
    assert any(
        "found role actor, which trains and produces values, allowed: one of both" in finding
        for finding in check(config)
    )
