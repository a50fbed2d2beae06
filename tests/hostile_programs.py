"""Programs that a policy may write to harm, and what becomes of each: `python -m tests.hostile_programs [NAME...]`
prints that as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys

from relax_hpc.reward_settings import CodeSettings
from relax_hpc.rewards.jail import Jail

SETTINGS = CodeSettings(memory_mb=512, disk_mb=16, processes=8)
LIMIT_S, ENDLESS_S = 60.0, 1.5
PROGRAMS = {
    "endless": "while True: pass",
    "sleeps": "import subprocess; subprocess.Popen(['sleep', '1000']); import time; time.sleep(1000)",
    "forks": """
import os, time
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(1000)
        children += 1
except OSError:
    print(children)
""",
    "memory": "print(len(bytearray(2 << 30)))",
    "one file": "open('large', 'wb').write(bytes(64 << 20)); print('written')",
    "many files": """
written = 0
try:
    while written < 64:
        open(f'file-{written}', 'wb').write(bytes(1 << 20))
        written += 1
except OSError:
    print(written)
""",
    "prints": "while True: print('x' * 1000)",
    "network": """
import socket
def reached(host, port):
    with socket.socket() as ours:
        ours.settimeout(5)
        return ours.connect_ex((host, port)) == 0
listening = socket.create_server(('127.0.0.1', 0))
print(reached(*listening.getsockname()), socket.if_nameindex())
""",
    "looks around": """
import os
print(sorted(os.listdir('/')), os.listdir('.'))
for path in ('/usr/here', '/bin/here'):
    try:
        open(path, 'w')
    except OSError as error:
        print(error.errno)
""",
    "kills": """
import os, signal
try:
    os.kill(-1, signal.SIGKILL)
except ProcessLookupError:
    print('alone')
""",
    "becomes root": """
import ctypes, os
libc = ctypes.CDLL(None)
print(os.getuid() != 0, libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), os.path.exists('/proc/1'))
""",
    "speaks": "print(input()[::-1])",
}


def main(names: list[str]) -> None:
    """Run those of ``names``, or all."""
    jail = Jail(SETTINGS)
    for name in names or PROGRAMS:
        ran = jail.run(PROGRAMS[name], "desserts", ENDLESS_S if name in ("endless", "sleeps") else LIMIT_S)
        print(json.dumps({"name": name, **dataclasses.asdict(ran), "output": ran.output[:1000]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
