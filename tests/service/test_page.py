"""The page of a run: its curves, samples and events, from a run directory alone; and in a browser,
where texts of models and of other programs have no effect."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE
from relax_hpc.base.metrics.read import Metrics
from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.commands.program import main
from relax_hpc.config import dump
from relax_hpc.config.schema import SamplesConfig
from relax_hpc.rollout.sample_log import SampleLog
from relax_hpc.service.page.curves import MAX_POINTS, make_charts, make_curve
from relax_hpc.service.page.document import MARK, render_document
from relax_hpc.service.page.snapshot import SAMPLES_OF_KIND, newest_samples, take_snapshot
from tests.helpers.browser import Tab
from tests.helpers.queue_helpers import make_run, small

SCRIPT = (
    "</script><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"
)
RIGHT_TO_LEFT = "\u202egnirts\u2066 \u0645\u0631\u062d\u0628\u0627"
EVIL = f"{SCRIPT}<!--{RIGHT_TO_LEFT}\x1b]0;evil\x07\x00 {{{{data}}}} {'w' * 5000}"
PICTURE = (
    "data:image/jpeg;base64,/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAP//////////////////////////////////////"
    "////////////////////////////////////////////////wAALCAABAAEBAREA/8QAFAABAAAAAAAAAAAAAAAAAAAAA//"
    "EABQQAQAAAAAAAAAAAAAAAAAAAAD/2gAIAQEAAD8AN//Z"
)
STEPS = 900


def write_run(root: Path) -> RunDir:
    """A run of `STEPS` steps with hostile texts wherever a program other than ours writes texts."""
    run, config = make_run(root), small()
    config.steps, config.name = STEPS, f"run {SCRIPT}"
    dump(config, run.config)
    with run.metrics.open("w") as file:
        for step in range(STEPS):
            row: dict[str, Any] = {"step": step, "time": 1e9 + 2 * step, "incarnation": 1}
            row |= {"reward/mean": step / STEPS, "staleness/mean": None, "perf/step_s": 1.0}
            row |= {"idle/actor": 0.25, "idle/actor_for_rollout": 0.25}
            row |= {"perf/actor_train_s": 3.0, "perf/actor_wait_s": 1.0, "queue/ready": 3}
            file.write(json.dumps(row) + "\n")
            if step % 100 == 0:
                score = {"step": step, "time": 1e9 + 2 * step + 1.5, "incarnation": 1}
                file.write(json.dumps(score | {f"eval/{SCRIPT}/exact": step / STEPS}) + "\n")
        back = {"event": "rolled_back", "step": STEPS, "time": 2e9, "incarnation": 1}
        file.write(json.dumps(back) + "\n")
    write_json(run.stop, {"code": 93, "reason": EVIL})
    failure = {"group": SCRIPT, "reason": "reward_exception", "detail": EVIL, "location": "a.py:3"}
    run.failures.write_text(json.dumps(failure | {"traceback": EVIL, "time": 1e9 + 7}) + "\n")
    event = {"number": 1, "event": "disk_full", "state": "raised", "subject": SCRIPT, "step": 3}
    event |= {"detail": "no space", "time": 1e9 + 8, "since": 1e9}
    run.notifications.write_text(json.dumps(event) + "\n" + json.dumps({"sent": 1}) + "\n")
    log = SampleLog(run.samples / "rollout-inc-000001-rank-0.jsonl.gz", SamplesConfig(), STEPS)
    log.keep([sample(0, prompt=EVIL, response=EVIL, id=EVIL, finish_reason=EVIL)], step=STEPS)
    media = [{"kind": f"image {SCRIPT}", "about": EVIL, "picture": PICTURE}]
    media += [{"kind": "image", "about": "", "picture": "http://example.com/x.jpg"}]
    turns = [{"by": EVIL, "text": EVIL, "tokens": 3, "versions": [EVIL]}]
    log.keep([sample(1, media=media, turns=turns, environment={EVIL: EVIL})], step=STEPS)
    log.close()
    return run


def sample(number: int, **more: Any) -> dict[str, Any]:
    texts = {"prompt": "4312?", "response": "1234", "finish_reason": "stop"}
    times = {"step": number, "time": float(number), "reward": 1.0, "tokens": 5}
    return {"id": f"{number:09d}.00.00", **texts, **times, **more}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return write_run(tmp_path_factory.mktemp("page") / "run")


def test_a_long_curve_keeps_its_extremes() -> None:
    values = [(step, 0.0) for step in range(20_000)]
    values[7777], values[7778], values[9] = (7777, 30.0), (7778, math.nan), (9, -2.0)
    curve = make_curve("seconds", values)
    assert len(curve["steps"]) <= MAX_POINTS and curve["steps"][-1] == 19_999
    assert max(curve["high"]) == 30.0 and min(curve["low"]) == -2.0
    assert curve["mean"][0] == pytest.approx(-2.0 / 50)
    assert all(map(math.isfinite, curve["mean"]))


def test_an_evaluation_does_not_move_the_time_of_a_step() -> None:
    line = {"incarnation": 1, "reward/mean": 1.0}
    steps = [line | {"step": step, "time": 10.0 * step} for step in range(3)]
    late = {"incarnation": 1, "step": 1, "time": 19.0, "eval/a/b": 0.5}
    rows = [steps[0], steps[1] | late, steps[2]]
    charts = {
        chart["title"]: chart for chart in make_charts(Metrics(rows=rows, lines=[*steps, late]))
    }
    assert charts["Time of a step"]["curves"][0]["mean"] == [10.0, 10.0]
    assert charts["Held-out score"]["curves"][0]["name"] == "a/b"
    assert "Staleness" not in charts


def test_the_newest_samples_are_read_from_the_ends_of_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    log = SampleLog(run.samples / "a.jsonl.gz", SamplesConfig(), steps=1)
    for number in range(40):
        log.keep([sample(number)], step=1)
    log.keep([sample(100 + number, eval="heldout") for number in range(50)])
    log.close()
    with (run.samples / "a.jsonl.gz").open("ab") as file:
        file.write(b"\x1f\x8b\x08 a member that a kill has cut")
    # Foreign files beside them: many false starts, a FIFO, and a link out of the run.
    (run.samples / "c.jsonl.gz").write_bytes(b"\x1f\x8b\x08" * 1_000_000)
    os.mkfifo(run.samples / "d.jsonl.gz")
    (run.samples / "e.jsonl.gz").symlink_to(tmp_path / "secret")
    other = SampleLog(run.samples / "b.jsonl.gz", SamplesConfig(), steps=1)
    other.keep([sample(1000)], step=1)
    other.close()
    found = newest_samples(run)
    times = [one["time"] for one in found]
    assert times == sorted(times, reverse=True) and times[0] == 1000.0
    assert [one["time"] for one in found if "eval" in one] == [
        149.0 - k for k in range(SAMPLES_OF_KIND)
    ]
    assert min(times) == 39.0 - (SAMPLES_OF_KIND - 2)


def test_the_data_of_the_page_has_no_control_characters(hostile: RunDir) -> None:
    snapshot = take_snapshot(hostile)
    text = json.dumps(snapshot, ensure_ascii=False)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    state = snapshot["state"]
    assert state["run"]["state"] == "failed" and state["run"]["tone"] == "bad"
    assert state["waits"]["roles"][0]["parts"][1] == {
        "name": "waits for rollout",
        "share": 0.25,
        "waits": True,
    }
    assert {
        "name": "prompt groups waiting for training",
        "value": "3",
        "note": "at the newest step",
    } in (state["queue"])
    texts = [event["text"] for event in state["events"]]
    assert f"training returned to step {STEPS} and repeats the steps after it" in texts
    assert f"raised: disk full {SCRIPT}: no space" in texts
    assert any(
        "first failure of its kind: reward_exception" in event["text"] for event in state["events"]
    )


def test_the_document_runs_only_scripts_of_this_package(hostile: RunDir) -> None:
    text, empty = (render_document(data) for data in (take_snapshot(hostile), {"live": True}))
    assert MARK in text and text.count("<script") == empty.count("<script") == 3
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]  # type: ignore[index]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert "connect-src 'none'" in policy and "connect-src 'self'" in empty
    for script in re.findall(r"<script>(.*?)</script>", empty, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    own = "".join(empty.split("<script>")[::2]) + empty.rpartition("<script>")[2]
    assert not re.search(r"https?:|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", own)


def test_the_library_is_the_published_one() -> None:
    """The digests were taken from the archive of the registry, whose own digest is beside them."""
    folder = files("relax_hpc.service.page") / "assets"
    vendored = json.loads((folder / "vendored.json").read_text())
    assert vendored["licence"] == "MIT" and vendored["version"] in vendored["source"]
    for name, entry in vendored["files"].items():
        data = (folder / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], name
    assert f"(v{vendored['version']})" in (folder / "uplot.min.js").read_text()[:80]
    assert "Permission is hereby granted" in (folder / "uplot.LICENSE").read_text()


def test_the_command_writes_a_page(
    hostile: RunDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["page", str(hostile.root)]) == EXIT_DONE
    assert "run.html: open it in a browser" in capsys.readouterr().out
    assert main(["page", str(hostile.root)]) == EXIT_DONE
    shutil.copy(hostile.config, "run.html")
    assert main(["page", str(hostile.root)]) == EXIT_CONFIG
    assert "run.html is not a page of a run; name another file" in capsys.readouterr().err
    assert main(["page", str(hostile.root), "--html", "no/such.html"]) == EXIT_CONFIG
    assert "name a file in a folder of yours" in capsys.readouterr().err
    assert main(["page", str(tmp_path)]) == EXIT_CONFIG
    assert "no run here" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    browser = Tab(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_hostile_texts_as_texts(
    hostile: RunDir, tab: Tab, width: int, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert main(["page", str(hostile.root), "--html", str(page)]) == EXIT_DONE
    tab.open(page.as_uri(), width)
    tab.wait_for("document.querySelectorAll('article').length === 2")
    assert tab.value("document.title") == f"run {SCRIPT}: failed"
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value("document.querySelectorAll('canvas').length") == 3
    assert tab.value("document.querySelectorAll('main script, main img[onerror]').length") == 0
    pictures = "[...document.querySelectorAll('img')].map((node) => node.naturalWidth)"
    tab.wait_for(f"JSON.stringify({pictures}) === '[1]'")
    assert tab.complaints() == [] and tab.requests() == [page.as_uri()]
    response = tab.texts("article:last-of-type pre")[0]
    assert SCRIPT in response and r"\u202egnirts" in response
    assert any(text.startswith("step 899") for text in tab.texts(".legend"))


def test_a_chart_shows_the_values_at_the_cursor(hostile: RunDir, tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["page", str(hostile.root), "--html", str(page)]) == EXIT_DONE
    tab.open(page.as_uri(), is_dark=True)
    tab.wait_for("document.querySelectorAll('.u-over').length === 3")
    tab.value("document.querySelector('.u-over').scrollIntoView({block: 'center'})")
    box = tab.value(
        "JSON.parse(JSON.stringify(document.querySelector('.u-over').getBoundingClientRect()))"
    )
    middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    # A part that a person has enlarged stays so when newer values arrive.
    tab.value("plots.get(0).plot.setScale('x', {min: 400, max: 500})")
    tab.wait_for("plots.get(0).plot.scales.x.min === 400")
    tab.value("showCharts(data.state.charts)")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", **middle)
    tab.wait_for("/^step 4[45]\\d/.test(document.querySelector('.legend').innerText)")
    assert tab.value("plots.get(0).plot.scales.x.max") == 500
    assert re.search(r"reward 0\.4\d+ \(0\.4\d+ to 0\.\d+\)|reward 0\.5", tab.texts(".legend")[0])
