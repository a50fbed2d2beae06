"""`relax-hpc warm` compiles the kernels of a run: the run itself, on another node, compiles none.

The node is another one because its own disk is another folder. The kernels are compiled by Triton
for an H100 and by inductor for this CPU, in a reward's process.
`tests/net/test_kernel_caches.py` proves the same about Triton's kernels with two processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.base.local_dir import COMPILED, LOCAL_DIR
from relax_hpc.net.kernel_caches.node import list_files
from tests.effort import effort
from tests.helpers.run_helpers import LIGHT, SMALL, merged, write_config
from tests.net.test_kernel_caches import COMPILE, NOT_INTERPRETED

pytestmark = [
    pytest.mark.run,
    pytest.mark.skipif(not effort(0, 1), reason="compiles for a minute: env/test.sh --all"),
]
REWARD = f"""
import json, os
import torch
from torch._dynamo.utils import counters
{COMPILE}

def curve(values):
    return (values.sin() * 3 + values.cos()).relu().sum()

def compiling(sample):
    if not counters["inductor"]:
        torch.compile(curve)(torch.ones(1000))
        figures = {{"triton": compile_kernel(), **counters["inductor"]}}
        with open(os.environ["FIGURES"], "a") as file:
            file.write(json.dumps(figures) + "\\n")
    return 1.0
"""


def figures_of(tmp_path: Path, command: str, node: str) -> tuple[dict[str, object], str]:
    """Start a run on ``node``. Returns what its reward compiled, and its output."""
    figures = tmp_path / f"{node}.jsonl"
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {name: value for name, value in os.environ.items() if name not in COMPILED}
    own |= NOT_INTERPRETED
    disk = {LOCAL_DIR: str(tmp_path / node), "FIGURES": str(figures)}
    over = {
        "steps": 2,
        "run_dir": str(tmp_path / f"run-{node}"),
        "rollout": {"reward": "compiling_reward:compiling", "reward_workers": 1},
        "site": {"kernel_cache": str(tmp_path / "shared")},
    }
    config = write_config(tmp_path / "run.yaml", over, merged(SMALL, LIGHT))
    result = subprocess.run(
        [sys.executable, "-m", "relax_hpc", command, "--config", config],
        env=own | disk | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(figures.read_text().splitlines()[0]), result.stdout


def test_a_run_compiles_nothing_after_a_warm_up(tmp_path: Path) -> None:
    (tmp_path / "compiling_reward.py").write_text(REWARD)
    cold, output = figures_of(tmp_path, "warm", "first")
    [path] = (tmp_path / "shared").glob("*")
    assert f"{path}: " in output and not list(tmp_path.glob("run-*")), output
    warm, _ = figures_of(tmp_path, "run", "second")
    assert cold["triton"] == [False] and warm["triton"] == [True]
    assert cold["fxgraph_cache_miss"] and not cold.get("fxgraph_cache_hit")
    assert warm["fxgraph_cache_hit"] and not warm.get("fxgraph_cache_miss")
    files = [
        {name for name in list_files(tmp_path / node) if name.endswith((".so", ".cubin"))}
        for node in ("first", "second")
    ]
    assert files[0] == files[1], "the second node has compiled nothing"
