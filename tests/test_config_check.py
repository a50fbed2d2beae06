"""`relax-hpc check`: settings that do not go together, prompts and models that cannot be used, each a line."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from relax_hpc.checks import files
from relax_hpc.checks.settings import check, check_request
from relax_hpc.config import load
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.convert.hf_tensors import HfTensors
from relax_hpc.data import row_files
from relax_hpc.engines.sglang import flags
from relax_hpc.engines.sglang.arguments import server_arguments
from relax_hpc.engines.sglang.flags import check_flags
from relax_hpc.errors import ConfigError
from relax_hpc.fields import FIELDS, FieldSpec
from relax_hpc.models.families import spec_of
from relax_hpc.models.hf_files import SafetensorFiles
from relax_hpc.models.tiny_model import make_tiny_model
from relax_hpc.tasks import Task
from relax_hpc.weight_files import weight_files
from tests.model_files import model_directory
from tests.requirements import requires
from tests.run_helpers import QUICKSTART


def model_findings(path: Path, **overrides: Any) -> list[str]:
    return check(load([QUICKSTART], {"run_dir": str(path / "run"), "model.path": str(path)} | overrides))


def test_quickstart_is_good(tmp_path: Path) -> None:
    assert check(load([QUICKSTART], {"run_dir": str(tmp_path / "run")})) == []


@pytest.fixture(autouse=True)
def same_fields() -> Iterator[None]:
    """What a configuration declares is known to all of a process."""
    known = dict(FIELDS)
    yield
    FIELDS.clear()
    FIELDS.update(known)


class Unrewarded(Task):
    """Has rows, and no reward."""

    def rows(self, split: str, data: object) -> Iterator[dict[str, Any]]:
        yield {"id": split, "prompt": "1?", "answer": "1"}


EXPERTS = {"model.tiny.num_experts": 4, "model.tiny.tie_word_embeddings": False, "model.routing_replay": "on"}
SEEING_EXPERTS = EXPERTS | {"model.tiny.vision_layers": 2, "model.tiny.moe_intermediate_size": 48}
COUNTING = {"environment.kind": "tests.test_turns:Counting"}
PLAYED_BY_THE_TASK = {"data.task": "tests.test_tasks:TwoTurns", "warm_start.steps": 0}
FINDINGS = [
    ({"model.routing_replay": "record"}, ["model.routing_replay: found record with a qwen3 model, allowed: off"]),
    ({"model.frozen_towers": ["audio"]}, ["model.frozen_towers: found audio, allowed: none; a qwen3 model takes no"]),
    (
        EXPERTS | {"rollout.engine.flags.enable_return_routed_experts": False},
        ["rollout.engine.flags.enable_return_routed_experts: found false with model.routing_replay on"],
    ),
    (
        EXPERTS | {"actor.megatron": {"moe_router_fusion": True}},
        ["actor.megatron.moe_router_fusion: found true with model.routing_replay on, allowed: false"],
    ),
    (
        {"actor.megatron": {"moe_enable_routing_replay": True}},
        ["actor.megatron.moe_enable_routing_replay: found True, not allowed: set model.routing_replay instead"],
    ),
    ({"rollout.engine.flags.dtype": "float16"}, ["rollout.engine.flags.dtype: found", "set rollout.engine.dtype"]),
    ({"model.path": "/nowhere"}, ["model.path: found '/nowhere', which is not a directory"]),
    (
        {"data.task": ""},
        ["data.train: found nothing", "model.path: found nothing", "warm_start.steps: found 80 without"],
    ),
    (
        {"data.train": "/nowhere.jsonl"},
        ["data.train: found '/nowhere.jsonl' with data.task", "data.train: found '/nowhere.jsonl', which is not"],
    ),
    ({"data.eval.x": "/nowhere.jsonl"}, ["data.eval.x: found '/nowhere.jsonl', which is not a file"]),
    ({"actor.parallel.tensor": 4}, ["actor.parallel.tensor: found 4, allowed: a divisor of the model's num_attention"]),
    ({"model.tiny.num_experts": 4}, ["model.tiny: found tie_word_embeddings true in a qwen3_moe, with engine sglang"]),
    ({"model.tiny.num_experts": 4, "model.tiny.tie_word_embeddings": False}, []),
    ({**SEEING_EXPERTS, "model.tiny.moe_intermediate_size": 32}, ["moe_intermediate_size is 32, supported is neither"]),
    (SEEING_EXPERTS, []),
    (
        {"model.tiny.num_attention_heads": 3, "model.tiny.num_key_value_heads": 2},
        ["model.tiny.num_attention_heads: found"],
    ),
    ({"actor_fwd.parallel.pipeline": 3}, ["actor_fwd.parallel.pipeline: found 3", "num_hidden_layers, 2"]),
    (
        {"groups.reference": {}, "reference.parallel.sequence_parallel": True},
        ["reference.parallel.sequence_parallel: found true with"],
    ),
    (
        {"actor.megatron": {"hidden_size": 8, "recompute_method": "block"}},
        ["actor.megatron.hidden_size: found 8, not allowed: config.json", "actor.megatron.recompute_method: found a v"],
    ),
    (
        {"actor.megatron": {"bucket_sise": 1, "persist_layer_norm": 1, "bucket_size": None}},
        [
            "bucket_sise: neither TransformerConfig nor Dist",
            "actor.megatron.persist_layer_norm: found 1, allowed: bool",
        ],
    ),
    (
        {"actor.megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True, "cuda_graph_impl": "local"}},
        [
            "overlap_grad_reduce: found True, not allowed: set actor.optimizer.overlap_gradients instead",
            "overlap_param_gather: found True, not allowed: a version is published as soon as it is made",
            "cuda_graph_impl: found 'local', not allowed: packs differ in length",
        ],
    ),
    (
        {"actor.kernels": "fused", "actor.megatron": {"apply_rope_fusion": True}},
        ["actor.kernels: found fused with model.device cpu", "apply_rope_fusion: found True, not allowed: set actor.k"],
    ),
    ({"algorithm.mini_batches": 5}, ["algorithm.mini_batches: found 5", "prompts_per_step, 32"]),
    ({"algorithm.mini_batches": 16, "actor.parallel.data": 17}, ["actor.parallel.data: found 17, allowed: at most 16"]),
    (
        {"weights.publish_every": 2, "weights.file_every": 2},
        ["weights.publish_every: found 2, allowed: at most max_staleness + 1, 1"],
    ),
    (
        {"max_staleness": 3, "weights.publish_every": 3, "weights.publish_lag": 1, "weights.keep_every": 10},
        [
            "weights.publish_lag: found 1, allowed: at least weights.publish_every - 1, 2",
            "weights.keep_every: found 10",
        ],
    ),
    (
        {"max_staleness": 4, "queue.max_rows": 1000},
        ["queue.max_rows: found 1000, but max_staleness 4 lets rollout be 1280 rows ahead"],
    ),
    ({"rollout.filter": "rewards_differs"}, ["rollout.filter: found 'rewards_differs', allowed rewards_differ"]),
    (
        {"rollout.partial_rollout": "recompute", "rollout.engine.flags": {"disable_radix_cache": False}},
        ["rollout.partial_rollout: found recompute with rollout.engine.flags.disable_radix_cache false"],
    ),
    ({"environment.kind": "tool"}, ["environment.kind: found 'tool', allowed tools"]),
    (
        {"environment.kind": "tests.test_turns:Counting", "environment.turn_tokens": 999},
        ["environment.turn_tokens: found 999, allowed: at most rollout.max_new_tokens"],
    ),
    (
        {
            "environment.kind": "tests.test_turns:Counting",
            "data.task": "tests.test_tasks:TwoTurns",
            "warm_start.steps": 0,
        },
        ["environment.kind: found 'tests.test_turns:Counting' beside task 'tests.test_tasks:TwoTurns'"],
    ),
    ({"weights.slabs": 1}, ["weights.slabs: found 1, allowed: 0, or at least 2"]),
    ({"groups.rollout": None}, ["groups: found role rollout in no group"]),
    (
        {"groups.actor_fwd": None, "algorithm.mini_batches": 2},
        ["algorithm.passes: found 2 without role actor_fwd", "algorithm.mini_batches: found 2 without role actor_fwd"],
    ),
    (
        {"actor.forward": ["reference", "actor_fwd"], "groups.reference": {}, "groups.actor_fwd": {}},
        ["actor.forward: found actor_fwd, which is in a group too", "actor.forward: found reference, which is in a"],
    ),
    (
        {"actor.forward": ["reference"], "algorithm.kl.refresh_every": 5},
        ["algorithm.kl.refresh_every: found 5 with reference in actor.forward"],
    ),
    ({"groups.hub": None}, ["but no hub", "role advantages in no group"]),
    ({"groups.hub.roles": ["advantages", "actor"]}, ["role actor 2 times (in hub, actor)"]),
    ({"groups.idle": {}}, ["groups.idle.roles: found none"]),
    (
        {"groups.actor.resources.gpus_per_node": 8, "groups.rollout.env": {"CUDA_VISIBLE_DEVICES": "0,1"}},
        [
            "groups.actor.resources.gpus_per_node: found 8 with model.device cpu, which uses no GPU; set model.device",
            "groups.rollout.env.CUDA_VISIBLE_DEVICES: found '0,1' with model.device cpu",
        ],
    ),
    (
        {"groups.actor.resources.options": {"gres": "gpu:a100:4"}, "site.options": {"gres": "gres/gpu:2,tmp:1"}},
        [
            "groups.actor.resources.options.gres: found 'gpu:a100:4' with model.device cpu",
            "site.options.gres: found 'gres/gpu:2,tmp:1' with model.device cpu",
        ],
    ),
    ({"site.options": {"gres": "tmp:1"}}, []),
    ({"groups.rollout.env": {"CUDA_VISIBLE_DEVICES": ""}, "groups.actor.env": {"CUDA_VISIBLE_DEVICES": "-1"}}, []),
    (
        {"groups.reference": None, "algorithm.kl.coefficient": 0.1},
        ["algorithm.kl.coefficient: found 0.1, but role ref"],
    ),
    (
        {"algorithm": {"name": "ppo", "critic_warmup_steps": 300}},
        ["algorithm.critic_warmup_steps: found 300, allowed: less than steps, 300; the policy would never be trained"],
    ),
    ({"algorithm": {"name": "ppo", "critic_warmup_steps": 299}}, []),
    (
        {"algorithm.overlong.max_tokens": 7},
        ["algorithm.overlong.max_tokens: found 7, allowed: at most rollout.max_new_tokens, 6; no episode draws more"],
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
    *(({"samples_per_prompt": 1, "algorithm": {"name": name}}, []) for name in ("ppo", "reinforce_pp")),
    *(
        (
            {"samples_per_prompt": 1, "algorithm": {"name": name}},
            [f"samples_per_prompt: found 1, allowed with {name}: at least 2; the rewards of a prompt's episodes are c"],
        )
        for name in ("grpo", "dr_grpo", "rloo", "gspo", "cispo", "sapo", "m2po", "dual_clip", "reinforce_pp_baseline")
    ),
    (
        {"samples_per_prompt": 1, "algorithm": {"name": "reinforce_pp", "baseline": "prompt"}},
        ["samples_per_prompt: found 1, allowed with reinforce_pp: at least 2"],
    ),
    (
        {"samples_per_prompt": 1, "algorithm": {"name": "ppo"}, "rollout.filter": "rewards_differ"},
        ["rollout.filter: found rewards_differ with samples_per_prompt 1, of which it drops every prompt"],
    ),
    ({"rollout.max_new_tokens": 300}, ["rollout.max_new_tokens: found 300", "together 332", "of the model, 256"]),
    (
        {"rollout.top_p": 0.9},
        ["rollout.top_k: found 0 with top_p 0.9 and min_p 0, allowed: 2 to 4096", "SGLang does not tell"],
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
        {"rollout.min_p": 0.1, "rollout.top_k": 8, "rollout.engine.flags": {"speculative_algorithm": "EAGLE"}},
        ["rollout.engine.flags.speculative_algorithm: found it beside rollout.top_k"],
    ),
    (
        {"rollout.top_p": 0.9, "rollout.engine.kind": "simulated"},
        ["rollout.top_p: found 0.9 with engine simulated, which draws tokens evenly"],
    ),
    (
        {"rollout.top_p": 0.9, "rollout.top_k": 50, "algorithm": {"name": "m2po"}},
        ["rollout.top_k: found 50 with algorithm m2po, allowed: 0; its ratio is to the engine's log-probabilities"],
    ),
    (
        {
            "rollout.min_p": 0.1,
            "rollout.top_k": 50,
            "algorithm.kl": {"coefficient": 0.1, "importance": True},
        },
        ["rollout.top_k: found 50 with algorithm.kl.importance, allowed: 0, or kl.importance false"],
    ),
    ({"rollout.top_k": 50, "algorithm.kl": {"importance": True}}, []),
    (
        {"rollout.engine.flags.preferred_sampling_params": {"top_k": 5, "repetition_penalty": 1.3}},
        ["rollout.engine.flags.preferred_sampling_params: found {'top_k': 5", "set rollout.temperature, top_p"],
    ),
    (
        {"rollout.engine.flags.preferred-sampling-params": '{"min_p": 0.1}'},
        [
            "rollout.engine.flags.preferred-sampling-params: found '{\"min_p\": 0.1}', allowed: None",
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
            "speculative_accept_threshold_single: found 0.9, allowed: 1.0; tokens would be drawn otherwise",
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
    ({"rollout.top_k": 1}, ["rollout.top_k: found 1, which leaves one token"]),
    ({"eval.responses": 4}, ["eval.responses: found 4 with eval.temperature 0, allowed: 1"]),
    ({"eval.pass_at": [1, 2]}, ["allowed: 1 to eval.responses, 1; set eval.responses to 2"]),
    ({"eval.max_new_tokens": 300}, ["eval.max_new_tokens: found 300", "together 332", "of the model, 256"]),
    ({"rollout.temperature": 0}, ["rollout.temperature: found 0.0"]),
    ({"rollout.reward": "answer_exct"}, ["rollout.reward: found 'answer_exct'", "did you mean"]),
    (
        {"environment.kind": "zoom", "environment.options": {"zoom": 2}},
        ["environment.options: ZoomIn", "argument 'zoom'"],
    ),
    ({"environment.max_turns": 3}, ["environment: found settings, but no environment.kind"]),
    (
        {"rollout.reward": "", "data.task": "tests.test_config_check:Unrewarded", "warm_start.steps": 0},
        ["rollout.reward: found nothing with data.task 'tests.test_config_check:Unrewarded', which has no reward, a"],
    ),
    ({"rollout.reward": "", "data.task": "tests.test_tasks:TwoTurns", "warm_start.steps": 0}, []),
    ({"rollout.reward": "", "data.task": "tests.cut_episodes:CutSortDigits"}, []),
    ({"rollout.reward": ""}, []),
    ({"eval.reward": "no.such:reward"}, ["eval.reward: 'no.such:reward': importing"]),
    ({"rollout.processes": 2, "rollout.replicas": 3}, ["rollout.processes: found 2", "what divides them"]),
    ({"rollout.replicas": 2, "rollout.without": ["rollout/2"]}, ["found 'rollout/2', allowed: rollout/0 to 1"]),
    ({"rollout.without": ["rollout-2/0"]}, ["process 0 of rollout-2 none of its engines, allowed: at least one"]),
    ({"rollout.without": ["actor/0"]}, ["rollout.without: found 'actor/0', allowed: rollout/0 to 0"]),
    ({"rollout.engine.port": 65535, "rollout.replicas": 2}, ["rollout.engine.port: found 65535", "at most 65534"]),
    (
        {"rollout.engine.flags.model_path": "x"},
        ["rollout.engine.flags.model_path: found 'x'", "set model.path instead"],
    ),
    ({"rollout.engine.flags.api-key": "x"}, ["rollout.engine.flags.api-key", "it cannot be changed"]),
    ({"rollout.engine.flags.host": "0.0.0.0"}, ["rollout.engine.flags.host", "it cannot be changed"]),
    ({"rollout.engine.flags.max-total-tokens": 5}, ["underscores (max_total_tokens)"]),
    ({"rollout.engine.simulated.sigma": 1.0}, ["rollout.engine.simulated: found settings, but kind is sglang"]),
    ({"liveness.lease_s": 1, "liveness.beat_s": 0.5}, ["liveness.lease_s: found 1.0", "more than two beats"]),
    ({"name": "a/b"}, ["name: found 'a/b'"]),
    ({"run_dir": f"{__file__}/run"}, ["run_dir: found", "is a file; name a directory"]),
]


@pytest.mark.parametrize(("overrides", "parts"), FINDINGS, ids=[" ".join(map(str, item[0])) for item in FINDINGS])
def test_findings(tmp_path: Path, overrides: dict[str, Any], parts: list[str]) -> None:
    findings = check(load([QUICKSTART], {"run_dir": str(tmp_path / "run")} | overrides))
    for part in parts:
        assert any(part in finding for finding in findings), findings
    for finding in findings:
        assert any(part in finding for part in parts) and "\n" not in finding
        assert "Config(" not in finding, "settings, not sections as Python shows them"


def test_of_another_run_it_is_said_what_to_start_from(tmp_path: Path) -> None:
    run, checkpoint = tmp_path / "other", tmp_path / "other" / "checkpoints" / "i000001-step-000012"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").touch()
    for number in (0, 12):
        (run / "weights" / f"i000001-v{number:06d}" / "model").mkdir(parents=True)
        (run / "weights" / f"i000001-v{number:06d}" / "model" / "config.json").touch()
    for path, part in (
        (checkpoint, f"found a checkpoint of a run; relax-hpc convert {checkpoint} {run}/i000001-step-000012-hf, and"),
        (run, f"found a run, which is no model; name {run}/weights/i000001-v000012/model, its newest weights"),
    ):
        over = {"run_dir": str(tmp_path / "run"), "model.path": str(path)}
        assert any(f"model.path: {part}" in finding for finding in check(load([QUICKSTART], over)))


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
def test_runs_with_and_without_forward_groups_that_are_good(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert check(load([QUICKSTART], {"run_dir": str(tmp_path / "run")} | overrides)) == []


def test_engines_that_take_turns_with_the_actor_all_serve(tmp_path: Path) -> None:
    over = {"run_dir": str(tmp_path / "run"), "colocate": True, "rollout.replicas": 2, "rollout.without": ["rollout/1"]}
    found = check(load([QUICKSTART], over))
    assert any(one.startswith("rollout.without: found rollout/1 with colocate, allowed: none") for one in found)


def test_who_trains_gives_no_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load([QUICKSTART], {"run_dir": str(tmp_path / "run")})
    monkeypatch.setitem(FIELDS, "values", FieldSpec("values", "token", "float32", "expected reward", by="actor"))
    assert any("found role actor, which trains and gives values, allowed: one of both" in one for one in check(config))


def test_busy_port(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        findings = check(load([QUICKSTART], {"run_dir": str(tmp_path / "run"), "rollout.engine.port": port}))
    assert findings == [f"rollout.engine.port: found {port}, but {port} is in use; name another, or 0 for free ones"]


def test_flags_that_sglang_does_not_have(tmp_path: Path) -> None:
    over = {"run_dir": str(tmp_path / "run"), "rollout.engine.flags": {"nonsense": 1, "max_total_token": 5}}
    findings = check(load([QUICKSTART], over))
    assert len(findings) == 2 and "rollout.engine.flags.nonsense: SGLang has no such server argument" in findings[0]
    assert "did you mean max_total_tokens?" in findings[1]
    assert check(load([QUICKSTART], over | {"site.python": "/opt/other/python"})) == [], "another environment's SGLang"


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("attention_backend", "nonsense", "triton, torch_native"),
        ("attention_backend", "flashinfr", "did you mean flashinfer?"),
        ("kv_cache_dtype", "fp8", "auto, fp8_e5m2"),
        ("mem_fraction_static", "a lot", "a number"),
        ("mem_fraction_static", True, "a number"),
        ("tp_size", 1.5, "an integer"),
        ("disable_radix_cache", "yes", "true or false"),
        ("mem_fraction_static", 1.7, "above 0, at most 1"),
        ("mem_fraction_static", [0.8], "a number"),
        ("tp_size", 0, "at least 1"),
        ("max_total_tokens", "4k", "an integer"),
        ("cuda_graph_bs_decode", 4, "a list of integers"),
        ("cuda_graph_bs_decode", [1, "two"], "a list of integers, each an integer"),
        ("lora_strict_loading", "no", "true or false"),
        ("tool_call_parser", "qwen9", "did you mean qwen?"),
        ("sampling_backend", "cuda", "flashinfer, pytorch"),
        ("log_level", "loud", "critical, error"),
        ("json_model_override_args", "{", "a JSON object as a text"),
        ("json_model_override_args", {"rope_theta": 1}, "a text"),
    ],
)
def test_values_that_sglang_does_not_take_for_a_flag(flag: str, value: Any, allowed: str) -> None:
    requires("sglang")
    flags = {"rollout.engine.flags": {flag: value}, "rollout.engine.kind": "sglang"}
    [finding] = list(check_flags(load([], flags), "rollout.engine.flags", {flag: value}))
    assert finding.startswith(f"rollout.engine.flags.{flag}: found {value!r}, allowed by SGLang: ")
    assert allowed in finding


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("atention_backend", "did you mean attention_backend?"),
        ("tensor_parallel_size", "did you mean tp_size?"),
        ("tp", "did you mean tp_size?"),
        ("gpu_memory_utilization", "vLLM's gpu_memory_utilization is mem_fraction_static there"),
    ],
)
def test_an_unknown_flag_of_sglang_names_the_right_one(flag: str, hint: str) -> None:
    requires("sglang")
    [finding] = check_flags(load([], {"rollout.engine.kind": "sglang"}), "x", {flag: 1})
    assert finding == f"x.{flag}: SGLang has no such server argument; {hint}"


def test_the_flags_that_are_read_of_sglang_are_sglangs_own() -> None:
    """Each default in its source is allowed, and the values of users that are usual are too."""
    requires("sglang")
    arguments = server_arguments()
    folder = Path(find_spec("sglang").submodule_search_locations[0]) / "srt" / "arg_groups"
    count = 0
    for file in (folder / "fields").glob("*.py"):
        for line in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant):
                name, default = line.target.id, line.value.value
                assert arguments[name].misfit(default) == "", (name, default)
                count += 1
    assert count > 300
    usual = {"attention_backend": "fa3", "mem_fraction_static": 0.8, "max_total_tokens": 4096}
    assert not [name for name, value in usual.items() if arguments[name].misfit(value)]


def test_a_name_on_the_hub_says_how_to_download_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hint = "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B"
    finding = check(load([QUICKSTART], {"model.path": "Qwen/Qwen3-0.6B"}))[0]
    assert finding.startswith("model.path: found ") and hint in finding
    (tmp_path / "Qwen").mkdir()
    finding = check(load([QUICKSTART], {"model.path": "Qwen/Qwen3-0.6B"}))[0]
    assert finding.startswith("model.path: found ")
    assert hint not in finding, "a folder of the user's own"


@pytest.mark.parametrize(
    ("file", "text"), [("", "its weights are missing"), ("a.bin", "found a.bin, which is pickled")]
)
def test_a_model_without_readable_weights_says_why(tmp_path: Path, file: str, text: str) -> None:
    if file:
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=re.escape(text)):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.path", "closed/m"),
        ("model.reference_path", "closed/m"),
        ("data.train", "closed/rows.jsonl"),
        ("data.eval.test", "closed/rows"),
        ("run_dir", "closed/run"),
        ("run_dir", "n" * 300),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, name: str
) -> None:
    stat = os.stat

    def refuse(path: Any, **settings: Any) -> os.stat_result:
        if "/closed/" in os.fsdecode(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))
        return stat(path, **settings)

    # Root may enter any folder.
    monkeypatch.setattr(os, "stat", refuse)
    path = tmp_path / name
    findings = check(load([QUICKSTART], {key: str(path)}))
    [finding] = [text for text in findings if "found '" in text and " but /" in text]
    assert finding.startswith(f"{key}: found '{path}', but {path}: ")


def test_what_slurm_cannot_be_asked_for_is_a_finding_too(tmp_path: Path) -> None:
    over = {"run_dir": str(tmp_path / "run"), "layout": "het", "site.cpu_nodes": False}
    (line,) = check_request(load([QUICKSTART], over))
    assert line.startswith("groups.rollout.resources.nodes: found 1 for component 0 of a het job")
    assert check(load([QUICKSTART], over)) == [], "a script by hand may have a hub of its own there"
    over = {"run_dir": str(tmp_path / "run"), "layout": "jobs", "site.options.nodes": "2"}
    (line,) = check_request(load([QUICKSTART], over))
    assert line == "options.nodes: found '2', but it is set by relax_hpc; set groups.<group>.resources.nodes instead"


def test_a_device_is_looked_for_where_the_run_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = {"run_dir": str(tmp_path / "run"), "model.device": "cuda"}
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr(Path, "exists", lambda path, exists=Path.exists: path != Path("/dev/dxg") and exists(path))
    assert check(load([QUICKSTART], over)) == [
        "model.device: found cuda, but this machine has no NVIDIA device (/dev/nvidia0); set cpu"
    ]
    assert check(load([QUICKSTART], over | {"site.name": "cluster"})) == [], "a job's node, not this one"
    without = check(load([QUICKSTART], over | {"layout": "het", "groups.actor.resources.gpus_per_node": 1}))
    assert [line.split(":")[0] for line in without] == [
        f"groups.{name}.resources.gpus_per_node" for name in ("rollout", "actor_fwd")
    ]


PROMPT = {"id": 1, "prompt": "12", "answer": "12"}
PROMPTS = [
    (b"", "no prompts; write one"),
    (json.dumps({"id": 1, "prompt": "12"}).encode(), "1 of 1 lines are bad: 1 missing_field (first line 1: no answer)"),
    (json.dumps(PROMPT).encode("utf-16"), "UTF-16"),
    (json.dumps([PROMPT]).encode(), "one JSON list"),
    (json.dumps(PROMPT | {"prompt": "1" * 500}).encode(), "over_long (first line 1: 501 tokens"),
    (json.dumps(PROMPT | {"prompt": [{"role": "user", "content": "12"}]}).encode(), "a list of chat messages"),
]


@pytest.mark.parametrize(("content", "says"), PROMPTS, ids=[says for _, says in PROMPTS])
def test_prompts_are_read(tmp_path: Path, content: bytes, says: str) -> None:
    path = model_directory(tmp_path / "model")
    (tmp_path / "p.jsonl").write_bytes(content)
    over = {
        "data.task": "",
        "warm_start.steps": 0,
        "data.max_prompt_tokens": 200,
        "data.train": str(tmp_path / "p.jsonl"),
    }
    (finding,) = model_findings(path, **over)
    assert finding.startswith(f"data.train: {tmp_path / 'p.jsonl'}: ") and says in finding
    assert not (path / "run").exists()


def prompt_findings(path: Path, **data: Any) -> tuple[list[str], list[str]]:
    """What `check` says of a file of prompts: mistakes, and notes."""
    config = load([], {"data.train": str(path), "model.path": str(path.parent / "model"), **data})
    mistakes = [line for line in files.check_files(config) if line.startswith("data.train")]
    return mistakes, [line for line in files.notes(config) if line.startswith("data.train")]


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        ({}, True),
        ({"eval.reward": "math"}, True),
        ({"algorithm": {"name": "ppo"}}, True),
        ({"rollout.reward": "math"}, False),
        ({"rollout.reward": "environment"}, False),
        ({"algorithm": {"name": "sft"}}, False),
    ],
    ids=str,
)
def test_prompts_of_files_have_no_reward_that_nobody_has_chosen(overrides: dict[str, Any], is_refused: bool) -> None:
    config = load([], {"data.train": "prompts.jsonl", "model.path": "/nowhere"} | overrides)
    findings = [line for line in check(config) if line.startswith("rollout.reward")]
    expected = "rollout.reward: found nothing with prompts of files, allowed: the reward to learn from, such as math, "
    assert len(findings) == is_refused and all(line.startswith(expected) for line in findings)


def test_every_row_of_the_prompts_is_judged(tmp_path: Path) -> None:
    model_directory(tmp_path / "model")
    path, good = tmp_path / "p.jsonl", [json.dumps(PROMPT | {"id": number}) for number in range(1500)]
    path.write_text("\n".join([*good, "", "{", *["{}"] * 300]))
    says = f"data.train: {path}: 301 of 1801 lines are bad: 300 missing_field (first line 1503: no prompt"
    mistakes, notes = prompt_findings(path, **{"data.max_bad_share": 0.1})
    assert len(mistakes) == 1 and mistakes[0].startswith(says) and notes == []
    mistakes, notes = prompt_findings(path, **{"data.max_bad_share": 0.2})
    assert mistakes == [] and len(notes) == 1
    assert notes[0].startswith(
        "data.train: 301 of 1801 rows are left out: 300 missing_field (first line 1503: no prompt"
    )


def test_a_long_file_of_prompts_is_read_in_part_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_S", 0.0)
    monkeypatch.setattr(files, "BLOCK", 10)
    model_directory(tmp_path / "model")
    path, good = tmp_path / "p.jsonl", [json.dumps(PROMPT | {"id": number}) for number in range(40)]
    share = {"data.max_bad_share": 0.05}
    path.write_text("\n".join(["{", *good, *["{"] * 20]))
    begun = "all of them are read when the run begins"
    assert prompt_findings(path, **share) == ([], [f"data.train: read 10 of 61 rows in 0 s, 1 of them bad; {begun}"])
    path.write_text("\n".join(["{"] * 4 + good))
    mistakes, _ = prompt_findings(path, **share)
    assert len(mistakes) == 1 and "4 of 44 lines are bad: 4 broken_json (first line 1" in mistakes[0], "for certain"
    path.write_text("\n".join(good[:10]))
    assert prompt_findings(path, **share) == ([], []), "it was all there was"


def test_prompts_are_read_once_for_mistakes_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_directory(tmp_path / "model")
    path, read = tmp_path / "p.jsonl", []
    path.write_text(json.dumps(PROMPT | {"prompt": "<s>1"}))
    rows = row_files.read_rows
    monkeypatch.setattr(row_files, "read_rows", lambda path, *how: read.append(path) or rows(path, *how))
    for _ in range(2):
        mistakes, notes = prompt_findings(path)
        assert mistakes == [] and len(notes) == 1
    assert len(read) == 1
    path.write_text(json.dumps(PROMPT | {"prompt": "11"}))
    assert prompt_findings(path) == ([], []) and len(read) == 2


def test_names_of_special_tokens_in_prompts_are_said(tmp_path: Path) -> None:
    path, prompts = model_directory(tmp_path / "model"), tmp_path / "p.jsonl"
    prompts.write_text(json.dumps(PROMPT | {"prompt": "<s>1"}) + "\n" + json.dumps(PROMPT | {"id": 2}))
    over = {"model.path": str(path), "data.train": str(prompts)}
    (note,) = files.notes(load([], over))
    assert "data.train: 1 of 2 prompts have names of special tokens, such as <s>" in note
    assert not list(files.notes(load([], over | {"data.special_tokens": ["prompt"]})))


BROKEN = [
    ("model.safetensors", b"", "model.safetensors: not a whole safetensors file"),
    ("model.safetensors", lambda data: data[: len(data) // 2], "model.safetensors: not a whole safetensors file"),
    ("tokenizer.json", b"", "tokenizer.json: not a tokenizer"),
    ("tokenizer.json", b"{}", "tokenizer.json: not a tokenizer"),
    ("tokenizer_config.json", b"{", "tokenizer_config.json: not JSON"),
    (
        "config.json",
        lambda data: data.replace(b'"vocab_size": 64', b'"vocab_size": 32'),
        "64 tokens, but vocab_size of",
    ),
    (
        "config.json",
        lambda data: data.replace(b'_layers": 4', b'_layers": 5'),
        "model.layers.4.input_layernorm.weight is missing",
    ),
    ("config.json", lambda data: data.replace(b'_layers": 4', b'_layers": 3'), "unknown tensor model.layers.3."),
    ("model.safetensors.index.json", b"{", "found an unreadable"),
]


@pytest.mark.parametrize(("name", "content", "says"), BROKEN, ids=[f"{one[0]} {one[2][-20:]}" for one in BROKEN])
def test_files_of_a_model_are_read(tmp_path: Path, name: str, content: Any, says: str) -> None:
    path = model_directory(tmp_path / "model")
    file = path / name
    file.write_bytes(content if isinstance(content, bytes) else content(file.read_bytes()))
    findings = model_findings(path)
    assert findings and all(line.startswith("model.path: ") and "\n" not in line for line in findings)
    assert any(says in line for line in findings)


def test_a_pipe_in_the_place_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model")
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    assert "found no *.safetensors" in model_findings(path)[0]


def test_model_directories(tmp_path: Path) -> None:
    good = model_directory(tmp_path / "good")
    layout = {"actor.parallel.tensor": 2, "actor.parallel.pipeline": 4}
    assert model_findings(good, **layout) == []
    (good / "tokenizer.json").unlink()
    (good / "model.safetensors").unlink()
    findings = model_findings(good)
    assert len(findings) == 2 and "no *.safetensors" in findings[0] and "no tokenizer.json" in findings[1]
    (good / "config.json").unlink()
    assert "model.path: found no config.json in" in model_findings(good)[0]


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "{}", '{"model_type": 5}'])
def test_broken_model_config(tmp_path: Path, text: str) -> None:
    path = model_directory(tmp_path / "model")
    (path / "config.json").write_text(text, encoding="latin-1")
    findings = model_findings(path)
    assert len(findings) == 1 and findings[0].startswith("model.path: ") and "config.json" in findings[0]


def test_index_that_names_a_missing_file(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    assert "no model-2.safetensors" in model_findings(path)[0]


def test_models_that_cannot_be_trained_are_named_with_every_reason(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model", rope_scaling={"type": "yarn"}, logit_scale=0.5)
    findings = model_findings(path)
    assert len(findings) == 2 and all(f"model.path: {path}/config.json: " in finding for finding in findings)
    assert "rope_scaling.type is 'yarn'" in findings[0] or "rope_scaling.type is 'yarn'" in findings[1]
    assert model_findings(path, **{"model.ignore_keys": ["rope_scaling", "logit_scale"]}) == []
    other = model_directory(tmp_path / "other", model_type="llama")
    assert "architectures is ['Qwen3ForCausalLM'], supported is ['LlamaForCausalLM']" in model_findings(other)[0]


def test_every_family_is_sound_or_says_how_its_ranks_may_split_it(tmp_path: Path) -> None:
    llama = model_directory(tmp_path / "llama", model_type="llama", architectures=["LlamaForCausalLM"], head_dim=None)
    assert model_findings(llama, **{"actor.parallel.tensor": 4, "actor.parallel.pipeline": 2}) == []
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    about = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": None} | experts
    mixed = model_directory(tmp_path / "mixed", **about)
    assert model_findings(mixed, **{"actor.parallel.data": 2}) == []
    assert model_findings(mixed, **{"actor.parallel.data": 2, "actor.parallel.expert": 2}) == []
    assert model_findings(mixed, **{"actor.parallel.expert": 2}) == [
        "actor.parallel.expert: found 2, allowed: a divisor of tensor * context * data, 1"
    ]


def test_routes_of_another_sglang_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler would tell of later routes, or not begin."""
    monkeypatch.setattr(flags, "version", lambda _: "0.5.22")
    (finding,) = flags.check(load([QUICKSTART], EXPERTS))
    assert finding.startswith("model.routing_replay: found SGLang 0.5.22, allowed: 0.5.21")
    monkeypatch.setattr(flags, "version", lambda _: "0.5.21+cu130")
    assert not list(flags.check(load([QUICKSTART], EXPERTS)))


def test_experts_that_sglang_cannot_read_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shape = {key.removeprefix("model.tiny."): value for key, value in SEEING_EXPERTS.items() if "tiny" in key}
    make_tiny_model(directory, TinyModelConfig(**shape), 0)
    assert model_findings(directory) == []
    tensors = load_file(directory / "model.safetensors")
    straight = {name: one.transpose(0, 2, 1).copy() for name, one in tensors.items() if ".experts." in name}
    save_file(tensors | straight, directory / "model.safetensors")
    (finding,) = model_findings(directory)
    assert finding.startswith("model.path: found model.language_model.layers.0.mlp.experts.") and "turned" in finding


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"environment.options": {"command": ["python", "agent.py"]}}, None),
        ({}, "environment.options: found command None, allowed with environment.kind agent: a list of words"),
        ({"environment.options": {"command": "agent.py"}}, "found command 'agent.py', allowed"),
        ({"environment.options": {"comand": ["x"]}}, "found comand, allowed with environment.kind agent: command, env"),
        ({"environment.options": {"command": ["no-such-program"]}}, "found no program 'no-such-program'"),
        (
            {"environment.options": {"command": ["python"], "chat_template": "/no/such.jinja"}},
            "environment.options.chat_template: found '/no/such.jinja', allowed: model, or a Jinja file",
        ),
        (
            {"environment.options": {"command": ["python"]}, "data.chat_template": "model"},
            "data.chat_template: found 'model' beside environment.kind agent, allowed: none",
        ),
        (
            {"environment.kind": "", "groups.hub.roles": ["advantages", "gateway"]},
            "groups.hub.roles: found gateway, and environment.kind ''",
        ),
        (
            {"environment.options": {"command": ["python"]}, "groups.actor.roles": ["actor", "gateway"]},
            "groups: found role gateway in actor, allowed: hub",
        ),
    ],
)
def test_programs_that_play_episodes_are_looked_at(tmp_path: Path, over: dict[str, Any], says: str | None) -> None:
    config = load([QUICKSTART], {"run_dir": str(tmp_path / "run"), "environment.kind": "agent"} | over)
    assert ("gateway" in config.groups["hub"].roles) == ("groups.actor.roles" not in over)
    findings = check(config)
    assert (len(findings) == 1 and says in findings[0]) if says else findings == []


def test_a_hub_with_a_gateway_needs_no_gpu(tmp_path: Path) -> None:
    over = {"model.device": "cuda", "environment.kind": "agent", "environment.options": {"command": ["python"]}}
    cluster = QUICKSTART.parents[1] / "clusters" / "2-nodes.yaml"
    config = load([QUICKSTART, cluster], {"run_dir": str(tmp_path / "run"), "site.interface": "lo"} | over)
    assert config.groups["hub"].roles == ["advantages", "gateway"]
    assert not [finding for finding in check(config) if finding.startswith("groups.")]


def weight_findings(directory: Path, **over: Any) -> list[str]:
    """What `check` says of the model in ``directory``, and `convert` too, in the same words."""
    config = load([], {"model.path": str(directory), "data.task": "sort_digits", "data.max_prompt_tokens": 32, **over})
    return [line.partition(": ")[2] for line in files.check_files(config) if line.startswith("model.path")]


def test_an_output_layer_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", TinyModelConfig(), 0)
    weights = load_file(tmp_path / "m" / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    for other, findings in ((embedding.copy(), 0), (embedding + 1, 1), (embedding[:8], 1)):
        save_file(weights | {"lm_head.weight": other}, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
        found = weight_findings(tmp_path / "m")
        assert len(found) == findings and all("lm_head.weight" in line for line in found)
        spec = spec_of(json.loads((tmp_path / "m" / "config.json").read_text()))
        if found and other.shape == embedding.shape:
            with pytest.raises(ConfigError) as caught:
                HfTensors(tmp_path / "m", spec)
            assert str(caught.value) == found[0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "model.safetensors",
            "found model.safetensors in {}, which its index does not name; remove the file",
        ),
        ("old.safetensors", "found old.safetensors in {}, which its index does not name"),
        ("consolidated.safetensors", ""),
    ],
)
def test_a_file_of_weights_that_the_index_does_not_name_is_refused(name: str, says: str, tmp_path: Path) -> None:
    """Programs differ in which of them they read. Those of a publisher's own format are read by none."""
    make_tiny_model(directory := tmp_path / "m", TinyModelConfig(), 0)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_findings(directory) == []
    save_file(weights, directory / name, metadata={"format": "pt"})
    found = weight_findings(directory)
    assert [line.startswith(says.format(directory)) for line in found] == ([True] if says else [])
    if says:
        with pytest.raises(ConfigError, match="which its index does not name"):
            SafetensorFiles(directory)
    (directory / "model-00001-of-00001.safetensors").unlink()
    assert weight_findings(directory)[0].startswith("found no model-00001-of-00001.safetensors")


@pytest.mark.parametrize("field", ["reference_path", "teacher_path", "critic_path"])
def test_every_model_that_scores_the_policys_tokens_has_its_tokenizer(field: str, tmp_path: Path) -> None:
    for name in ("policy", "other"):
        make_tiny_model(tmp_path / name, TinyModelConfig(), 0)
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(content))
    over = {
        "model.path": str(tmp_path / "policy"),
        f"model.{field}": str(tmp_path / "other"),
        "data.task": "sort_digits",
    }
    found = list(files.check_files(load([], over)))
    assert any(f"model.{field}: found" in line and "whose tokenizer gives other ids" in line for line in found), found


def test_a_stop_text_may_be_a_special_token_and_not_have_one_in_it(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", TinyModelConfig(chat=True), 0)
    over = {"model.path": str(tmp_path / "m"), "data.task": "sort_digits", "rollout.stop": ["<|im_start|>", "a<pad>"]}
    found = [line for line in files.check_files(load([], over)) if line.startswith("rollout.stop")]
    assert found == [
        "rollout.stop: found 'a<pad>', allowed: texts without special tokens, or one special token alone, "
        "such as '<pad>'"
    ]
