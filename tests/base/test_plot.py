"""The plots: what goes into them, and errors that say what was looked for."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.metrics import plot
from relax_hpc.base.metrics.plot import (
    HELD_OUT,
    Curve,
    main,
    plot_runs,
    run_labels,
    short_names,
    smooth,
    unit_of,
)
from relax_hpc.base.metrics.read import Metrics
from relax_hpc.base.metrics.writer import MetricsWriter
from tests.requirements import requires

requires("matplotlib")

TOOL = Path(__file__).parents[2] / "tools/plot_rewards.py"


def make_run(path: Path, steps: int = 60, **extra: float) -> Path:
    """A run that was rolled back to half of its steps once."""
    with MetricsWriter(path, 1) as metrics:
        for step in range(steps):
            metrics.write(step, {"reward/mean": step / steps, **extra})
    with MetricsWriter(path, 2) as metrics:
        metrics.rolled_back(steps // 2)
        for step in range(steps // 2, steps):
            metrics.write(step, {"reward/mean": step / steps, "loss/total": math.nan, **extra})
            if step % 10 == 0:
                metrics.write(step, {"eval/digits/answer_exact": 0.5})
    return path


def size_of_png(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


def test_one_run(tmp_path):
    run = make_run(tmp_path / "a")
    output = plot_runs([run], tmp_path / "new" / "plot.png")
    width, height = size_of_png(output)
    assert width > 1000 and height > 700


def test_each_tag_is_a_panel(tmp_path, capsys):
    runs = [make_run(tmp_path / name, **{"idle/actor": 0.5, "idle/rollout": 0.1}) for name in "ab"]
    assert main([str(run) for run in runs], str(tmp_path / "two.png"), ["idle/*"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "two.png")
    plot_runs(runs, tmp_path / "less.png")
    assert size_of_png(tmp_path / "two.png")[1] > size_of_png(tmp_path / "less.png")[1]


def test_text_stays_text_in_svg(tmp_path):
    runs = [make_run(tmp_path / name, steps=20) for name in ("sync", "async")]
    text = plot_runs(runs, tmp_path / "plot.svg").read_text()
    words = (
        "Training reward",
        "Held-out evaluation: eval/digits/answer_exact",
        "training step",
        "sync",
        "restart",
    )
    assert all(f">{word}<" in text for word in words)


def test_held_out_losses_have_an_axis_of_their_own(tmp_path):
    run = make_run(tmp_path / "a", **{"eval/test/loss": 6.0})
    text = plot_runs([run], tmp_path / "plot.svg").read_text()
    assert ">Held-out loss: eval/test/loss" in text
    assert ">Held-out evaluation: eval/digits/answer_exact<" in text


def drawn(tag: str, values: list[float]) -> tuple[float, float]:
    """The lowest and the highest value that a panel of this curve has room for."""
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    curve = Curve(0, tag, np.arange(float(len(values))), np.array(values))
    plot._panel(axes, HELD_OUT, [curve], [plot._Run(Path("a"), "a", Metrics())])
    return axes.get_ylim()


@pytest.mark.parametrize("values", [[-1.0, 0.95], [0.1, 40.0], [0.0, 1.0001], [-0.01, 0.5]])
@pytest.mark.parametrize("tag", ["eval/digits/reward", "perf/lost_share"])
def test_an_axis_has_room_for_every_value(tag, values):
    low, high = drawn(tag, values)
    assert low < min(values) and max(values) < high
    assert drawn(tag, [0.25, 0.5]) == (-0.03, 1.03), "those of shares and scores within are alike"
    assert drawn("reward/mean", [0.25, 0.5])[1] < 0.6


def test_a_run_without_lines(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: no steps in .*metrics\.jsonl"):
        plot_runs([tmp_path / "empty"], tmp_path / "plot.png")


def test_a_tag_that_no_run_has(tmp_path):
    run = make_run(tmp_path / "a", steps=4)
    with pytest.raises(ConfigError, match=r"no values for kl/\*; it has the tags: .*reward/mean"):
        plot_runs([run], tmp_path / "plot.png", ["kl/*"])


def test_a_run_with_nothing_to_show_is_named(tmp_path):
    good = make_run(tmp_path / "good", steps=4)
    with MetricsWriter(tmp_path / "bad", 1) as metrics:
        metrics.write(0, {"loss/total": 1.0})
    with pytest.raises(
        ConfigError, match=r"bad.*no values for reward/mean, eval/\*; it has the tags: loss/total"
    ):
        plot_runs([good, tmp_path / "bad"], tmp_path / "plot.png")


def test_no_runs_and_unknown_formats(tmp_path):
    with pytest.raises(ConfigError, match="no run directory"):
        plot_runs([], tmp_path / "plot.png")
    with pytest.raises(ConfigError, match=r"plot\.xyz has an unknown picture format"):
        plot_runs([make_run(tmp_path / "a", steps=4)], tmp_path / "plot.xyz")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"relax_hpc\[plot\]"):
        plot_runs([make_run(tmp_path / "a", steps=4)], tmp_path / "plot.png")


def test_labels_tell_runs_apart(tmp_path):
    assert run_labels([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert run_labels([tmp_path / "x/a", tmp_path / "y/a"]) == ["x/a", "y/a"]
    assert run_labels([tmp_path / "a", tmp_path / "a"]) == ["a", "a"]
    assert run_labels([]) == []


def test_short_names():
    assert short_names(["eval/digits/exact_match", "eval/long/exact_match"]) == ["digits", "long"]
    assert short_names(["idle/actor", "idle/rollout"]) == ["actor", "rollout"]
    assert short_names(["loss/total", "kl/k3"]) == ["loss/total", "kl/k3"]
    assert short_names(["a/b", "a/b/c"]) == ["b", "b/c"]


def test_units():
    assert unit_of("eval/digits/answer_exact") == "answer_exact"
    assert unit_of("perf/step_s") == "seconds"
    assert unit_of("perf/rollout_tokens_per_s") == "tokens / s"
    assert unit_of("queue/rows") == "rows"


@pytest.mark.parametrize("length", [1, 2, 50])
def test_smoothing_keeps_length_and_constants(length):
    assert np.allclose(smooth(np.full(length, 3.0), 5), 3.0)
    assert smooth(np.arange(float(length)), 5).shape == (length,)


def test_the_tool(tmp_path):
    run = make_run(tmp_path / "a", steps=4)
    command = [sys.executable, str(TOOL), str(run), "-o", str(tmp_path / "plot.png")]
    settings = {
        "env": os.environ | {"PYTHONPATH": str(TOOL.parents[1])},
        "timeout": 60,
        "capture_output": True,
    }
    subprocess.run(command, check=True, **settings)
    assert size_of_png(tmp_path / "plot.png")
    failed = subprocess.run([*command, "--tag", "kl/k9"], text=True, check=False, **settings)
    assert failed.returncode == ConfigError.exit_code
    assert failed.stderr.startswith("plot_rewards: ") and failed.stderr.count("\n") == 1
