"""Planes: transports for the bytes of a record, from the process that made it to its readers.

The maker publishes a record on every plane that it offers. A reader uses the best plane that both
have. The maker owns the bytes until it retires the record, and does not change them before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Descriptor = dict[str, Any]
"""Address of a record on one plane. It is small, the same for every reader, and msgpack can encode
it."""


class PlaneError(OSError):
    """A record cannot be read on this plane now. The message names plane, record and peer."""


class Plane(ABC):
    """One transport. Its methods are thread-safe, and every wait has a deadline."""

    name: str

    @abstractmethod
    def publish(self, name: str, record: memoryview) -> Descriptor:
        """Make ``record`` readable for other processes. It must not change until `retire`."""

    @abstractmethod
    def read(self, descriptor: Descriptor, timeout_s: float) -> memoryview:
        """The record's bytes, read-only, as a mapping or a copy. PlaneError: they are not
        available, or reading takes longer than ``timeout_s``."""

    def is_still_offered(self, descriptor: Descriptor) -> bool:
        """Whether the record was not retired since `read`, if `read` returned the maker's memory.

        For copies, which do not change, it is always true.
        """
        return True

    def path(self, descriptor: Descriptor) -> str:
        """Path of the bytes of ``descriptor``, for logs and tables. Default: the plane's name."""
        return self.name

    @abstractmethod
    def retire(self, name: str) -> None:
        """Stop offering a record; an unknown one is ignored. Copies of readers stay valid."""

    @abstractmethod
    def close(self) -> None:
        """End all threads and free all resources. Published records are no longer readable."""
