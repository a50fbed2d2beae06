"""NVIDIA's sensors by NVML: utilisation, power, energy, memory, and XID errors.

Package nvidia-ml-py (`pynvml`) has the functions; the driver has the library. Without one of them
there are no sensors. Source: NVIDIA, "NVML API Reference", read on 2026-11-27.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from .vendor import GpuReading, GpuSensors, NoGpuAnswer

_MAX_EVENTS = 64
"""Errors that one reading takes, at most. A broken GPU can report hundreds a second."""


def open_nvml() -> "GpuSensors | None":
    """Sensors of this machine; None: the package, the library or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return _Nvml(pynvml)
    except pynvml.NVMLError:
        return None


class _Nvml(GpuSensors):
    """Sensors of NVML, which is initialized."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml: Any = nvml
        count = nvml.nvmlDeviceGetCount()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        self._events = self._watch_errors()

    def read(self) -> "list[GpuReading]":
        nvml = self._nvml
        try:
            errors = self._take_errors()
            readings = []
            for number, handle in enumerate(self._handles):
                rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
                power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
                energy_mj = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
                memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
                reading = GpuReading(
                    str(number),
                    str(nvml.nvmlDeviceGetUUID(handle)),
                    None if rates is None else rates.gpu / 100,
                    None if power_mw is None else power_mw / 1000,
                    None if energy_mj is None else energy_mj / 1000,
                    None if memory is None else int(memory.used),
                    None if memory is None else int(memory.total),
                    tuple(errors.get(number, ())),
                )
                readings.append(reading)
            return readings
        except nvml.NVMLError as error:
            raise NoGpuAnswer(f"NVML: {error}") from error

    def close(self) -> None:
        nvml = self._nvml
        try:
            if self._events is not None:
                nvml.nvmlEventSetFree(self._events)
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass

    def _ask(self, function: "Callable[[Any], Any]", handle: Any) -> Any:
        """Answer of a function about a GPU; None: it does not report this value."""
        try:
            return function(handle)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
            return None

    def _watch_errors(self) -> Any:
        """Set of events with the XID errors of all GPUs; None: the driver does not report them."""
        nvml = self._nvml
        events = None
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in self._handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events
        except nvml.NVMLError:
            if events is not None:
                nvml.nvmlEventSetFree(events)
            return None

    def _take_errors(self) -> "dict[int, list[int]]":
        """XID errors by number of their GPU, since the last call."""
        nvml = self._nvml
        errors: dict[int, list[int]] = {}
        for _ in range(_MAX_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError_Timeout:
                break
            number = nvml.nvmlDeviceGetIndex(event.device)
            errors.setdefault(number, []).append(int(event.eventData))
        return errors
