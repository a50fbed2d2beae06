"""Slabs, and the plane that lends them to other processes of the node."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.net.transport import PlaneError, ShmPlane, SlabPool, shm
from relax_hpc.net.transport.slab import slab_size
from tests.helpers.plane_helpers import (
    NAMES,
    READ_S,
    TOKEN,
    Peer,
    digest,
    open_files,
    pattern,
    plane_here,
)
from tests.plain_user import plain_user

BIG = 20_000_000
LINUX = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


@pytest.fixture(scope="module")
def shm_maker() -> Iterator[Peer]:
    with Peer("shm") as peer:
        yield peer


def mapped() -> list[str]:
    """How this process has mapped each memfd of the project: `r--s`, or `rw-s`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if "memfd:relax-" in line]


def test_a_mapped_record_cannot_be_written(shm_maker):
    # What other tests have not let go yet is no matter of this one.
    before = Counter(mapped())
    with plane_here("shm") as reader:
        record = reader.read(shm_maker.publish(next(NAMES), 10_000), READ_S)
        with pytest.raises(TypeError, match="read-only"):
            record[0] = 1
        assert not np.frombuffer(record, np.uint8).flags.writeable
        assert sorted((Counter(mapped()) - before).elements()) == ["r--s", "r--s", "rw-s"], (
            "the last is its own board"
        )


def test_memory_of_a_maker_is_sealed(shm_maker):
    """Even to one who opens it by the maker's own file descriptor."""
    shm_maker.publish(next(NAMES), 10_000)
    files = [
        path
        for path in Path(f"/proc/{shm_maker.pid}/fd").iterdir()
        if "memfd:relax-" in str(path.readlink())
    ]
    assert len(files) >= 2, "the board and a memfd of slabs"
    for path in files:
        with path.open("rb+") as file:
            with pytest.raises(PermissionError):
                file.truncate(0)
            if LINUX >= (5, 1):
                with pytest.raises(PermissionError):
                    mmap.mmap(file.fileno(), 4096)


def test_known_memory_needs_no_word_of_its_maker(shm_maker):
    """Not while it hangs, and not after it was killed."""
    with plane_here("shm") as reader, Peer("shm") as maker:
        # The third and fourth of a size share a piece of memory.
        *_, first, second = (maker.publish(next(NAMES), 5000, seed) for seed in range(4))
        far = maker.publish(next(NAMES), BIG)
        reader.read(first, READ_S)
        maker.stop()
        assert digest(reader.read(second, READ_S)) == digest(pattern(5000, 3))
        maker.go_on()
        maker.kill()
        assert digest(reader.read(second, READ_S)) == digest(pattern(5000, 3))
        with pytest.raises(PlaneError):
            reader.read(far, READ_S)
        assert first["socket"] not in Path("/proc/net/unix").read_text()


def test_memory_of_a_dead_maker_is_let_go_when_another_is_met(shm_maker):
    with plane_here("shm") as reader:
        with Peer("shm") as maker:
            reader.read(maker.publish(next(NAMES), 5000), READ_S)
        before = len(open_files())
        reader.read(shm_maker.publish(next(NAMES), 5000), READ_S)
        assert len(open_files()) == before


def test_nothing_is_copied_from_a_slab():
    pool = SlabPool()
    plane = ShmPlane(TOKEN, pool)
    slab = pool.take(100_000)
    record = plane.read(plane.publish("r", slab.memory[64:5000]), READ_S)
    slab.memory[64] = 42
    assert record[0] == 42 and pool.taken == slab.size
    copied = plane.read(plane.publish("copied", memoryview(b"elsewhere")), READ_S)
    assert bytes(copied) == b"elsewhere" and pool.taken > slab.size
    plane.retire("copied")
    assert pool.taken == slab.size
    plane.close()
    pool.close()


def test_another_node_is_not_reached(shm_maker):
    record = shm_maker.publish(next(NAMES), 10)
    with plane_here("shm") as reader:
        with pytest.raises(PlaneError, match="take another plane"):
            reader.read(record | {"node": "another"}, READ_S)


def test_a_full_board_is_said(monkeypatch):
    monkeypatch.setattr(shm, "MAX_RECORDS", 3)
    with plane_here("shm") as plane:
        for name in "abc":
            plane.publish(name, memoryview(name.encode()))
        with pytest.raises(PlaneError, match="3 records are published, which is the maximum"):
            plane.publish("d", memoryview(b"d"))
        plane.retire("b")
        assert bytes(plane.read(plane.publish("d", memoryview(b"d")), READ_S)) == b"d"


@pytest.mark.root
def test_another_user_is_refused():
    with plain_user() as user, plane_here("shm") as maker:
        if os.getuid() == user.entry.pw_uid:
            pytest.skip("needs root, to be another user")
        record = maker.publish("r", memoryview(b"mine"))
        words = (
            user.python,
            "-m",
            "tests.helpers.plane_helpers",
            "read",
            "shm",
            TOKEN.hex(),
            json.dumps(record),
        )
        assert (
            f"the peer is of user {os.getuid()}, allowed is {user.entry.pw_uid}"
            in user.run(*words).stdout
        )
        code = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + "
            "sys.argv[1]); print(s.recv(1))"
        )
        assert user.run(user.python, "-c", code, record["socket"]).stdout.strip() == "b''", (
            "hung up on at once"
        )


# -- slabs -----------------------------------------------------------------------------------------


@given(size=st.integers(0, 1 << 40))
def test_slab_sizes_waste_little_and_are_their_own_size(size):
    found = slab_size(size)
    assert (
        size <= found <= max(1.25 * size, size + 4095, 4096)
        and found % 4096 == 0
        and slab_size(found) == found
    )


@settings(max_examples=25)
@given(steps=st.lists(st.one_of(st.integers(0, 300_000), st.none()), max_size=40))
def test_no_two_slabs_share_a_byte(steps):
    pool, held = SlabPool(), []
    for number, size in enumerate(steps):
        if size is not None:
            slab = pool.take(size)
            slab.memory[:] = bytes([number]) * slab.size
            held.append((number, slab))
            assert size <= slab.size and pool.locate(slab.memory) == (slab.number, slab.offset)
        elif held:
            pool.give_back(held.pop(len(held) // 2)[1])
        assert pool.taken == sum(slab.size for _, slab in held) <= pool.bytes
    assert all(bytes(slab.memory) == bytes([number]) * slab.size for number, slab in held)
    pool.close()


def test_memory_is_kept_for_the_next_who_takes():
    pool = SlabPool()
    for size in (10_000_000, 9_000_000, 10_000_000, 6_000_000):
        pool.give_back(pool.take(size))
    assert pool.bytes == slab_size(10_000_000)
    small = [pool.take(100) for _ in range(1000)]
    assert len({slab.fd for slab in small}) == 11, "each time as many more as there are"
    assert pool.bytes == slab_size(10_000_000) + 1024 * slab_size(100)
    pool.close()


def test_misuse_of_a_pool_is_named():
    pool, other = SlabPool(), SlabPool()
    slab = pool.take(1)
    with pytest.raises(ValueError, match="not taken from this pool"):
        other.give_back(slab)
    pool.give_back(slab)
    with pytest.raises(ValueError, match="given back before"):
        pool.give_back(slab)
    with pytest.raises(ValueError, match="found a size of -1"):
        pool.take(-1)
    assert pool.locate(memoryview(b"elsewhere")) is None and pool.locate(slab.memory[:0]) is None
    assert pool.open_read_only(99) is None


def test_no_memory_is_an_error_that_leaves_nothing(monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    pool, files = SlabPool(), open_files()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        pool.take(1)
    assert open_files() == files and pool.bytes == 0


def test_memory_shows_whose_it_is():
    pool = SlabPool()
    slab = pool.take(1)
    assert Path(f"/proc/self/fd/{slab.fd}").readlink().name.startswith("memfd:relax-slab-")
    pool.close()
