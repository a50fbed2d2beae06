"""Samples of processes and GPUs: what is measured, totals, files that are torn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from relax_hpc.base.machine.gpu_vendors import GpuReading, NoGpuAnswer, VisibleGpus
from relax_hpc.base.machine.gpu_vendors.nvidia import Nvidia
from relax_hpc.base.metrics.resource_sampler import (
    GpuTotals,
    ProcessTree,
    ResourceSampler,
    is_visible,
)
from relax_hpc.base.metrics.resource_samples import (
    GpuUse,
    ProcessUse,
    Sample,
    read_last_samples,
    samples_path,
    tags_of_samples,
)
from relax_hpc.base.metrics.tags import find_declared_tag

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"


def test_cpu_time_of_processes_that_have_ended_counts() -> None:
    tree = ProcessTree()
    first = tree.read(10.0)
    assert [use.name for use in first][:1] == ["rank"] and first[0].cores == 0.0
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout and child.stdout.readline() == b"\n"
        (use,) = [use for use in tree.read(12.0) if use.pid == child.pid]
        # 0.3 s of CPU time, and its start, in the 2 s since the first reading.
        assert 0.13 <= use.cores < 1.0 and use.threads == 1 and use.descriptors >= 3
        assert use.memory_bytes == pytest.approx(psutil.Process(child.pid).memory_info().rss, 0.1)
        child.communicate(b"\n")
    spent_s = tree.cpu_s
    assert child.pid not in [use.pid for use in tree.read(13.0)] and tree.cpu_s >= spent_s > 0.3


def reading(energy_j: float | None, **fields: Any) -> GpuReading:
    known: dict[str, Any] = {"number": "1", "uuid": "GPU-a", "utilization": 0.5, "power_w": 100.0}
    known |= {"memory_used_bytes": 7, "memory_total_bytes": 9}
    return GpuReading(**(known | {"energy_j": energy_j} | fields))


def test_totals_of_gpus() -> None:
    """The driver's counter, or the power where it has none or was loaded again."""
    totals = GpuTotals()
    (use,) = totals.add([reading(5000.0, errors=(31,))], 0.0)
    assert (use.energy_j, use.seconds, use.errors) == (0.0, 0.0, {"31": 1})
    (use,) = totals.add([reading(5600.0, utilization=1.0, errors=(79, 31))], 4.0)
    assert (use.energy_j, use.busy_s, use.seconds) == (600.0, 4.0, 4.0)
    assert use.errors == {"31": 2, "79": 1}
    (use,) = totals.add([reading(3.0)], 6.0)
    assert use.energy_j == 800.0
    (use,) = totals.add([reading(None, utilization=None)], 7.0)
    assert use.energy_j == 900.0 and use.busy_s == 5.0


def test_gpus_of_other_processes_are_left_out() -> None:
    gpu = reading(None)
    assert is_visible(gpu, None)
    for entries, visible in ((("0", "1"), True), (("GPU-a",), True), (("0",), False), ((), False)):
        assert is_visible(gpu, VisibleGpus("V", "", entries)) is visible


class FakeNvml(ModuleType):
    """The functions of pynvml 13.615 that are used, for two GPUs; the second one is old."""

    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.NVMLError = type("NVMLError", (Exception,), {})
        for name in ("NotSupported", "NoPermission", "Timeout"):
            setattr(self, f"NVMLError_{name}", type(name, (self.NVMLError,), {}))
        self.events = [SimpleNamespace(device="gpu1", eventData=79)]
        self.lost = False
        self.freed: list[str] = []
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetHandleByIndex = lambda number: f"gpu{number}"
        self.nvmlDeviceGetIndex = lambda handle: int(handle[-1])
        self.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
        self.nvmlDeviceGetPowerUsage = lambda handle: 250_500
        self.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=3, total=10)
        self.nvmlEventSetCreate = lambda: "set"
        self.nvmlDeviceRegisterEvents = lambda handle, kinds, events: None
        self.nvmlEventSetFree = self.freed.append
        self.nvmlShutdown = lambda: self.freed.append("library")

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if handle == "gpu1":
            raise self.NVMLError_NotSupported
        return 1500

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        if not self.events:
            raise self.NVMLError_Timeout
        return self.events.pop()


def test_sensors_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that a GPU does not report are left out; a lost GPU is an error of one line."""
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sensors = Nvidia().open_sensors()
    assert sensors is not None
    first, second = sensors.read()
    assert first == GpuReading("0", "GPU-gpu0", 0.4, 250.5, 1.5, 3, 10, ())
    assert second.energy_j is None and second.errors == (79,)
    assert sensors.read()[1].errors == ()
    nvml.lost = True
    with pytest.raises(NoGpuAnswer, match="NVML: GPU is lost"):
        sensors.read()
    sensors.close()
    assert nvml.freed == ["set", "library"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvidia().open_sensors() is None


def sample(cores: float, **fields: Any) -> Sample:
    use = ProcessUse(1, "rank", cores, 100, 2, 3)
    gpu = GpuUse("GPU-a", 0.5, 300.0, 7, errors={"31": 2})
    known: dict[str, Any] = {"time": 1.0, "node": "n1", "seconds": 2.0, "cpu_s": 3.0}
    known |= {"peak_memory_bytes": 100, "processes": [use], "gpus": [gpu]}
    return Sample(**(known | fields))


def test_files_of_samples(tmp_path: Path) -> None:
    """The last complete line counts. Files of others and links are no samples."""
    path = samples_path(tmp_path, "actor", 1)
    path.write_bytes(sample(1.0).to_line() + sample(2.0).to_line() + b'{"time": 7, "no')
    samples_path(tmp_path, "actor", 0).write_bytes(b'[]\n{"time": 1}\n\0\0')
    (tmp_path / "resources-actor.jsonl").write_bytes(sample(9.0).to_line())
    assert read_last_samples(tmp_path) == {("actor", 1): sample(2.0)}
    tags = tags_of_samples("actor", [sample(1.0), sample(2.0)])
    assert tags["resources/actor_cores"] == 3.0 and tags["resources/actor_threads"] == 4.0
    assert tags["resources/actor_gpu_utilization"] == 0.5
    assert tags["resources/actor_gpu_power_w"] == 600.0
    assert tags["resources/actor_gpu_errors"] == 4.0
    assert all(find_declared_tag(tag).startswith("resources/<role>") for tag in tags)


def test_a_sampler_writes_until_it_is_closed(tmp_path: Path) -> None:
    """It has the values of other ranks of its role too, and writes a last sample."""
    samples_path(tmp_path, "actor", 1).write_bytes(sample(2.0).to_line())
    samples_path(tmp_path, "critic", 0).write_bytes(sample(50.0).to_line())
    errors: list[tuple[str, str]] = []
    sampler = ResourceSampler(
        tmp_path,
        "actor",
        0,
        60.0,
        gathers=True,
        on_gpu_error=lambda node, code: errors.append((node, code)),
    )
    deadline = time.monotonic() + 30
    while not sampler.metrics() and time.monotonic() < deadline:
        time.sleep(0.01)
    processes = 1 + len(psutil.Process().children(recursive=True))
    assert sampler.metrics()["resources/actor_processes"] == 1 + processes
    assert sampler.metrics()["resources/actor_cores"] < 50
    sampler.close(30.0)
    # Each error of another rank is reported once, although two samples have it.
    assert errors == [("n1", "31"), ("n1", "31")]
    lines = samples_path(tmp_path, "actor", 0).read_text().splitlines()
    assert len(lines) == 2 and f'"pid":{os.getpid()}' in lines[-1]
    idle = ResourceSampler(tmp_path, "rollout", 0, 0.0)
    idle.close()
    assert idle.metrics() == {} and not samples_path(tmp_path, "rollout", 0).exists()
