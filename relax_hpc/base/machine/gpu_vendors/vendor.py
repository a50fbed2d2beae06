"""Interface of a vendor of GPUs: driver, devices, tools, variables and words.

Like `machine`, this runs with any Python from 3.6 on, before anything is installed.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SMI_TIMEOUT_S = 10.0
"""Seconds for the vendor's tool. It takes seconds if the driver has to initialize the GPUs."""


class Driver(NamedTuple):
    """The GPU driver of a machine and its GPUs.

    `vendor` is a name in `VENDORS`; empty: not known. `capabilities` has the kind of each GPU of a
    known model: the compute capability `9.0`, or the architecture `gfx942`. If the driver did not
    answer within the deadline, `answers` is False.
    """

    version: str = ""
    gpus: "tuple[str, ...]" = ()
    capabilities: "tuple[str, ...]" = ()
    answers: bool = True
    vendor: str = ""


class CompatDriver(NamedTuple):
    """Libraries of a newer driver. `version` is that of their driver; `folder` is empty if there
    are none."""

    version: str = ""
    folder: str = ""
    is_chosen: bool = False
    """Whether the user has named the folder, which is needed for RTX cards."""
    is_loaded: bool = False
    """Whether the folder is in LD_LIBRARY_PATH, so that each process loads the libraries."""


class GpuMemory(NamedTuple):
    """Memory of one GPU, as the vendor's tool reports it. The tool reports all GPUs of the
    machine, also those that are hidden from this process."""

    number: str
    uuid: str
    """Beginning of the text that names the GPU in the variable of visible GPUs; may be empty."""
    total: int
    """Total memory, in the unit of `used`."""
    used: int


class VisibleGpus(NamedTuple):
    """GPUs that variables of the environment leave to this process."""

    variable: str
    value: str
    entries: "tuple[str, ...]"
    """Numbers or UUIDs; empty: no GPU."""


class GpuReading(NamedTuple):
    """State of one GPU. None: the driver does not report the value."""

    number: str
    uuid: str
    utilization: "float | None"
    """Share of the last moments in which a kernel ran."""
    power_w: "float | None"
    energy_j: "float | None"
    """Energy since the driver was loaded."""
    memory_used_bytes: "int | None"
    memory_total_bytes: "int | None"
    errors: "tuple[int, ...]" = ()
    """Codes of the errors that the driver has reported since the last reading (NVIDIA: XID)."""


class GpuSensors:
    """Sensors of all GPUs that this process may see."""

    def read(self) -> "list[GpuReading]":
        """State of each GPU. NoGpuAnswer: the driver failed. It may hang."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the driver's library."""


class NoGpuAnswer(Exception):
    """The vendor's tool did not answer, or its answer cannot be read. The text names the tool."""


class MissingTool(NoGpuAnswer):
    """The vendor's tool is not on PATH."""


class GpuVendor:
    """A vendor of GPUs. Paths begin at ``root``, the folder with /dev, /proc and /sys."""

    name = ""
    """Value of `site.gpu_vendor`."""
    title = ""
    """Name in messages."""
    driver_title = ""
    """Name of the driver in messages."""
    release_title = ""
    """Name of the release that torch is built for, such as `CUDA`."""
    release_key = ""
    """Key of that release in the needs of an environment."""
    release_pattern = ""
    """Regular expression for that release in torch/version.py."""
    smi: "tuple[str, ...]" = ()
    """Command that reports the memory of all GPUs."""
    device_file = ""
    """Device file of a machine with such a GPU."""
    device_files = ""
    """Pattern of those device files, below ``root``."""
    visible_variable = ""
    """Variable that selects the GPUs of a process. If it is set and empty, it hides all."""
    apptainer_option = ""
    """Option by which Apptainer makes the GPUs and their driver visible in a container."""
    podman_options: "tuple[str, ...]" = ()
    """The same for podman-hpc."""
    nvcc_package = ""
    """Package of the wheels with its nvcc, by which engines compile kernels; empty: they use
    another compiler."""
    pci_vendor = ""
    pci_classes: "tuple[str, ...]" = ()
    """Beginnings of the PCI classes of GPUs for computations."""

    def has_driver(self, root: Path) -> bool:
        """Whether its driver is loaded. It reads no file of the driver, so that it cannot hang."""
        raise NotImplementedError

    def read_driver(self, root: Path) -> Driver:
        """Driver and GPUs by the driver's own files. It may hang."""
        raise NotImplementedError

    def gpu_addresses(self, root: Path) -> "dict[int, str]":
        """Number of each GPU -> its PCI address. Empty: the driver does not report them."""
        raise NotImplementedError

    def parse_memory(self, output: str) -> "list[GpuMemory]":
        """GPUs in the output of `smi`. ValueError, LookupError or TypeError: it cannot be read."""
        raise NotImplementedError

    def open_sensors(self) -> "GpuSensors | None":
        """Sensors of the GPUs; None: there are none, or no library reads them. It may hang."""
        return None

    def visible_gpus(self, environment: "Mapping[str, str]") -> "VisibleGpus | None":
        """GPUs that the variables in ``environment`` leave visible; None: all."""
        if self.visible_variable not in environment:
            return None
        value = environment[self.visible_variable]
        return VisibleGpus(self.visible_variable, value, tuple(read_entries(value)))

    def oldest_driver(self, release: str) -> int:
        """Oldest major version of the driver for a ``release``; 0: unknown."""
        return 0

    def find_compat_driver(self, environment: "Mapping[str, str]", root: str) -> CompatDriver:
        """Libraries of a newer driver on this machine."""
        return CompatDriver()

    def compat_problem(self, driver: Driver, release: str, compat: CompatDriver) -> str:
        """Reason why libraries of a newer driver do not make an old ``driver`` run ``release``;
        empty if they do."""
        return "no libraries of a newer driver can be used"

    def can_run(self, capability: str, target: str) -> bool:
        """Whether a GPU of ``capability`` runs code that was compiled for ``target``."""
        return capability == target

    def has_devices(self, root: Path) -> bool:
        """Whether there is a device file of such a GPU."""
        return any(root.glob(self.device_files))

    def count_on_bus(self, root: Path) -> int:
        """Number of its GPUs on the PCI bus, which are seen without a driver too."""
        count = 0
        for device in (root / "sys/bus/pci/devices").glob("*"):
            is_gpu = read_text(device / "class").startswith(self.pci_classes)
            count += is_gpu and read_text(device / "vendor") == self.pci_vendor
        return count

    def read_memory(self, timeout_s: float = SMI_TIMEOUT_S) -> "list[GpuMemory]":
        """Memory of all GPUs of this machine. NoGpuAnswer: the tool failed or was too slow."""
        output = run_tool(self.smi, timeout_s)
        try:
            return self.parse_memory(output)
        except (ValueError, LookupError, TypeError, AttributeError):
            text = " ".join(output.split())[:100]
            raise NoGpuAnswer(f"{self.smi[0]} printed {text!r}, which cannot be read") from None


def run_tool(command: "Sequence[str]", timeout_s: float) -> str:
    """Output of a vendor's tool. NoGpuAnswer: it failed, or did not end within ``timeout_s``.

    A process that the driver blocks cannot be killed, so nothing waits for its end.
    """
    name = command[0]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise MissingTool(f"found no {name}") from None
    except OSError as error:
        raise NoGpuAnswer(f"{name} cannot be started ({error.strerror})") from None
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_session(process)
        raise NoGpuAnswer(f"{name} gave no answer within {timeout_s:g} s") from None
    if process.returncode:
        text = (errors or output).decode("utf-8", "replace").strip()
        last = text.splitlines()[-1].strip() if text else "no output"
        raise NoGpuAnswer(f"{name} failed with exit code {process.returncode} ({last[:200]})")
    return output.decode("utf-8", "replace")


def end_session(process: "subprocess.Popen[Any]") -> None:
    """Kill a process that leads its session, and its child processes, without waiting."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def read_entries(value: str) -> "list[str]":
    """Entries of a list of visible GPUs. The first invalid entry, such as -1, ends the list."""
    entries = []
    for text in value.split(","):
        entry = text.strip()
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(entry)
    return entries


def read_text(path: Path) -> str:
    """Text of a small file without surrounding spaces; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def path_exists(path: Path) -> bool:
    """Whether ``path`` exists and this user may look at it."""
    try:
        return path.exists()
    except OSError:
        return False
