"""An agent of two turns, the second of which waits until a file is there; it needs no library."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

PATIENCE_S = 200.0


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = json.dumps({"model": "any", "messages": messages}).encode()
    head = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, head
    )
    with urllib.request.urlopen(request) as reply:
        return json.loads(reply.read())["choices"][0]["message"]


if __name__ == "__main__":
    task, gate, end = (
        json.loads(sys.stdin.readline()),
        Path(sys.argv[1]),
        time.monotonic() + PATIENCE_S,
    )
    messages = [{"role": "user", "content": task["prompt"]}]
    messages.append(ask(messages))
    while not gate.exists() and time.monotonic() < end:
        time.sleep(0.05)
    messages.append({"role": "user", "content": "more"})
    last = ask(messages)["content"] or ""
    print(json.dumps({"reward": float(len(set(last)))}))
