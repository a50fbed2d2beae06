"""Media of any kind, from their files."""

from __future__ import annotations

from relax_hpc.base.errors import ConfigError
from relax_hpc.data.multimodal import audio, image, video
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.source import Source

_MODULES = {Kind.IMAGE: image, Kind.VIDEO: video, Kind.AUDIO: audio}


def header(kind: Kind, source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of a medium, with as little decoded as it takes. BadMedium: it cannot be used."""
    _refuse_silent(kind, rules)
    return _MODULES[kind].header(source, rules, limits)


def load(kind: Kind, source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """A medium as it is stored. BadMedium: it cannot be used."""
    _refuse_silent(kind, rules)
    return _MODULES[kind].load(source, rules, limits)


def _refuse_silent(kind: Kind, rules: Rules) -> None:
    if kind is Kind.AUDIO and not rules.rate:
        raise ConfigError(
            "the prompts have sounds, which the model does not hear; allowed: qwen3_omni_moe"
        )
