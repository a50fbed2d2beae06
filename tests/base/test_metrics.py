"""metrics.jsonl and TensorBoard survive crashes and rollbacks; progress lines; benchmark
figures."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.base.metrics.progress import Progress, progress_line
from relax_hpc.base.metrics.read import load_metrics, read_metrics, tags_of
from relax_hpc.base.metrics.tags import TAG_GROUPS, TAGS, tensorboard_tag
from relax_hpc.base.metrics.writer import MetricsWriter


def figures_module():
    """tools/bench/figures.py, which is no package."""
    path = Path(__file__).parents[2] / "tools/bench/figures.py"
    spec = importlib.util.spec_from_file_location("figures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rewards(run_dir: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["reward/mean"]) for row in read_metrics(run_dir)]


def test_lines_of_a_step_add_up(tmp_path):
    with MetricsWriter(tmp_path, incarnation=1) as metrics:
        metrics.write(0, {"reward/mean": 0.5, "loss/total": 1})
        metrics.write(0, {"eval/digits/answer_exact": 0.25, "loss/total": 2}, time=7.0)
    [row] = read_metrics(tmp_path)
    assert row == {
        "step": 0,
        "time": 7.0,
        "incarnation": 1,
        "reward/mean": 0.5,
        "loss/total": 2.0,
        "eval/digits/answer_exact": 0.25,
    }
    assert tags_of([row]) == ["eval/digits/answer_exact", "loss/total", "reward/mean"]


def test_each_line_is_on_disk_before_close(tmp_path):
    metrics = MetricsWriter(tmp_path, incarnation=1)
    metrics.write(3, {"reward/mean": 0.5})
    assert rewards(tmp_path) == [(3, 0.5)]
    metrics.close()
    metrics.close()


def test_non_finite_numbers_are_valid_json(tmp_path):
    with MetricsWriter(tmp_path, incarnation=1) as metrics:
        metrics.write(0, {"loss/total": math.nan, "kl/k3": math.inf, "reward/mean": 1})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss/total"] is None and line["kl/k3"] is None
    assert math.isnan(read_metrics(tmp_path)[0]["loss/total"])


def test_names_of_the_lines_own_fields_are_refused(tmp_path):
    with MetricsWriter(tmp_path, incarnation=1) as metrics, pytest.raises(ValueError, match="time"):
        metrics.write(0, {"time": 1.0})


def test_no_file_is_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


def test_rollback_supersedes_older_lines(tmp_path):
    with MetricsWriter(tmp_path, incarnation=1) as old:
        for step in range(6):
            old.write(step, {"reward/mean": step})
    with MetricsWriter(tmp_path, incarnation=2) as new:
        new.rolled_back(3)
        new.write(3, {"reward/mean": 30})
    assert rewards(tmp_path) == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert load_metrics(tmp_path).rollbacks == [(2, 3)]


def test_rollback_within_an_incarnation(tmp_path):
    with MetricsWriter(tmp_path, incarnation=1) as metrics:
        for step in range(4):
            metrics.write(step, {"reward/mean": step})
        metrics.rolled_back(2)
        metrics.write(2, {"reward/mean": 20})
    assert rewards(tmp_path) == [(0, 0), (1, 1), (2, 20)]


def test_a_straggler_of_an_older_incarnation_does_not_come_back(tmp_path):
    with (
        MetricsWriter(tmp_path, incarnation=1) as old,
        MetricsWriter(tmp_path, incarnation=2) as new,
    ):
        old.write(0, {"reward/mean": 0})
        new.rolled_back(1)
        new.write(1, {"reward/mean": 10})
        old.write(1, {"reward/mean": 1})
        old.write(2, {"reward/mean": 2})
    assert rewards(tmp_path) == [(0, 0), (1, 10)]


def test_the_newest_incarnation_wins_without_a_rollback(tmp_path):
    with (
        MetricsWriter(tmp_path, incarnation=1) as old,
        MetricsWriter(tmp_path, incarnation=2) as new,
    ):
        new.write(0, {"reward/mean": 2})
        old.write(0, {"reward/mean": 1, "loss/total": 5})
    [row] = read_metrics(tmp_path)
    assert (row["reward/mean"], row["loss/total"], row["incarnation"]) == (2, 5, 2)


def test_an_evaluation_of_the_weights_resumed_from_stays(tmp_path):
    with MetricsWriter(tmp_path, incarnation=1) as old:
        old.write(2, {"reward/mean": 1, "eval/digits/answer_exact": 0.5})
        old.write(3, {"eval/digits/answer_exact": 0.75})
    with MetricsWriter(tmp_path, incarnation=2) as new:
        new.rolled_back(2)
    [row] = read_metrics(tmp_path)
    assert row["step"] == 2 and row["eval/digits/answer_exact"] == 0.5 and "reward/mean" not in row


def test_torn_lines_are_counted_and_the_next_is_not_glued_to_them(tmp_path):
    with MetricsWriter(tmp_path, incarnation=1) as metrics:
        metrics.write(0, {"reward/mean": 0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "time": 1.0, "epo')
    assert load_metrics(tmp_path).torn == 1
    with MetricsWriter(tmp_path, incarnation=2) as metrics:
        metrics.write(1, {"reward/mean": 1})
    assert rewards(tmp_path) == [(0, 0), (1, 1)]
    assert load_metrics(tmp_path).torn == 1


def test_tensorboard_shows_first_what_people_look_for_first():
    shown = sorted(map(tensorboard_tag, TAGS))
    parts = list(dict.fromkeys(tag.partition("/")[0][3:] for tag in shown))
    assert [name for name in parts if name != "time"] == [part.name for part in TAG_GROUPS]
    assert [part.name for part in TAG_GROUPS][:4] == ["reward", "eval", "loss", "perf"]
    rewards = [tag for tag in shown if tag.startswith("01_reward/") and "<" not in tag]
    assert rewards[0] == "01_reward/mean"


def test_tensorboard_has_texts_as_they_are_and_the_configuration(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data as session
    from tensorboard.plugins.text.text_plugin import text_array_to_html

    with MetricsWriter(tmp_path, incarnation=1) as metrics:
        metrics.tensorboard.configured(
            {"steps": 7, "algorithm.name": "grpo", "colocate": False}, ["reward/mean"]
        )
        metrics.write(0, {"reward/mean": 0.5})
        metrics.tensorboard.show(
            0, "samples", "reward 1\n# no heading\n```\n<script>alert(1)</script>"
        )
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [text] = events.Tensors("samples")
    html = text_array_to_html(np.array(text.tensor_proto.string_val[0]), enable_markdown=True)
    assert (
        "<code>reward 1\n# no heading\n```\n&lt;script&gt;alert(1)&lt;/script&gt;\n</code>" in html
    )
    found = session(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    ).hparams
    assert (
        found["steps"].number_value,
        found["algorithm.name"].string_value,
        found["colocate"].bool_value,
    ) == (
        7.0,
        "grpo",
        False,
    )


def test_tensorboard_reads_one_curve_through_a_rollback(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, incarnation=1) as old:
        for step in range(6):
            old.write(step, {"reward/mean": step}, time=100.0 + step)
    with MetricsWriter(tmp_path, incarnation=2) as new:
        new.rolled_back(3)
        new.write(3, {"reward/mean": 30})
    files = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert [name[-11:] for name in files] == [".inc-000001", ".inc-000002"]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars(tensorboard_tag("reward/mean"))] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 30),
    ]
    assert events.Scalars(tensorboard_tag("reward/mean"))[0].wall_time == 100.0


def test_writing_needs_neither_torch_nor_tensorflow(tmp_path):
    script = (
        "import sys, pathlib; from relax_hpc.base.metrics.writer import MetricsWriter;"
        "assert 'tensorboard' not in sys.modules;"
        "MetricsWriter(pathlib.Path(sys.argv[1]), 1).close();"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


VALUES = {
    "reward/mean": 0.4313,
    "staleness/mean": 1.0,
    "perf/rollout_tokens_per_s": 12345.6,
    "idle/actor": 0.125,
}


def test_progress_line():
    more = {"eval/digits/answer_exact": 0.61, "loss/total": 3, "idle/actor_for_rollout": 0.1}
    line = progress_line(7, 300, VALUES | more, eta_s=247)
    assert line == "eta  4m07s  step   7/300  reward 0.431  stale 1.0    12k tok/s  digits 0.610"


IDLE = {
    f"idle/{role}": 1.0 for role in ("actor", "actor_fwd", "advantages", "reference", "rollout")
}
EXTREME = {"reward/mean": -123456.789, "staleness/mean": 12.0, "perf/rollout_tokens_per_s": 1e9}


@pytest.mark.parametrize("width", [20, 40, 79, 120])
@pytest.mark.parametrize(
    "values", [VALUES | IDLE, VALUES | IDLE | {"eval/a_set_with_a_name/r": 0.5}, EXTREME | IDLE]
)
def test_a_progress_line_fits_and_what_comes_last_is_left_out(values, width):
    line = progress_line(12345, 1_000_000, values, 1e6, width)
    assert len(line) <= width and line.startswith("eta 11d13h")
    assert ("step   12345/1000000" in line) == (width > 20)
    assert not re.search(r"idle$|idle \w+$|\w+ $", line), "no half a field"


def test_of_idle_roles_the_dearest_are_shown_first():
    line = progress_line(7, 300, VALUES | IDLE, eta_s=247)
    assert line.endswith("tok/s  idle actor 100%") and len(line) == 79, "there is room for one"
    wide = progress_line(7, 300, VALUES | IDLE, eta_s=247, width=200)
    names = ("actor", "rollout", "actor_fwd", "advantages", "reference")
    assert wide.endswith("idle " + " ".join(f"{role} 100%" for role in names))


def test_progress_lines_are_aligned():
    lines = [
        progress_line(7, 300, {"idle/actor": math.nan}),
        progress_line(299, 300, VALUES, eta_s=0),
    ]
    assert len({line.index("  idle") for line in lines}) == 1 and " - tok/s" in lines[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42, "42s"), (59.7, "1m00s"), (3700, "1h01m"), (100000, "1d03h"), (None, "-")],
)
def test_eta(seconds, text):
    assert progress_line(0, 2, {}, seconds).startswith(f"eta {text:>6}  ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_has_one_plain_line_a_step():
    log = io.StringIO()
    progress = Progress(3, log)
    for step in range(3):
        progress.update(step, VALUES | IDLE)
    progress.show("passing by")
    progress.close()
    lines = log.getvalue().splitlines()
    assert [line.split()[3] for line in lines] == ["0/3", "1/3", "2/3"] and all(
        len(line) < 80 for line in lines
    )
    assert (
        "\x1b" not in log.getvalue() and lines[0].split()[1] == "-" and lines[2].split()[1] == "0s"
    )


def test_a_step_in_which_no_generation_ended_shows_the_last_pace():
    log = io.StringIO()
    progress = Progress(3, log)
    for values in ({}, VALUES, {"reward/mean": 0.5}):
        progress.update(0, values)
    assert re.findall(r"(\S+) tok/s", log.getvalue()) == ["-", "12k", "12k"]


def test_a_terminal_keeps_some_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    screen = Terminal()
    progress = Progress(100, screen, keep_every=10)
    for step in range(8, 13):
        progress.update(
            step, VALUES | IDLE | ({"eval/digits/answer_exact": 0.5} if step == 12 else {})
        )
    progress.update(13, VALUES)
    progress.show("loading: " + 100 * "x")
    progress.close()
    kept = [line.split("\r")[-1] for line in screen.getvalue().split("\n")[:-1]]
    assert [line.split()[3] for line in kept[:2]] == ["10/100", "12/100"] and "xxx" in kept[2]
    assert all(line.endswith("\x1b[K") for line in kept) and "digits 0.500" in kept[1]
    passing = [
        part.removesuffix("\x1b[K")
        for part in screen.getvalue().split("\r")
        if part.endswith("\x1b[K")
    ]
    assert len(passing) == 4 and all(len(line) <= 79 for line in passing)


def test_figures_end_in_one_line_of_json(capsys):
    figures = figures_module()
    rows = [
        figures.Figure("own share", 0.034567, "of a step", "<= 0.05", True, [0.03, 0.034567, 0.04]),
        figures.Figure("rows", 1234567.0, "rows/s", ">= 2e6", False),
        figures.Figure("loss", math.nan, "nats"),
    ]
    figures.print_figures(rows, {"seed": 0, "run": Path("runs/a")}, as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        "own",
        "share",
        "0.03457",
        "[0.03",
        "to",
        "0.04]",
        "of",
        "a",
        "step",
        "<=",
        "0.05",
        "ok",
    ]
    assert lines[2].endswith("MISSED") and "1,234,567" in lines[2]
    parsed = json.loads(lines[-1])
    assert parsed["figures"][1] == {
        "name": "rows",
        "value": 1234567.0,
        "unit": "rows/s",
        "target": ">= 2e6",
        "ok": False,
        "rounds": [],
    }
    assert parsed["figures"][2]["value"] is None and parsed["settings"].keys() == {
        "cores",
        "load_before",
        "seed",
        "run",
    }


def test_figures_are_printed_as_they_come_and_kept_if_the_rest_fails(capsys):
    figures = figures_module()

    def measured():
        yield figures.Figure("a", 1.0, "s")
        assert "a   " in capsys.readouterr().out.splitlines()[-1]
        yield figures.Figure("b", 2.0, "s")
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        figures.print_figures(measured(), {}, as_json=True)
    assert [
        one["name"] for one in json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    ] == ["a", "b"]


def test_figures_without_json(capsys):
    figures = figures_module()
    figures.print_figures([figures.Figure("a", 1.0, "s")], {}, as_json=False)
    assert "{" not in capsys.readouterr().out
