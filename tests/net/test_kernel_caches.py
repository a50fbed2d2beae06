"""Archives of compiled kernels: whole, of this user and of this machine, or not used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.local_dir import COMPILED, LOCAL_DIR
from relax_hpc.base.machine.facts import Facts
from relax_hpc.base.machine.gpu_vendors.vendor import Driver
from relax_hpc.config import Config
from relax_hpc.net.kernel_caches import archive, node
from relax_hpc.net.kernel_caches.archive import ArchiveError, pack, unpack
from relax_hpc.net.kernel_caches.key import archive_name, key_of_machine, model_shape
from relax_hpc.net.kernel_caches.node import (
    Keeper,
    KernelCaches,
    archive_folder,
    keep_new_files,
    list_files,
    open_kernel_caches,
    take_refusal,
    unpack_once,
)
from tests.effort import effort
from tests.helpers.small_disk import small_disk

KEY = {"architecture": "x86_64", "driver": "580.65.06", "torch": "2.13.0"}
PROGRAM = 0o700


def node_with(folder: Path, shared: Path, key: dict[str, str] | None = None) -> KernelCaches:
    """Caches of a node whose own disk is ``folder``."""
    folder.mkdir(exist_ok=True)
    shared.mkdir(mode=0o700, exist_ok=True)
    own_key = KEY if key is None else key
    return KernelCaches(shared / archive_name(KEY), folder, own_key)


def write_kernel(root: Path, name: str, data: bytes = b"kernel") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in list_files(root)}


def test_kernels_of_one_node_are_there_on_the_next(tmp_path: Path) -> None:
    first = node_with(tmp_path / "first", tmp_path / "shared")
    unpack_once(first)
    assert keep_new_files(first) == "", "nothing was compiled"
    launcher = write_kernel(first.root, "triton/AB/launcher.so", b"\x7fELF" * 1000)
    launcher.chmod(PROGRAM)
    os.utime(launcher, ns=(1_700_000_000_123_456_789,) * 2)
    write_kernel(first.root, "flashinfer/.cache/flashinfer/90a/.ninja_log")
    group = {"child_paths": {"launcher.so": str(launcher)}}
    write_kernel(first.root, "triton/AB/__grp__launcher.json", json.dumps(group).encode())
    for name in (
        "triton/AB/tmp.pid_7_x/launcher.so",
        "sglang/jit/sm_90/build-1/.staging-2/x.so",
        "sglang/deep_gemm/locks/a.lock",
        "sglang/gpu_p2p_access_cache_for_0,1.json",
        "huggingface/token",
    ):
        write_kernel(first.root, name)
    (first.root / "triton" / "link").symlink_to(tmp_path)
    assert keep_new_files(first) == f"3 new files, now 3 (0.0 MB) in {first.archive}"
    assert keep_new_files(first) == "", "the archive has them"
    assert list(first.archive.parent.iterdir()) == [first.archive]
    assert first.archive.stat().st_mode & 0o077 == 0

    second = node_with(tmp_path / "second", tmp_path / "shared")
    unpack_once(second)
    assert list_files(second.root).keys() == list_files(first.root).keys()
    copy = second.root / "triton/AB/launcher.so"
    assert copy.read_bytes() == launcher.read_bytes()
    assert copy.stat().st_mtime_ns == launcher.stat().st_mtime_ns
    assert copy.stat().st_mode & 0o777 == PROGRAM
    moved = json.loads((second.root / "triton/AB/__grp__launcher.json").read_text())
    assert moved["child_paths"] == {"launcher.so": str(copy)}, "Triton would compile again"
    assert keep_new_files(second) == ""


def test_other_tools_can_read_an_archive(tmp_path: Path) -> None:
    caches = node_with(tmp_path / "node", tmp_path / "shared")
    write_kernel(caches.root, "triton/AB/kernel.cubin")
    keep_new_files(caches)
    frames = zstandard.ZstdDecompressor().stream_reader(
        caches.archive.open("rb"), read_across_frames=True
    )
    with tarfile.open(fileobj=frames, mode="r|") as tar:
        assert tar.getnames() == ["triton/AB/kernel.cubin", "manifest.json"]


@settings(
    max_examples=effort(60, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(damage=st.data())
def test_a_damaged_archive_is_never_used(tmp_path: Path, damage: st.DataObject) -> None:
    """A byte that differs, a lost end, or bytes behind the end, anywhere in the file."""
    source, path = tmp_path / "source", tmp_path / "kernels.tar.zst"
    for number in range(3):
        write_kernel(source, f"triton/{number}/kernel.cubin", bytes(range(256)) * number)
    pack(path, source, list_files(source), KEY)
    whole = path.read_bytes()
    header_end = whole.index(b"}  ") + 1
    payload = archive._FRAME.size + archive._HEADER_BYTES
    areas = {"header": (0, header_end), "padding": (header_end, payload)}
    areas |= {"payload": (payload, len(whole))}
    first, end = areas[damage.draw(st.sampled_from(sorted(areas)))]
    kind = damage.draw(st.sampled_from(("flip", "cut", "append")))
    # Times of files change the size of the payload between two runs of an example.
    position = first + damage.draw(st.integers(0, 1 << 20)) % (end - first)
    data = bytearray(whole)
    if kind == "flip":
        data[position] ^= damage.draw(st.integers(1, 255))
    elif kind == "cut":
        del data[position:]
    else:
        data += damage.draw(st.binary(min_size=1, max_size=20))
    path.write_bytes(data)
    target = Path(tmp_path, f"target-{len(list(tmp_path.iterdir()))}")
    target.mkdir()
    try:
        unpack(path, KEY, target)
    except ArchiveError as error:
        assert error.reason in ("damaged", "foreign", "too_large")
    else:
        # JSON allows other white space in the padding.
        assert kind == "flip" and bytes(data[position : position + 1]).isspace()
        assert contents(target) == contents(source)


def test_a_damaged_or_foreign_archive_is_ignored_and_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caches = node_with(tmp_path / "node", tmp_path / "shared")
    for damage, reason, text in (
        (lambda: caches.archive.write_bytes(b"x" * 100_000), "damaged", "not an archive"),
        (
            lambda: pack(caches.archive, caches.root, (), KEY | {"driver": "535.1"}),
            "foreign",
            "made for driver '535.1', here it is '580.65.06'",
        ),
        (lambda: caches.archive.chmod(0o620), "unsafe", "others can write"),
        (lambda: (caches.archive.unlink(), caches.archive.mkdir()), "unsafe", "not a regular"),
    ):
        damage()
        capsys.readouterr()
        unpack_once(caches)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 and text in lines[0] and "is ignored" in lines[0]
        unpack_once(caches)
        assert not capsys.readouterr().out, "one line for all processes of a node"
        assert take_refusal(caches) == reason and take_refusal(caches) == ""
        if caches.archive.is_dir():
            caches.archive.rmdir()
        write_kernel(caches.root, "triton/AB/kernel.cubin")
        assert keep_new_files(caches)
        other = node_with(tmp_path / f"after-{reason}", tmp_path / "shared")
        unpack_once(other)
        assert contents(other.root) == contents(caches.root)


def write_tar(path: Path, *members: tarfile.TarInfo) -> None:
    """An archive with a correct digest whose tar file has other members than `pack` writes."""
    with path.open("wb") as file:
        file.write(bytes(archive._FRAME.size + archive._HEADER_BYTES))
        payload = archive._HashedWriter(file)
        stream = zstandard.ZstdCompressor().stream_writer(payload, closefd=False)
        with stream, tarfile.open(fileobj=stream, mode="w|") as tar:
            for member in members:
                tar.addfile(member)
        header = archive._with_digest(archive.Header(KEY, "/", 100, 100), payload.digest)
        file.seek(0)
        file.write(archive._FRAME.pack(archive._FRAME_MAGIC, archive._HEADER_BYTES))
        file.write(header.to_json().ljust(archive._HEADER_BYTES))
    path.chmod(0o600)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../outside/x", "triton/../../x", "triton//x", "./triton/x", "x"]
)
def test_nothing_is_written_outside_of_the_caches(tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / "a.tar.zst", tarfile.TarInfo(name))
    (tmp_path / "target").mkdir()
    with pytest.raises(ArchiveError, match="not a path below a cache"):
        unpack(tmp_path / "a.tar.zst", KEY, tmp_path / "target")
    assert not any((tmp_path / "target").iterdir())


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_only_files_are_written(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("triton/x")
    member.type, member.linkname = kind, "/etc/passwd"
    write_tar(tmp_path / "a.tar.zst", member)
    (tmp_path / "target").mkdir()
    with pytest.raises(ArchiveError, match="not a file"):
        unpack(tmp_path / "a.tar.zst", KEY, tmp_path / "target")
    assert not any((tmp_path / "target").iterdir())


def test_archives_of_other_users_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = node_with(tmp_path / "node", tmp_path / "shared")
    write_kernel(caches.root, "triton/AB/kernel.cubin")
    keep_new_files(caches)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ArchiveError, match=f"a file of user {own}"):
        unpack(caches.archive, KEY, tmp_path / "target")
    monkeypatch.undo()
    caches.archive.rename(tmp_path / "real")
    caches.archive.symlink_to(tmp_path / "real")
    with pytest.raises(ArchiveError, match="not a regular file"):
        unpack(caches.archive, KEY, tmp_path / "target")
    shared = tmp_path / "open"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="other users could put code"):
        archive_folder(str(shared))


@pytest.mark.root
def test_a_folder_and_an_archive_of_another_account(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs files of two users: run as root")
    caches = node_with(tmp_path / "node", tmp_path / "shared")
    write_kernel(caches.root, "triton/AB/kernel.cubin")
    keep_new_files(caches)
    os.chown(caches.archive, 12345, 12345)
    with pytest.raises(ArchiveError, match="a file of user 12345"):
        unpack(caches.archive, KEY, tmp_path / "target")
    os.chown(caches.archive.parent, 12345, 12345)
    with pytest.raises(ConfigError, match="other users could put code"):
        archive_folder(str(caches.archive.parent))


def test_nodes_that_write_at_once_lose_no_kernel(tmp_path: Path) -> None:
    """Each node has kernels of its own. The archive has all of them once each has had its turn."""
    nodes = [node_with(tmp_path / f"node-{number}", tmp_path / "shared") for number in range(6)]
    for number, caches in enumerate(nodes):
        write_kernel(caches.root, f"triton/{number}/kernel.cubin", bytes([number]) * 100)

    def keep(caches: KernelCaches) -> None:
        while keep_new_files(caches) is None:
            pass

    threads = [threading.Thread(target=keep, args=(caches,)) for caches in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    last = node_with(tmp_path / "last", tmp_path / "shared")
    unpack_once(last)
    assert contents(last.root) == {
        f"triton/{number}/kernel.cubin": bytes([number]) * 100 for number in range(6)
    }
    assert list(last.archive.parent.iterdir()) == [last.archive]


def test_processes_of_a_node_read_the_archive_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node_with(tmp_path / "first", tmp_path / "shared")
    write_kernel(first.root, "triton/AB/kernel.cubin")
    keep_new_files(first)
    reads: list[Path] = []
    monkeypatch.setattr(
        node, "unpack", lambda path, *rest: (reads.append(path), unpack(path, *rest))[1]
    )
    second = node_with(tmp_path / "second", tmp_path / "shared")
    threads = [threading.Thread(target=unpack_once, args=(second,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(reads) == 1 and contents(second.root) == contents(first.root)


def test_a_writer_that_was_killed_does_not_block_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = node_with(tmp_path / "node", tmp_path / "shared")
    write_kernel(caches.root, "triton/AB/kernel.cubin")
    lease = caches.archive.with_name(f"{caches.archive.name}.lease")
    for content in ("", '{"until": 99999999999.0}'):
        lease.write_text(content)
        assert keep_new_files(caches) is None, "its writer may work"
    monkeypatch.setattr(node, "LEASE_S", -1.0)
    lease.write_text("")
    assert keep_new_files(caches)
    assert not lease.exists()
    # A process that was killed while it unpacked.
    caches.unpacking.mkdir()
    write_kernel(caches.unpacking, "triton/AB/half.cubin")
    caches.marker.unlink()
    with subprocess.Popen(["true"]) as dead:
        pass
    caches.claim("unpack").write_text(str(dead.pid))
    unpack_once(caches)
    assert not caches.unpacking.exists() and not caches.claim("unpack").exists()
    assert list(list_files(caches.root)) == ["triton/AB/kernel.cubin"]


def test_a_full_disk_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First the shared filesystem is full, then the disk of the node."""
    with small_disk(tmp_path / "disk") as disk:
        caches = node_with(tmp_path / "node", disk.folder / "shared")
        write_kernel(caches.root, "triton/AB/kernel.cubin", os.urandom(1 << 20))
        disk.fill(left=1 << 16)
        with pytest.raises(OSError, match="No space"):
            keep_new_files(caches)
        assert list(caches.archive.parent.iterdir()) == [], "it leaves no part of a file"
        disk.free()
        keep_new_files(caches)

        config = Config()
        config.site.kernel_cache = str(caches.archive.parent)
        local = disk.folder / "local"
        local.mkdir(mode=0o700)
        own = {name: value for name, value in os.environ.items() if name not in COMPILED}
        monkeypatch.setattr(os, "environ", own | {LOCAL_DIR: str(local)})
        monkeypatch.setattr(node, "read_key", lambda _: KEY)
        disk.fill(left=1 << 17)
        capsys.readouterr()
        assert open_kernel_caches(config, tmp_path) is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and "not used, kernels are compiled again" in lines[0]


def test_the_keeper_adds_kernels_when_its_role_is_done(tmp_path: Path) -> None:
    caches = node_with(tmp_path / "node", tmp_path / "shared")
    keeper, second = Keeper(caches), Keeper(caches)
    assert second._process is None, "one for each node"
    write_kernel(caches.root, "triton/AB/kernel.cubin")
    keeper.finish()
    assert keeper._process and keeper._process.returncode == 0
    assert not caches.claim("keep").exists()
    other = node_with(tmp_path / "other", tmp_path / "shared")
    unpack_once(other)
    assert contents(other.root) == contents(caches.root)


def test_the_keeper_ends_with_its_role(tmp_path: Path) -> None:
    caches = node_with(tmp_path / "node", tmp_path / "shared")
    keeper = Keeper(caches)
    assert keeper._process and keeper._process.stdin
    write_kernel(caches.root, "triton/AB/kernel.cubin")
    keeper._process.stdin.close()
    assert keeper._process.wait(60) == 0
    assert not caches.archive.exists()


def test_keys_differ_where_kernels_differ(tmp_path: Path) -> None:
    gpu = Driver("580.65.06", ("NVIDIA H100 80GB HBM3",) * 8, ("9.0",) * 8)
    facts = Facts(architecture="x86_64", libc="glibc 2.36", driver=gpu)
    key = key_of_machine(facts, "avx2 avx512f")
    others = [
        key_of_machine(facts._replace(architecture="aarch64"), "avx2 avx512f"),
        key_of_machine(facts._replace(driver=gpu._replace(version="590.1")), "avx2 avx512f"),
        key_of_machine(facts._replace(driver=Driver()), "avx2 avx512f"),
        key_of_machine(facts, "avx2"),
        key | {"torch": "2.14.0"},
    ]
    assert len({archive_name(entry) for entry in (key, *others)}) == 1 + len(others)
    assert archive_name(key).startswith("x86_64-9.0-") and key["torch"] and key["sglang"]
    shapes = []
    for fields in (
        {"hidden_size": 8},
        {"hidden_size": 8, "_name_or_path": "/x"},
        {"hidden_size": 9},
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        shapes.append(model_shape(tmp_path))
    assert shapes[0] == shapes[1] != shapes[2]


COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def scale(values, count, BLOCK: tl.constexpr):
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + positions, 2 * tl.load(values + positions, positions < count), positions < count)

def compile_kernel():
    # Whether the kernel was in the cache, for each compilation.
    hits = []
    triton.knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    types = {"values": "*fp32", "count": "i32", "BLOCK": "constexpr"}
    triton.compile(ASTSource(scale, types, {(2,): 256}), target=GPUTarget("cuda", 90, 32))
    return hits
"""
NOT_INTERPRETED = {"TRITON_INTERPRET": "0"}
"""Tests may have Triton interpret its kernels, which these tests compile."""


def test_the_second_node_compiles_no_triton_kernel(tmp_path: Path) -> None:
    """Real compilations for an H100 in two processes, each with the disk of another node."""
    pytest.importorskip("triton")
    script = tmp_path / "compile.py"
    script.write_text(f"{COMPILE}\nprint(compile_kernel())")
    hits = []
    for name in ("first", "second"):
        caches = node_with(tmp_path / name, tmp_path / "shared")
        unpack_once(caches)
        before = list_files(caches.root)
        environment = os.environ | NOT_INTERPRETED
        environment |= {"TRITON_CACHE_DIR": str(caches.root / "triton")}
        result = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        hits.append(result.stdout.strip())
        assert bool(keep_new_files(caches)) is (name == "first")
        if name == "second":
            assert list_files(caches.root).keys() == before.keys()
    assert hits == ["[False]", "[True]"]
