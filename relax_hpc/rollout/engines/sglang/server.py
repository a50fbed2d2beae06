"""`python -m relax_hpc.rollout.engines.sglang.server ARGS.json`: an SGLang server that suits a run.

ARGS.json: {"server": {ServerArgs field: value}, "key_file": path, "socket": number of a descriptor,
"routes_as_drawn": see `first_routes`, "flags": key of the configuration, "takes_media": whether
prompts may have some}. The key is read here, so that it is in no command line, environment or log.
The socket listens already, and is inherited. SGLang's child interpreters import this module again
before anything else (multiprocessing's spawn), which is how they get the CPU hooks, the loader of
weights, the redaction and the tie to their parent as well.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from relax_hpc.base.errors import EXIT_CONFIG
from relax_hpc.net.rendezvous.process import die_with_parent, set_private_umask
from relax_hpc.rollout.engines.sglang import first_routes, media, slab_loader
from relax_hpc.rollout.engines.sglang.cpu import stand_ins
from relax_hpc.rollout.engines.sglang.flags import ROUTES_FLAG

_OF_ONE_GROUP = {"dist_init_addr": None, "nnodes": 1, "dp_size": 1}
"""Arguments that are others for servers with several groups of ranks, or on several nodes; they
meet SGLang's way."""


def main(settings: dict[str, Any], key: str) -> None:
    """Serve until interrupted. Exits 78 with one line on stderr if a flag is unknown."""
    from sglang.srt.server_args import ServerArgs

    _check_flags(
        settings["flags"], settings["server"], list(inspect.signature(ServerArgs).parameters)
    )
    _stay_private(settings["server"])
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    if stand_ins.installed():
        _fork_children()
    _serve_on(socket.socket(fileno=settings["socket"]))
    try:
        # One key for all endpoints: with an admin key alone, those that generate would be open.
        run_server(ServerArgs(**settings["server"], api_key=key, admin_api_key=key))
    except KeyboardInterrupt:
        print("interrupted: the engine was closed", file=sys.stderr)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _serve_on(listening: socket.socket) -> None:
    """Have uvicorn serve on a socket that listens already; SGLang would have it open one of its
    own."""
    from sglang.srt.entrypoints.http_server import uvicorn

    # Non-inheritable again, and closed in copies of this process: no child of it answers requests.
    listening.set_inheritable(False)
    os.register_at_fork(after_in_child=listening.close)
    run = uvicorn.Server.run
    uvicorn.Server.run = lambda server: run(server, [listening])


def _fork_children() -> None:
    """Have SGLang's processes begin as copies of this one, which has imported what they need, and
    not from nothing.

    SGLang spawns them for the sake of CUDA, whose state no copy can use.
    """
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    os.register_at_fork(after_in_child=die_with_parent)


def _check_flags(key: str, flags: dict[str, Any], known: list[str]) -> None:
    for name in flags:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(
                name, known, n=1, cutoff=0
            )
            _refuse(f"{key}.{name}: SGLang has no such server argument; the nearest is {near[0]}")


def _refuse(line: str) -> NoReturn:
    print(line, file=sys.stderr, flush=True)
    sys.exit(EXIT_CONFIG)


def _stay_private(server: dict[str, Any]) -> None:
    """Keep torch.distributed from listening on every interface, which its store of a `tcp://`
    address does.

    The ranks of one node meet in a file in this process's memory instead.
    """
    if all(server.get(name, one) == one for name, one in _OF_ONE_GROUP.items()):
        file = os.memfd_create("rendezvous")
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = (
            f"file:///proc/{os.getpid()}/fd/{file}"
        )
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _redact(key: str) -> None:
    """Keep the key out of log messages: SGLang logs its server arguments, keys and all."""
    make = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if key in (message := record.getMessage()):
            record.msg, record.args = message.replace(key, "***"), ()
        return record

    logging.setLogRecordFactory(factory)


def _leave_no_semaphore() -> None:
    """Progress bars lock each other out over processes by a named semaphore, which a kill would
    leave in /dev/shm."""
    from tqdm.std import TqdmDefaultWriteLock

    TqdmDefaultWriteLock.mp_lock = None


def _prepare() -> tuple[dict[str, Any], str]:
    """Prepare the server and its children before they import SGLang; settings, and the key of the
    API."""
    settings = json.loads(Path(sys.argv[1]).read_bytes())
    die_with_parent()
    set_private_umask()
    key = Path(settings["key_file"]).read_text()
    _redact(key)
    _leave_no_semaphore()
    stand_ins.install()
    slab_loader.install()
    if settings["server"].get(ROUTES_FLAG):
        first_routes.install(settings["routes_as_drawn"])
    if settings["takes_media"]:
        media.install(Path(settings["server"]["model_path"]))
    return settings, key


if __name__ in ("__main__", "__mp_main__"):
    prepared = _prepare()
if __name__ == "__main__":
    main(*prepared)
