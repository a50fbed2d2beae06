"""Attributes of release 0.1 under their old names."""

from __future__ import annotations

from typing import Any


class OldAttribute:
    """An attribute that leads to the one that has its value now, for reading and for writing.

    >>> class Trainer:
    ...     beside = OldAttribute("hooks")
    >>> trainer = Trainer()
    >>> trainer.beside = 7
    >>> trainer.hooks
    7
    """

    def __init__(self, present_name: str) -> None:
        self.present_name = present_name

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else getattr(instance, self.present_name)

    def __set__(self, instance: object, value: Any) -> None:
        setattr(instance, self.present_name, value)
