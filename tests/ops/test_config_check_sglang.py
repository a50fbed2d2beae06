"""`relax-hpc check`: flags of SGLang."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.config import load
from relax_hpc.ops.checks.settings import check
from relax_hpc.rollout.engines.sglang import flags
from relax_hpc.rollout.engines.sglang.arguments import server_arguments
from relax_hpc.rollout.engines.sglang.flags import check_flags
from tests.helpers.run_helpers import QUICKSTART
from tests.ops.check_helpers import EXPERTS, same_fields  # noqa: F401
from tests.requirements import requires


def test_flags_that_sglang_does_not_have(tmp_path: Path) -> None:
    over = {
        "run_dir": str(tmp_path / "run"),
        "rollout.engine.flags": {"nonsense": 1, "max_total_token": 5},
    }
    findings = check(load([QUICKSTART], over))
    assert (
        len(findings) == 2
        and "rollout.engine.flags.nonsense: SGLang has no such server argument" in findings[0]
    )
    assert "did you mean max_total_tokens?" in findings[1]
    assert check(load([QUICKSTART], over | {"site.python": "/opt/other/python"})) == [], (
        "another environment's SGLang"
    )


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
        (
            "gpu_memory_utilization",
            "vLLM's gpu_memory_utilization is mem_fraction_static in SGLang",
        ),
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


def test_routes_of_another_sglang_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler would tell of later routes, or not begin."""
    monkeypatch.setattr(flags, "version", lambda _: "0.5.22")
    (finding,) = flags.check(load([QUICKSTART], EXPERTS))
    assert finding.startswith("model.routing_replay: found SGLang 0.5.22, allowed: 0.5.21")
    monkeypatch.setattr(flags, "version", lambda _: "0.5.21+cu130")
    assert not list(flags.check(load([QUICKSTART], EXPERTS)))
