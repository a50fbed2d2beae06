"""What a rank imports before it begins to work, and that nobody looks for garbage meanwhile."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.imports import fast_imports
from tests.requirements import requires

pytestmark = pytest.mark.run

COMPILER = ("torch._dynamo", "torch._inductor")
OTHERS = ("transformers", "sglang", "triton", "matplotlib", "mpi4py")
LIBRARIES = ("megatron", "sympy", "torch.distributed", *COMPILER)
RANK = """
import gc, json, sys
from pathlib import Path
from relax_hpc.config.schema import Config, ParallelConfig
from relax_hpc.roles.__main__ import import_role

role, folder, found = sys.argv[1], Path(sys.argv[2]), {"collections": 0}
config = Config(seed=3)

def collected(phase, about):
    found["collections"] += phase == "start" and not gc.isenabled()

gc.callbacks.append(collected)
import_role(role, config, 0)
gc.callbacks.clear()
found |= {"imported": sorted(sys.modules), "collects": gc.isenabled(), "for_good": gc.get_freeze_count()}

from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training import parallel
from tests.helpers.training_helpers import LR, batch, policy, rows, save, trainer

parallel.initialize_alone("cpu", 0, 60.0)
make_tiny_model(folder / "model", config.model.tiny, seed=3)
before, micro = set(sys.modules), [batch(rows(2))]
if role == "actor":
    trains = trainer(folder / "model")
    trains.accumulate(micro)
    trains.step(LR)
    save(folder / "i000001-step-000001", trains, {})
else:
    policy(folder / "model").forward_logprobs(micro, 1.0)
print(json.dumps(found | {"later": sorted(set(sys.modules) - before)}))
"""
"""One rank by itself: its imports as its process does them, then what it does at work."""


@pytest.mark.parametrize("role", ["actor", "actor_fwd"])
def test_a_rank_imports_all_that_it_needs_at_once_and_nothing_else(
    role: str, tmp_path: Path
) -> None:
    """Seconds of every recovery: no compiler where nothing is compiled, no engine, and no library
    at its first step."""
    requires("torch", "megatron")
    command = [sys.executable, "-c", RANK, role, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    unwanted = [name for name in found["imported"] if within(name, COMPILER + OTHERS)]
    assert not unwanted, f"imported by {role}: {unwanted[:5]}"
    assert [name for name in found["later"] if within(name, LIBRARIES)] == []
    # A quarter of the time, were it otherwise.
    assert found["collections"] == 0 and found["collects"] and found["for_good"] > 100_000


ENGINE = """
import sys
from relax_hpc.base.transformers_hook import install_transformers_hook

install_transformers_hook()
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
print(*[name for name in ("sklearn", "scipy") if name in sys.modules])
"""


def test_the_small_engine_imports_no_statistics() -> None:
    requires("torch", "transformers")
    done = subprocess.run(
        [sys.executable, "-c", ENGINE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.split() == [], done


def test_roles_are_imported_before_megatron_core_is_prepared_for_their_device() -> None:
    """Imported unprepared, it loads a compiler that nothing uses on a CPU."""
    code = (
        "import sys, relax_hpc.roles.actor, relax_hpc.roles.forward; sys.exit('megatron.core' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120).returncode == 0


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in packages)


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_it_was_before(collects: bool) -> None:
    """Whatever happens in the block, and in one within it."""
    was, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(ImportError), fast_imports():
            with fast_imports():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError("no such library")
        assert gc.isenabled() == collects and gc.get_freeze_count() == frozen
    finally:
        (gc.enable if was else gc.disable)()
