"""`GET /metrics` in the format OpenMetrics, and Grafana's dashboard of these metrics."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from relax_hpc.base.metrics.tags import TAGS
from relax_hpc.base.metrics.writer import MetricsWriter
from relax_hpc.config.schema import Config
from relax_hpc.ops.track import TrackerFollower
from relax_hpc.queue.client import QueueStatus
from relax_hpc.queue.operations import ExternalEngine, Operation
from relax_hpc.service.metrics_routes import expose
from relax_hpc.service.open_metrics import (
    CONTENT_TYPE,
    MAX_SERIES,
    OTHER,
    Exposition,
    describe_tag,
    name_of,
)
from tests.helpers.service_helpers import TOKEN, service

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "tools" / "grafana" / "relax_hpc.json"
ENGINES = 100
HOSTILE = 'a"b\\c\nrelax_fake 1 # \udcff'


def parse(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by sample name and labels; the parser refuses what the format forbids."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            samples.setdefault(sample.name, {})[labels] = sample.value
    return samples


def beat(group: str, age_s: float) -> dict[str, Any]:
    return {"group": group, "incarnation": 1, "age_s": age_s}


def run_with_engines(engines: int) -> Any:
    """A run as the service knows it, with one value of each kind of tag."""
    status = QueueStatus(
        trained_steps=7,
        steps=9,
        accepted=64,
        newest="i000001-v000007",
        readers={
            **{f"rollout/{number}": "i000001-v000006" for number in range(engines)},
            "rollout-2/0": "i000000-v000000",
            "actor_fwd/0": "i000001-v000007",
        },
        depth={"generating": 3, "ready": 2},
        oldest_s={"generating": 4.5, "ready": 0.0},
        untrained_bytes=123,
        dropped={"stale": 1},
        noted={"engine_fault/timeout": 2, f"bad_prompt/{HOSTILE}": 1},
        disk=[{"path": "/r"}],
        segments={},
        refused_connections=1,
        checkpoints=[],
        incarnations={"rollout": 2, "actor": 1},
        beats={"rollout/0": beat("rollout", 0.5), "rollout/1": beat("rollout", 9.0)},
        lacking={"actor": {"why": "is pending", "since_s": 12.0}},
        finished=False,
        waiting=(),
    )
    external = ExternalEngine(number=1000, name="rollout/1000", operation="so-000001", state="lost")
    operation = Operation(id="so-000002", kind="scale_out", body={}, created_at=0, deadline_at=0)
    values = {
        re.sub(r"<(role|peer)>", "actor_fwd", tag).replace("<", "").replace(">", ""): 0.5
        for tag in TAGS
    }
    values |= {"mine/score": math.nan, "loss/grad_norm": math.inf, "eval/held_out/pass@16": 0.25}
    return SimpleNamespace(
        config=Config(name=HOSTILE),
        status=status,
        status_age_s=99.0,
        is_hub_away=True,
        started_at=0.0,
        metrics=SimpleNamespace(values=values, step=7, time=1.0),
        present=SimpleNamespace(external=[external]),
        wanted=SimpleNamespace(operations=[operation]),
        counts={"status_200": 5, "update_OSError": 1},
    )


def test_every_value_is_a_sample_that_the_parser_of_prometheus_accepts() -> None:
    follower = TrackerFollower(owner="x", host="n", pid=1, beat_at=0.0, failures=4)
    text = expose(run_with_engines(3), [("wandb", follower, 77)], {"disk": 2})
    samples = parse(text)
    assert text.endswith("# EOF\n") and "relax_fake" not in samples
    assert samples["relax_hub_up"] == {(): 0.0} and samples["relax_hub_silent_seconds"] == {
        (): 99.0
    }
    lag = samples["relax_engine_lag_versions"]
    assert lag == {(("engine", str(n)), ("group", "rollout")): 1.0 for n in range(3)}
    replaced = (("engine", "0"), ("group", "rollout-2"))
    assert samples["relax_engine_up"][replaced] == 0.0
    assert samples["relax_reader_version"] == {(("engine", "0"), ("group", "actor_fwd")): 7.0}
    assert samples["relax_group_beat_age_seconds"] == {(("group", "rollout"),): 9.0}
    assert samples["relax_group_awaited_seconds"][("group", "actor"),] == 12.0
    assert samples["relax_incidents_total"][("kind", "engine_fault"), ("reason", "timeout")] == 2
    assert samples["relax_operations"][("kind", "scale_out"), ("state", "PENDING")] == 1
    assert samples["relax_tracker_failures_total"] == {(("tracker", "wandb"),): 4.0}
    assert samples["relax_eval_set_pass_at_k"][("k", "16"), ("set", "held_out")] == 0.25
    assert samples["relax_idle_role_for_peer"] == {
        (("peer", "actor_fwd"), ("role", "actor_fwd")): 0.5
    }
    assert math.isnan(samples[OTHER][("tag", "mine/score"),])
    assert samples["relax_events_active"][("event", "disk"),] == 2
    assert samples["relax_events_active"][("event", "waiting"),] == 0
    state = {labels[0][1] + labels[2][1]: v for labels, v in samples["relax_engine_state"].items()}
    assert state["1000lost"] == 1 and state["1000active"] == 0


def test_no_two_metrics_have_the_same_name() -> None:
    names = [name_of(declared) for declared in TAGS]
    assert len(names) == len(set(names))
    own = set(
        re.findall(r'"(relax_\w+)"', (ROOT / "relax_hpc/service/metrics_routes.py").read_text())
    )
    assert not own & set(names)


@pytest.mark.parametrize(
    ("tag", "labels"),
    [
        ("perf/actor_fwd_load_model_s", {"role": "actor_fwd", "kind": "load_model"}),
        ("perf/own_role_work_s", {"role": "own_role", "kind": "work"}),
        ("idle/actor", {"role": "actor"}),
        ("eval/a/loss", {"set": "a"}),
    ],
)
def test_words_of_a_tag_are_labels(tag: str, labels: dict[str, str]) -> None:
    assert dict(describe_tag(tag)[2]) == labels


def test_a_name_has_a_limited_number_of_series() -> None:
    exposition = Exposition()
    for number in range(MAX_SERIES + 5):
        exposition.add("relax_x", number, "a metric", {"engine": str(number)})
    assert exposition.left_out == 5 and len(parse(exposition.text())["relax_x"]) == MAX_SERIES


def test_a_scrape_needs_the_token_and_no_hub(tmp_path: Path) -> None:
    async def play() -> None:
        async with service(tmp_path, with_hub=False) as running:
            with MetricsWriter(running.run.root, 1) as metrics:
                metrics.write(3, {"reward/mean": 0.5})
            while running.live.metrics.step < 0:
                await asyncio.sleep(0.01)
            assert (await running.ask("GET", "/metrics", token="")).status == 401
            answer = await running.ask("GET", "/metrics", token=TOKEN)
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            samples = parse(answer.content)
            assert samples["relax_hub_up"] == {(): 0.0}
            assert samples["relax_reward_mean"] == {(): 0.5}
            assert samples["relax_run_step"] == {(): 3.0}

    asyncio.run(play())


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    """Queries of panels, those in rows included."""
    queries = list[str]()
    for panel in panels:
        queries += [target["expr"] for target in panel.get("targets", ())]
        queries += expressions(panel.get("panels", []))
    return queries


def test_the_dashboard_asks_only_for_metrics_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    follower = TrackerFollower(owner="x", host="n", pid=1, beat_at=0.0)
    known = set(parse(expose(run_with_engines(1), [("wandb", follower, 0)])))
    queries = expressions(dashboard["panels"])
    queries += [
        variable["query"]["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    asked = {name for query in queries for name in re.findall(r"relax_\w+", query)}
    assert len(queries) > 20 and not asked - known
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert all(0 <= p["gridPos"]["x"] <= 24 - p["gridPos"]["w"] for p in dashboard["panels"])
