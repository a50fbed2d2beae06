"""Planes: ways for the bytes of a shard from the process that made it to one that needs it.

The maker publishes a record once, on every plane that it offers; the reader takes the best plane
that both sides have. Bytes are the maker's until it retires them, and never change before that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Descriptor = dict[str, Any]
"""Address of a record on one plane for its readers; msgpack-able, small, and the same for every
reader."""


class PlaneError(OSError):
    """A record cannot be had on this plane now; the message names the plane, the record and the
    peer."""


class Plane(ABC):
    """One way. Any thread may call; nothing waits without a deadline."""

    name: str

    @abstractmethod
    def publish(self, name: str, record: memoryview) -> Descriptor:
        """Make ``record`` readable by others; it must stay as it is until `retire`."""

    @abstractmethod
    def read(self, descriptor: Descriptor, timeout_s: float) -> memoryview:
        """The record's bytes, read-only, as a mapping or a copy. PlaneError if that takes longer,
        or cannot be."""

    def is_still_offered(self, descriptor: Descriptor) -> bool:
        """Whether what `read` gave, if it is the maker's own memory, was not retired since. Copies
        do not change."""
        return True

    def path(self, descriptor: Descriptor) -> str:
        """Way by which the bytes of ``descriptor`` come, for logs and tables; the plane's name if
        there is only one."""
        return self.name

    @abstractmethod
    def retire(self, name: str) -> None:
        """Offer a record no more; an unknown one is fine. Readers keep what they have already
        read."""

    @abstractmethod
    def close(self) -> None:
        """End every thread and free every resource; what was published is gone."""
