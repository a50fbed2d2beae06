"""Sampler of the resources of a rank: a thread that looks at its processes and GPUs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from relax_hpc.base.disk_waits import AppendFile
from relax_hpc.base.log_rotation import rotate_closed_file
from relax_hpc.base.machine.gpu_vendors import (
    GpuReading,
    GpuSensors,
    GpuVendor,
    NoGpuAnswer,
    VisibleGpus,
)
from relax_hpc.base.metrics.resource_samples import (
    GpuUse,
    ProcessUse,
    Sample,
    count_errors_by_node,
    read_last_samples,
    samples_path,
    tags_of_samples,
)
from relax_hpc.base.processes import command_text

_ROTATION_BYTES, _KEPT_PARTS = 8 << 20, 4
_MAX_NAME_CHARS = 40
_MAX_REPORTS = 16
"""Errors of one kind that are reported after a sample, at most."""


class ResourceSampler:
    """Samples of this process and of the processes that it has started.

    The thread only reads, and every error of the disk, of a process or of a driver is ignored: the
    values are then missing.
    """

    def __init__(
        self,
        logs: Path,
        role: str,
        rank: int,
        interval_s: float,
        gpus: GpuVendor | None = None,
        gathers: bool = False,
        on_gpu_error: Callable[[str, str], object] | None = None,
    ) -> None:
        """``interval_s``: seconds between two samples; 0: none are taken. ``gpus``: vendor of the
        GPUs to sample; None: none. ``gathers``: whether `metrics` has the values of all ranks of
        the role. ``on_gpu_error``: called in the thread, with a node and the code of an error, for
        each error of the driver that a sample has first."""
        self._on_gpu_error = on_gpu_error
        self._known_errors = Counter[tuple[str, str]]()
        """Number of errors by node and code, of which `on_gpu_error` was called."""
        self._role, self._rank, self._vendor = role, rank, gpus
        self._logs, self._interval_s, self._gathers = logs, interval_s, gathers
        # The host name may differ from Slurm's name, and all nodes of a sandbox share it.
        self._node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._tree = ProcessTree()
        self._gpu_totals = GpuTotals()
        self._began = time.monotonic()
        self._peak_memory_bytes = 0
        self._sensors: GpuSensors | None = None
        self._metrics: dict[str, float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resources", daemon=True)
        if interval_s:
            self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Metrics of the newest samples; empty before the first."""
        return self._metrics

    def close(self, timeout_s: float = 1.0) -> None:
        """Write a last sample. A driver that hangs is not waited for."""
        self._end.set()
        if self._interval_s:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        if self._vendor:
            self._sensors = self._vendor.open_sensors()
        path = samples_path(self._logs, self._role, self._rank)
        file = AppendFile(path)
        is_last = False
        while True:
            sample = self.take()
            file.write(sample.to_line())
            file.flush()
            self._publish(sample)
            if is_last:
                break
            with contextlib.suppress(OSError):
                if path.stat().st_size > _ROTATION_BYTES:
                    file.close()
                    rotate_closed_file(path, _KEPT_PARTS)
                    file = AppendFile(path)
            is_last = self._end.wait(self._interval_s)
        file.close()
        if self._sensors:
            self._sensors.close()

    def take(self) -> Sample:
        """Take a sample now."""
        now = time.monotonic()
        processes = self._tree.read(now)
        memory_bytes = sum(process.memory_bytes for process in processes)
        self._peak_memory_bytes = max(self._peak_memory_bytes, memory_bytes)
        return Sample(
            time=round(time.time(), 3),
            node=self._node,
            seconds=round(now - self._began, 3),
            cpu_s=round(self._tree.cpu_s, 2),
            peak_memory_bytes=self._peak_memory_bytes,
            processes=processes,
            gpus=self._read_gpus(now),
        )

    def _read_gpus(self, now: float) -> list[GpuUse]:
        if self._sensors is None or self._vendor is None:
            return []
        try:
            readings = self._sensors.read()
        except NoGpuAnswer:
            return []
        visible = self._vendor.visible_gpus(os.environ)
        return self._gpu_totals.add(
            [reading for reading in readings if is_visible(reading, visible)], now
        )

    def _publish(self, sample: Sample) -> None:
        samples = {(self._role, self._rank): sample}
        if self._gathers:
            with contextlib.suppress(OSError):
                samples = read_last_samples(self._logs) | samples
        own_role = [each for (role, _), each in samples.items() if role == self._role]
        self._metrics = tags_of_samples(self._role, own_role)
        if self._on_gpu_error:
            errors = count_errors_by_node(own_role)
            for (node, code), count in (errors - self._known_errors).items():
                for _ in range(min(count, _MAX_REPORTS)):
                    self._on_gpu_error(node, code)
            self._known_errors |= errors


class ProcessTree:
    """This process and its descendants."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        """CPU seconds of all processes since their start. Those of a process that has ended count
        up to its last reading."""
        self._before: dict[tuple[int, float], float] = {}
        """(pid, start time) -> CPU seconds at the last reading."""
        self._read_at: float | None = None

    def read(self, now: float) -> list[ProcessUse]:
        """Present processes. ``now``: monotonic seconds."""
        elapsed_s = now - self._read_at if self._read_at is not None else 0.0
        before, self._before = self._before, {}
        uses = list[ProcessUse]()
        root = psutil.Process()
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                with process.oneshot():
                    key = process.pid, process.create_time()
                    times = process.cpu_times()
                    spent_s = times.user + times.system
                    memory_bytes, threads = process.memory_info().rss, process.num_threads()
                    descriptors = process.num_fds()
                    name = "rank" if process is root else command_text(process, _MAX_NAME_CHARS)
                self._before[key] = spent_s
                gained_s = spent_s - before.get(key, 0.0)
                self.cpu_s += gained_s
                cores = round(gained_s / elapsed_s, 3) if elapsed_s else 0.0
                use = ProcessUse(process.pid, name, cores, memory_bytes, threads, descriptors)
                uses.append(use)
        self._read_at = now
        return uses


class GpuTotals:
    """Totals of each GPU since the first reading."""

    def __init__(self) -> None:
        self._uses: dict[str, GpuUse] = {}
        self._energy_j: dict[str, float | None] = {}
        """Counter of the driver at the last reading."""
        self._read_at: float | None = None

    def add(self, readings: list[GpuReading], now: float) -> list[GpuUse]:
        """Uses after ``readings`` at ``now``, monotonic seconds."""
        elapsed_s = now - self._read_at if self._read_at is not None else 0.0
        self._read_at = now
        for reading in readings:
            previous = self._uses.get(reading.uuid)
            use = GpuUse(
                reading.uuid,
                reading.utilization or 0.0,
                reading.power_w or 0.0,
                reading.memory_used_bytes or 0,
            )
            if previous:
                use.energy_j = previous.energy_j + self._spent_j(reading, elapsed_s)
                use.busy_s = previous.busy_s + use.utilization * elapsed_s
                use.seconds = previous.seconds + elapsed_s
                use.errors = dict(previous.errors)
            for code in reading.errors:
                use.errors[str(code)] = use.errors.get(str(code), 0) + 1
            self._uses[reading.uuid] = use
            self._energy_j[reading.uuid] = reading.energy_j
        return [self._uses[reading.uuid] for reading in readings]

    def _spent_j(self, reading: GpuReading, elapsed_s: float) -> float:
        """Energy since the last reading, by the driver's counter, or else by the present power."""
        before = self._energy_j.get(reading.uuid)
        if before is None or reading.energy_j is None or reading.energy_j < before:
            return (reading.power_w or 0.0) * elapsed_s
        return reading.energy_j - before


def is_visible(reading: GpuReading, visible: VisibleGpus | None) -> bool:
    """Whether a process may use a GPU; ``visible``: see `GpuVendor.visible_gpus`."""
    if visible is None:
        return True
    return any(
        entry == reading.number or (not entry.isdigit() and reading.uuid.startswith(entry))
        for entry in visible.entries
    )
