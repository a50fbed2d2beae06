"""What every plane promises, with makers and readers in processes of their own that die, hang and
come back."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.net.transport import Plane, PlaneError, SlabPool
from tests.helpers.plane_helpers import (
    NAMES,
    PLANES,
    READ_S,
    ROOT,
    TOKEN,
    Peer,
    digest,
    is_emulated,
    open_files,
    pattern,
    plane_here,
)
from tests.plain_user import plain_user
from tests.requirements import CHECKS, requires

pytestmark = pytest.mark.run

BIG = 5_000_000
SIZES = st.one_of(st.sampled_from([0, 1, 4095, 4096, 4097, 65_536, BIG]), st.integers(0, 200_000))


@pytest.fixture(scope="module", params=PLANES)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "rdma":
        requires("nixl")
    return request.param


@pytest.fixture(scope="module")
def maker(kind: str) -> Iterator[Peer]:
    with Peer(kind) as peer:
        yield peer


@pytest.fixture(scope="module")
def reader(kind: str) -> Iterator[Plane]:
    with plane_here(kind) as plane:
        yield plane


@settings(max_examples=40)
@given(size=SIZES, seed=st.integers(0, 2**32), copied=st.booleans())
def test_bytes_come_as_they_went(maker, reader, size, seed, copied):
    name = next(NAMES)
    record = reader.read(maker.publish(name, size, seed, copied), READ_S)
    assert (
        record.readonly and record.nbytes == size and digest(record) == digest(pattern(size, seed))
    )
    maker.call("retire", name=name)


def test_many_processes_read_at_once(kind, maker):
    sizes = [100, 70_000, BIG]
    records = [maker.publish(next(NAMES), size, size) for size in sizes]
    readers = [Peer(kind) for _ in range(3)]
    try:
        for one in readers:
            for record in records * 3:
                one.ask("read", descriptor=record)
        for one in readers:
            assert [one.answer() for _ in records * 3] == [
                digest(pattern(size, size)) for size in sizes
            ] * 3
    finally:
        for one in readers:
            one.__exit__()


def test_many_threads_read_at_once(maker, reader):
    sizes = range(1, 400_000, 10_001)
    records = [maker.publish(next(NAMES), size, size) for size in sizes]
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda record: digest(reader.read(record, READ_S)), records)
        assert list(found) == [digest(pattern(size, size)) for size in sizes]


def test_a_retired_record_is_gone(maker, reader):
    name = next(NAMES)
    record = maker.publish(name, 1000)
    reader.read(record, READ_S)
    maker.call("retire", name=name)
    with pytest.raises(PlaneError, match=f"{name}.*retired"):
        reader.read(record, READ_S)
    maker.call("retire", name=name)
    again = maker.publish(name, 1000, seed=1)
    assert digest(reader.read(again, READ_S)) == digest(pattern(1000, 1))


def test_a_name_is_published_once(kind):
    with plane_here(kind) as plane:
        record = plane.publish("twice", memoryview(b"first"))
        with pytest.raises(PlaneError, match="twice is published already"):
            plane.publish("twice", memoryview(b"second"))
        assert bytes(plane.read(record, READ_S)) == b"first"


def test_memory_that_is_used_again_gives_the_new_bytes(kind):
    pool = SlabPool()
    plane = PLANES[kind](TOKEN, pool)
    try:
        old = None
        for value in (1, 2, 3):
            slab = pool.take(50_000)
            slab.memory[:] = bytes([value]) * slab.size
            record = plane.publish("r", slab.memory[:50_000])
            assert bytes(plane.read(record, READ_S)) == bytes([value]) * 50_000
            if old is not None:
                with pytest.raises(PlaneError):
                    plane.read(old | {"name": "gone"}, READ_S)
            plane.retire("r")
            pool.give_back(slab)
            old = record
        assert pool.bytes == slab.size * (pool.bytes // slab.size) and pool.taken == 0
    finally:
        plane.close()
        pool.close()


def test_the_death_of_a_maker_concerns_its_own_records(kind, maker, reader):
    with Peer(kind) as mortal:
        seen, unseen = (mortal.publish(next(NAMES), size) for size in (1000, BIG))
        reader.read(seen, READ_S)
        mortal.kill()
    with pytest.raises(PlaneError):
        reader.read(unseen, READ_S)
    assert digest(reader.read(maker.publish(next(NAMES), 1000, 7), READ_S)) == digest(
        pattern(1000, 7)
    )
    with plane_here(kind) as newcomer, pytest.raises(PlaneError):
        newcomer.read(seen, READ_S)


def test_the_death_of_a_reader_concerns_nobody(kind, maker, reader):
    if kind == "rdma" and is_emulated():
        pytest.skip(
            "it may end the maker, for which reason emulated reads are refused outside of tests"
        )
    record = maker.publish(next(NAMES), BIG, 3)
    with Peer(kind) as mortal:
        mortal.call("read", descriptor=record)
        for _ in range(20):
            mortal.ask("read", descriptor=record)
        mortal.kill()
    assert digest(reader.read(record, READ_S)) == digest(pattern(BIG, 3))


@pytest.mark.parametrize(
    "change",
    [
        *({"size": -1}, {"size": 1 << 62}, {"size": "7"}, {"surplus": 1}),
        *(
            {"port": 1 << 20},
            {"host": "\0"},
            {"maker": "another"},
            {"socket": "x" * 200},
            {"socket": "nobody"},
        ),
        *({"slot": 1 << 40}, {"serial": 0}, {"at": 1 << 40}, {"at": -1}, {"node": "elsewhere"}),
        *({"memfd": 10**6}, {"memfd": 1 << 70}, {"memfd": 7.5}, {"socket": []}, {"slot": "0"}),
    ],
    ids=str,
)
def test_a_wrong_descriptor_is_refused(maker, reader, change):
    record = maker.publish(next(NAMES), 1000)
    if change.keys() <= record.keys() or "surplus" in change:
        with pytest.raises(PlaneError):
            reader.read(record | change, READ_S)
    with pytest.raises(PlaneError):
        reader.read({}, READ_S)
    assert digest(reader.read(record, READ_S)) == digest(pattern(1000, 0))


def test_nothing_is_left_when_planes_are_closed(kind):
    gc.collect()
    threads, files = threading.enumerate(), open_files()
    with plane_here(kind) as one, plane_here(kind) as other:
        record = one.publish("r", memoryview(pattern(BIG, 0)))
        assert digest(other.read(record, READ_S)) == digest(pattern(BIG, 0))
        assert len(threading.enumerate()) > len(threads) and len(open_files()) > len(files)
    gc.collect()
    assert threading.enumerate() == threads and open_files() == files
    with pytest.raises(PlaneError):
        other.read(record, READ_S)


def test_a_user_without_rights_can_do_it_all(kind):
    with plain_user() as user:
        done = user.run(user.python, "-m", "tests.helpers.plane_helpers", "both", kind, TOKEN.hex())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digest(pattern(100_000, 0))] * 2


def test_the_benchmark_compares_planes_with_a_memcpy():
    words = [
        sys.executable,
        ROOT / "tools/bench/planes.py",
        "--size",
        "4KiB",
        "--rounds",
        "1",
        "--json",
    ]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    nixl = ["rdma", "nixl"] if CHECKS["nixl"][0]() else []
    rows = [(result["plane"], result["size"]) for result in results]
    assert rows == [(name, 4096) for name in ("memcpy", "shm", "tcp", *nixl)]
    assert all(result["ratio"] > 0 and result["median_s"] > 0 for result in results)
