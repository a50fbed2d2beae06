"""`python -m relax_hpc.rollout.engines.sglang.server ARGS.json`: an SGLang server for a run.

ARGS.json: {"server": {ServerArgs field: value}, "key_file": path, "socket": number of a descriptor,
"routes_as_drawn": see `first_routes`, "flags": key of the configuration, "takes_media": whether
prompts may have media}. The key is read from a file, so that it is in no command line, environment
or log. The socket is inherited and listens already.

SGLang 0.5.21 starts its child interpreters by multiprocessing's spawn. They import this module
before anything else, and so get the CPU hooks, the weight loader, the redaction of the key and the
tie to their parent too.
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
from relax_hpc.net.rendezvous.process import (
    die_with_parent,
    install_stack_dump,
    set_private_umask,
)
from relax_hpc.rollout.engines.sglang import first_routes, media, slab_loader
from relax_hpc.rollout.engines.sglang.cpu import stand_ins
from relax_hpc.rollout.engines.sglang.flags import ROUTES_FLAG
from relax_hpc.rollout.engines.sglang.phases import IMPORTS_BEGIN, IMPORTS_END

_SINGLE_GROUP = {"dist_init_addr": None, "nnodes": 1, "dp_size": 1}
"""Values of these arguments for a server with one group of ranks on one node. Other servers use
SGLang's own rendezvous."""


def main(settings: dict[str, Any], key: str) -> None:
    """Serve until interrupted. Exits 78 with one line on stderr if a flag is unknown."""
    from sglang.srt.server_args import ServerArgs

    _check_flags(
        settings["flags"], settings["server"], list(inspect.signature(ServerArgs).parameters)
    )
    _use_private_rendezvous(settings["server"])
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    if stand_ins.installed():
        _fork_children()
    _serve_on(socket.socket(fileno=settings["socket"]))
    print(IMPORTS_END, flush=True)
    try:
        # The same key for all endpoints. If only admin_api_key is set, SGLang 0.5.21 serves
        # /generate without a key.
        run_server(ServerArgs(**settings["server"], api_key=key, admin_api_key=key))
    except KeyboardInterrupt:
        print("interrupted: the engine was closed", file=sys.stderr)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _serve_on(listening: socket.socket) -> None:
    """Make uvicorn serve on a socket that listens already."""
    # SGLang 0.5.21 passes host and port to uvicorn, which would open a socket itself.
    from sglang.srt.entrypoints.http_server import uvicorn

    # Children must not answer requests: spawned ones do not inherit the socket, forked ones close
    # it.
    listening.set_inheritable(False)
    os.register_at_fork(after_in_child=listening.close)
    run = uvicorn.Server.run
    uvicorn.Server.run = lambda server: run(server, [listening])


def _fork_children() -> None:
    """Make SGLang fork its processes from this one, which has imported their modules already."""
    # SGLang 0.5.21 spawns them because a fork cannot use the state of CUDA, which a node without a
    # GPU does not have.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    os.register_at_fork(after_in_child=die_with_parent)


def _check_flags(key: str, flags: dict[str, Any], known_flags: list[str]) -> None:
    for name in flags:
        if name not in known_flags:
            nearest = difflib.get_close_matches(name, known_flags, n=1)
            if not nearest:
                nearest = difflib.get_close_matches(name, known_flags, n=1, cutoff=0)
            _refuse(
                f"{key}.{name}: SGLang has no such server argument; the nearest is {nearest[0]}"
            )


def _refuse(line: str) -> NoReturn:
    print(line, file=sys.stderr, flush=True)
    sys.exit(EXIT_CONFIG)


def _use_private_rendezvous(server: dict[str, Any]) -> None:
    """Let the ranks of one node meet in a file in this process's memory."""
    # SGLang 0.5.21 uses a tcp:// address, for which torch.distributed's store (2.13) listens on
    # every interface.
    if all(server.get(name, value) == value for name, value in _SINGLE_GROUP.items()):
        file = os.memfd_create("rendezvous")
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = (
            f"file:///proc/{os.getpid()}/fd/{file}"
        )
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def _redact(key: str) -> None:
    """Remove the key from log messages."""
    # SGLang 0.5.21 logs its server arguments, including the keys.
    make_record = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        message = record.getMessage()
        if key in message:
            record.msg, record.args = message.replace(key, "***"), ()
        return record

    logging.setLogRecordFactory(factory)


def _disable_tqdm_semaphore() -> None:
    """Keep tqdm from creating a named semaphore."""
    # tqdm locks its output across processes by a named semaphore, which remains in /dev/shm if the
    # server is killed.
    from tqdm.std import TqdmDefaultWriteLock

    TqdmDefaultWriteLock.mp_lock = None


def _prepare() -> tuple[dict[str, Any], str]:
    """Prepare the server or one of its children before it imports SGLang. Returns the settings and
    the key."""
    settings = json.loads(Path(sys.argv[1]).read_bytes())
    die_with_parent()
    print(IMPORTS_BEGIN, flush=True)
    set_private_umask()
    # Forked children inherit the handler, too. SGLang 0.5.21 has no handler for this signal.
    install_stack_dump()
    key = Path(settings["key_file"]).read_text()
    _redact(key)
    _disable_tqdm_semaphore()
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
