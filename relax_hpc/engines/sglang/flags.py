"""Names of SGLang's server arguments, read from its source: importing it takes seconds, and needs what nodes have."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

_FIELDS = "srt/arg_groups/fields"
"""Where SGLang 0.5.21 declares them, one class a file."""

OWN_FLAGS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "device": "model.device",
    "random_seed": "seed",
    "host": "",
    "port": "rollout.engine.port",
    "api_key": "",
    "admin_api_key": "",
    "weight_version": "",
    # Other ways to serve: these open sockets of their own, and some of them ask nobody for a key.
    **dict.fromkeys(("enable_http2", "grpc_mode", "grpc_port", "smg_grpc_mode", "encoder_only", "use_ray"), ""),
    **dict.fromkeys(("tokenizer_worker_num", "sidecar", "ssl_certfile", "ssl_keyfile"), ""),
}
"""Engine arguments that the rollout role sets itself -> our key for them, empty if there is none."""


def server_flags() -> frozenset[str]:
    """All of them; none if there is no SGLang here, or if it keeps them elsewhere."""
    spec = find_spec("sglang")
    folders = [Path(folder) / _FIELDS for folder in spec.submodule_search_locations or ()] if spec else []
    classes = (
        node
        for folder in folders
        for file in folder.glob("*.py")
        for node in ast.parse(file.read_bytes()).body
        if isinstance(node, ast.ClassDef)
    )
    declared = (line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign))
    return frozenset(target.id for target in declared if isinstance(target, ast.Name))


def own_flag(name: str) -> str:
    """What to do instead of setting engine argument ``name``, a key of OWN_FLAGS."""
    return f"set {OWN_FLAGS[name]} instead" if OWN_FLAGS[name] else "it cannot be changed"
