"""A client as one writes it for Relax's elastic API: its paths, bodies, answers and states, and
nothing that this project has added. Only the address and the headers are of this project."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

LIVE_STATES = ("PENDING", "CREATING", "CONNECTING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY")
OUT_KEYS = {
    *("request_id", "status", "model_name", "num_replicas", "engine_urls", "engine_ids"),
    *("failed_engines", "created_at", "updated_at", "error_message", "weight_version"),
}
IN_KEYS = {
    *("request_id", "status", "model_name", "num_replicas", "engine_urls", "timeout_secs", "force"),
    *("dry_run", "created_at", "updated_at", "selected_engines", "removed_engines"),
    *("failed_engines", "error_message"),
}


class RelaxClient:
    """``base``: address of the rollout service."""

    def __init__(self, base: str, headers: dict[str, str]) -> None:
        self.base, self.headers = base, headers

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(f"{self.base}/rollout{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def scale_out(self, num_replicas: int = 0, **body: Any) -> tuple[int, dict[str, Any]]:
        full = {"model_name": "default", "num_replicas": num_replicas, "engine_urls": []}
        return self.call("POST", "/scale_out", {**full, "timeout_secs": 300, **body})

    def scale_in(self, num_replicas: int = 0, **body: Any) -> tuple[int, dict[str, Any]]:
        full = {"model_name": "default", "num_replicas": num_replicas, "engine_urls": []}
        return self.call("POST", "/scale_in", {**full, "force": False, "dry_run": False, **body})

    def scale_out_status(self, id: str) -> dict[str, Any]:
        status, content = self.call("GET", f"/scale_out/{id}")
        assert status == 200 and content.keys() >= OUT_KEYS, content
        return content

    def scale_in_status(self, id: str) -> dict[str, Any]:
        status, content = self.call("GET", f"/scale_in/{id}")
        assert status == 200 and content.keys() >= IN_KEYS, content
        return content

    def list_scale_out(self, query: str = "") -> list[dict[str, Any]]:
        status, content = self.call("GET", f"/scale_out{query}")
        assert status == 200 and content["total_count"] == len(content["requests"])
        return content["requests"]

    def engines(self) -> dict[str, Any]:
        status, content = self.call("GET", "/engines")
        assert status == 200, content
        engines = content["models"]["default"]["engines"]
        assert content["total_engines"] == len(engines)
        assert all(
            {"engine_id", "url", "status", "is_healthy"} <= engine.keys() for engine in engines
        )
        return {engine["engine_id"]: engine["status"] for engine in engines}
