"""A whole run whose episodes are played by an agent program, while its rollout and its gateway are
killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relax_hpc.queue.inspect.audit import Ledger
from tests.helpers import gated_agent
from tests.helpers.run_helpers import LIGHT, merged, queue_rows, queue_state, running
from tests.requirements import requires

pytestmark = pytest.mark.run

requires("torch", "sglang")

AGENTS = {
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "data": {"max_prompt_tokens": 100},
    "rollout": {"max_new_tokens": 40, "save_partial_every_s": 0.1, "reward": "environment"},
    "environment": {"kind": "agent", "turn_tokens": 8},
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}.{% endfor %}assistant:"
)


def test_programs_play_on_while_rollout_and_gateway_are_killed(tmp_path: Path) -> None:
    """Turns that are in the log are not drawn again; every row is trained once, by what the policy
    itself has said."""
    gate, template = tmp_path / "gate", tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    command = ["python", gated_agent.__file__, str(gate)]
    options = {"environment": {"options": {"command": command, "chat_template": str(template)}}}
    with running(tmp_path, merged(merged(LIGHT, AGENTS), options)) as run:

        def are_logged() -> bool:
            return run.run.config.exists() and queue_state(run.run).segments.held >= 4

        run.wait_until(are_logged, "first turns are in the log", 120.0)
        run.kill("rollout")
        gate.touch()
        run.wait_for_step(0, 120.0)
        run.kill("gateway")
        run.finish(180.0)
    result = Ledger(run.run).judge(2)
    assert result.problems == []
    faults = [name for name in result.noted if name.startswith("environment_fault")]
    assert not faults, "a gateway that was replaced is no fault of a program"
    assert result.segments["used"] == result.segments["appended"] >= 4
    rows = [row for row in queue_rows(run.run).values() if "reward" in row]
    assert len(rows) == 8
    for row in rows:
        versions, mask = row["token_versions"], row["loss_mask"]
        assert np.array_equal(versions > 0, mask > 0)
        assert (
            row["environment"]["info"]["exit_code"] == 0 and len(row["environment"]["turns"]) == 2
        )
        assert (
            row["reward"]
            == row["environment"]["reward"]
            == row["environment"]["info"]["said"]["reward"]
        )
