"""Programs that a policy may write to harm, and what becomes of each: `python -m
tests.rewards.hostile_programs [NAME...]` prints that as JSON, and which of their processes are left.

They are the smallest programs of each kind of attack: use up the node, reach something outside,
stay alive, disturb the processes that run them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import psutil

from relax_hpc.base.reward_settings import CodeSettings
from relax_hpc.rewards.jail import Jail
from relax_hpc.rewards.jail_filter import ARCHITECTURES
from relax_hpc.rewards.jail_interpreter import find_interpreter

SETTINGS = CodeSettings(memory_mb=512, disk_mb=16, processes=8)
LIMIT_S, ENDLESS_S = 60.0, 1.5
PR_SET_CHILD_SUBREAPER = 36
AT_ONCE = 4
LITTLE_MEMORY = dataclasses.replace(SETTINGS, memory_mb=128, disk_mb=4)
"""Settings of programs whose name begins with `little memory`."""
ARCHITECTURE = ARCHITECTURES[platform.machine()]
_CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else "done"
"""
PROGRAMS = {
    "endless": "while True: pass",
    "sleeps": "import subprocess; subprocess.Popen(['sleep', '1000']); import time; "
    "time.sleep(1000)",
    "leaves a daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
""",
    "stops": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    # Limits of memory, processes, files and output.
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
    "threads": """
import os, threading
threads = 0
try:
    while threads < 1000:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        threads += 1
except RuntimeError:
    print(threads, flush=True)
    os._exit(0)
""",
    "memory": "print(len(bytearray(2 << 30)))",
    "shared memory": "import mmap; print(len(mmap.mmap(-1, 1 << 30)))",
    # Each process is within its limit, all of them together are not.
    "little memory: children": """
import os, time
for _ in range(4):
    if os.fork() == 0:
        memory = bytearray(80 << 20)
        time.sleep(1000)
os.wait()
""",
    "little memory: orphans": """
import os, time
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            memory = bytearray(80 << 20)
            time.sleep(1000)
        os._exit(0)
    os.wait()
time.sleep(1000)
""",
    "little memory: sockets": """
import os, socket, time
for _ in range(3):
    if os.fork() == 0:
        break
ours = []
for _ in range(120):
    ours += socket.socketpair()
    for end in ours[-2:]:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        try:
            while end.send(bytes(1 << 15), socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            pass
time.sleep(1000)
""",
    "little memory: shared": """
import os, time
memory = bytearray(80 << 20)
read_fd, write_fd = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        os.close(write_fd)
        os.read(read_fd, 1)
        os._exit(sum(memory[::4096]))
os.close(read_fd)
# Time for the limit to be looked at.
time.sleep(0.3)
os.close(write_fd)
print(*(os.wait()[1] for _ in range(4)))
""",
    "one file": "open('large', 'wb').write(bytes(64 << 20)); print('written')",
    "many files": """
written = 0
try:
    while written < 64:
        folder = ('/tmp', '.', '/dev/shm')[written % 3]
        open(f'{folder}/file-{written}', 'wb').write(bytes(1 << 20))
        written += 1
except OSError:
    print(written)
""",
    "inodes": """
count = 0
try:
    while count < 100_000:
        open(f'/tmp/{count}', 'w').close()
        count += 1
except OSError:
    print(count)
""",
    "prints": "while True: print('x' * 1000)",
    "fills its input": "import os; os.write(0, b'x')",
    # Calls, see `jail_filter`.
    "calls": f"""{_CALL}
print(*[call(number, -1, 0, 0, 0, 0) for number in {ARCHITECTURE.refused}])
print(*[call(number) for number in (457, 600, 1 << 30)])
print(*[call({ARCHITECTURE.clone}, flag | 17, 0, 0, 0, 0) for flag in (1 << 17, 1 << 28, 1 << 29, 1 << 30)])
""",
    "sockets": """
import socket
for family in range(1, 46):
    for make in (socket.socket, socket.socketpair):
        try:
            make(family)
            print(family, make.__name__)
        except OSError as error:
            if error.errno not in (97, 95, 93):
                print(family, make.__name__, error)
""",
    # The network, files and processes outside.
    "network": """
import socket
def reached(host, port):
    with socket.socket() as ours:
        ours.settimeout(5)
        return ours.connect_ex((host, port)) == 0
print(reached(*socket.create_server(('127.0.0.1', 0)).getsockname()))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    try:
        datagrams.sendto(b'x', ('127.0.0.1', 9))
    except OSError as error:
        print(error.strerror)
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
    "environment": "import os; print(sorted(os.environ), len(os.listdir('/dev')))",
    "kills": """
import os, signal
try:
    os.kill(-1, signal.SIGKILL)
except ProcessLookupError:
    print('alone')
""",
    "kills its group": "import os, signal; os.kill(0, signal.SIGKILL)",
    "interrupts init": """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
    try:
        os.kill(1, number)
    except PermissionError:
        pass
time.sleep(0.2)
print('running')
""",
    "becomes root": """
import ctypes, os
libc = ctypes.CDLL(None)
print(os.getuid() != 0, libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), os.path.exists('/proc/1'))
""",
    "changes devices": """
import os, stat
for change in (
    lambda: os.chmod('/dev/null', 0),
    lambda: os.mknod('/tmp/disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0)),
    lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
    lambda: __import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (-1, -1)),
):
    try:
        change()
        print('done')
    except (OSError, ValueError) as error:
        print(type(error).__name__)
""",
    # What works all the same.
    "speaks": "print(input()[::-1])",
    "multiprocessing": """
import multiprocessing
from multiprocessing import shared_memory
def square(number):
    return number * number
if __name__ == '__main__':
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    memory.unlink()
    with multiprocessing.Pool(2) as pool:
        print(memory.size, *pool.map(square, range(4)))
    queue = multiprocessing.get_context('spawn').SimpleQueue()
    child = multiprocessing.get_context('spawn').Process(target=queue.put, args=('spawned',))
    child.start()
    print(queue.get())
""",
    "numpy": "import numpy; print(int((numpy.eye(300) @ numpy.eye(300)).sum()))",
    "asyncio": """
import asyncio
async def main():
    child = await asyncio.create_subprocess_exec('echo', 'child', stdout=-1)
    print((await child.communicate())[0].decode())
asyncio.run(main())
""",
}


def main(names: list[str]) -> None:
    """Run those of ``names``, or all."""
    # Processes that lose their parent become children of this one, so that none is overlooked
    # below.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    usual, little = Jail(SETTINGS), Jail(LITTLE_MEMORY)

    def run(name: str) -> str:
        jail = little if name.startswith("little memory") else usual
        limit_s = ENDLESS_S if name in ("endless", "sleeps", "stops") else LIMIT_S
        ran = jail.run(PROGRAMS[name], "desserts", limit_s)
        return json.dumps({"name": name, **dataclasses.asdict(ran), "output": ran.output[:1000]})

    # Of an interpreter that lies in another folder than its packages, a program does not see them.
    parts = find_interpreter("", "").parts
    print(
        json.dumps(
            {"name": "packages", "are_shown": any(map(Path(numpy.__file__).is_relative_to, parts))}
        )
    )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in pool.map(run, names or PROGRAMS):
            print(line, flush=True)
    print(json.dumps({"name": "left", "programs": remaining_programs()}))


def remaining_programs() -> list[str]:
    """Pid and command of each process of a program that is there although all calls have
    returned."""
    remaining = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "main.py" in child.cmdline():
                remaining.append(f"{child.pid} {' '.join(child.cmdline())}")
    return remaining


if __name__ == "__main__":
    main(sys.argv[1:])
