"""An agent as people write them for OpenAI's interface, which knows nothing of training."""

from __future__ import annotations

import json
import sys

from openai import OpenAI

from tests.rollout.agent_helpers import TOOLS

task = json.loads(sys.stdin.readline())
client = OpenAI()
messages = [{"role": "user", "content": task["prompt"]}]
for turn in range(3):
    about = {"model": "any", "messages": messages, "tools": TOOLS, "temperature": 0.3}
    if turn:
        chunks = list(client.chat.completions.create(stream=True, **about))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        messages.append({"role": "assistant", "content": text})
        break
    said = client.chat.completions.create(**about).choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    for call in said.tool_calls or ():
        total = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
print("working on", task["metadata"])
print(
    json.dumps({"reward": float("4" in messages[-1]["content"]), "seen": messages[-2]["content"]})
)
