"""A server of tools, by the standard library alone; it does what its tools are called."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.helpers.signalled import count_calls, signal_first_calls

PAGES = {"": (["echo"], "more"), "more": (["sum", "picture"], "")}


def answer(number: int, **message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", "id": number, **message}), flush=True)


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def call(number: int, name: str, arguments: dict[str, Any]) -> None:
    if name == "exit":
        os._exit(3)
    if name == "signal":
        signal_first_calls(**arguments)
    if name == "silent":
        return
    if name == "fails":
        answer(number, result={"content": [text("nothing there")], "isError": True})
    elif name == "picture":
        data = base64.b64encode(b"pixels").decode()
        answer(number, result={"content": [text("a"), {"type": "image", "data": data}, text("b")]})
    elif name == "answers":
        # As it stands: what a server of somebody else's gives.
        answer(number, result=arguments)
    elif name == "environment":
        answer(number, result={"content": [text(" ".join(sorted(os.environ)))]})
    elif name == "signal":
        answer(number, result={"content": [text(f"call {count_calls(arguments['log'])}")]})
    elif name in ("echo", "sum"):
        said = os.environ["WORD"] if name == "echo" else str(sum(arguments["numbers"]))
        answer(number, result={"content": [text(f"{said} {os.getpid()}")]})
    else:
        answer(number, error={"code": -32602, "message": f"Unknown tool: {name}"})


def main() -> None:
    ready = False
    for line in sys.stdin:
        message = json.loads(line)
        match message:
            case {"method": "initialize", "id": number, "params": {"protocolVersion": revision}}:
                answer(number, result={"protocolVersion": revision, "capabilities": {"tools": {}}})
            case {"method": "notifications/initialized"}:
                ready = True
                print("noise that is no message", flush=True)
                answer(1000, method="ping")
                answer(1001, method="sampling/createMessage", params={})
            case {"id": 1000, "result": {}} | {"id": 1001, "error": {"code": -32601}}:
                pass
            case {"method": "tools/list", "id": number, "params": about} if ready:
                names, after = PAGES[about.get("cursor", "")]
                tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
                answer(number, result={"tools": tools, "nextCursor": after})
            case {"method": "ping", "id": number}:
                answer(number, result={})
            case {
                "method": "tools/call",
                "id": number,
                "params": {"name": name, "arguments": arguments},
            } if ready:
                call(number, name, arguments)
            case _:
                os._exit(9)


if __name__ == "__main__":
    main()
