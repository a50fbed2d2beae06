"""An agent that says what a file has, which others may change meanwhile: `python -m
tests.rollout.lookup_agent TABLE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.gated_agent import ask

task, table = json.loads(sys.stdin.readline()), json.loads(Path(sys.argv[1]).read_text())
messages = [{"role": "user", "content": task["prompt"]}]
for said in table["says"]:
    messages += [ask(messages), {"role": "user", "content": said}]
print(json.dumps({"reward": table["reward"]}))
