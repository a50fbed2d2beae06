"""A role of one file and one entry, as docs/extending/roles-and-metrics.md teaches it: in a run, and
killed once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.examples.role import repeated_share
from tests.helpers.pages import ROOT
from tests.helpers.run_helpers import running
from tests.requirements import requires

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

PAGE = (ROOT / "docs/extending/roles-and-metrics.md").read_text()
WAIT_S = 120.0


def shown(pattern: str) -> str:
    """The content of the block of the page whose beginning matches ``pattern``."""
    block = re.search(rf"^```{pattern}.*?(?=^```$)", PAGE, re.MULTILINE | re.DOTALL)
    assert block, pattern
    return block[0].partition("\n")[2]


def with_entry(folder: Path, entry: str) -> Path:
    """A checkout in ``folder`` of links to this one, whose table of roles has one more ``entry``."""
    for source in ROOT.iterdir():
        if source.name != "relax_hpc":
            (folder / source.name).symlink_to(source)
    package = folder / "relax_hpc"
    (package / "config").mkdir(parents=True)
    for source in [*(ROOT / "relax_hpc").iterdir(), *(ROOT / "relax_hpc/config").iterdir()]:
        link = folder / source.relative_to(ROOT)
        if not link.exists() and source.name != "roles.py":
            link.symlink_to(source)
    table = (ROOT / "relax_hpc/config/roles.py").read_text()
    assert table.count("\nROLES = {\n") == 1
    text = table.replace("\nROLES = {\n", f"\nROLES = {{\n{entry}")
    (package / "config/roles.py").write_text(text)
    return folder


def queue_command(name: str, run: Path, *words: str) -> None:
    """Run `relax-hpc queue` with the checkout's table of roles."""
    command = [sys.executable, "-m", "relax_hpc", "queue", name, str(run), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_role_sees_the_rows_of_each_step_although_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    with_entry(checkout, shown('python\n    "watch": Role'))
    # `python -m` begins the search for modules in the current folder.
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    config = yaml.safe_load(shown("yaml watch.yaml"))
    with running(tmp_path, base=config) as live:
        folder = live.run.root / "watch"
        live.wait_until(
            lambda: (folder / "step-000001.json").exists(), "rows of step 1 are seen", WAIT_S
        )
        live.kill("watch")
        live.finish(WAIT_S)
    assert live.incarnations("watch") == 2 and live.incarnations("actor") == 1
    queue_command("audit", live.run.root)
    size = config["prompts_per_step"]
    for step in range(config["steps"]):
        statistics = json.loads((folder / f"step-{step:06d}.json").read_text())
        tickets = {str(ticket) for ticket in range(step * size, (step + 1) * size)}
        assert {*statistics} == tickets
        assert {group["rows"] for group in statistics.values()} == {config["samples_per_prompt"]}
    output = tmp_path / "rows.jsonl"
    last = str(config["steps"] - 1)
    queue_command("export", live.run.root, "--step", last, "--output", str(output))
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == size * config["samples_per_prompt"]
    for row in rows:
        row_values = {name: row[name] for name in ("token_ids", "prompt_len")}
        assert row["repeated"] == pytest.approx(repeated_share(row_values))
    assert any("watch/repeated" in line for line in read_metrics(live.run.root))
