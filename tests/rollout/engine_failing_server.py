"""Prints an error and dies like SGLang: `python -m tests.rollout.engine_failing_server ARGS.json`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    arguments = json.loads(Path(sys.argv[1]).read_bytes())["server"]
    print(arguments["prints"], file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
