"""Settings of torch's CUDA allocator, which are read from environment variables.

With `expandable_segments` the allocator grows its blocks of memory in place. Batches of changing
length then leave no gaps that are too small for the next batch.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that hold the settings. torch reads the second one since version 2.9."""
_SETTING = "expandable_segments"


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Turn on `expandable_segments`, unless ``environment`` has settings. Call it before torch is
    imported."""
    if not any(name in environment for name in VARIABLES):
        environment[VARIABLES[0]] = f"{_SETTING}:True"


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environment`` that turn on `expandable_segments`, without that setting.

    Their other settings stay. A variable without other settings becomes empty. torch_memory_saver
    0.0.10 raises an error if `expandable_segments` is on.
    """
    changed = {}
    for name in VARIABLES:
        settings = [setting.strip() for setting in environment.get(name, "").split(",")]
        kept = [setting for setting in settings if not _turns_on(setting)]
        if kept != settings:
            changed[name] = ",".join(kept)
    return changed


def _turns_on(setting: str) -> bool:
    name, _, value = setting.partition(":")
    return name.strip() == _SETTING and value.strip().lower() == "true"
