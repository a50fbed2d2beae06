"""Readers of headers and media by the kind of a medium."""

from __future__ import annotations

from relax_hpc.base.errors import ConfigError
from relax_hpc.data.multimodal import audio, image, video
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.source import Source

_MODULES = {Kind.IMAGE: image, Kind.VIDEO: video, Kind.AUDIO: audio}


def header(kind: Kind, source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of a medium, decoded only as far as necessary. UnusableMedium: it cannot be used."""
    _check_hears(kind, rules)
    return _MODULES[kind].header(source, rules, limits)


def load(kind: Kind, source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """A medium in its stored form. UnusableMedium: it cannot be used."""
    _check_hears(kind, rules)
    return _MODULES[kind].load(source, rules, limits)


def _check_hears(kind: Kind, rules: Rules) -> None:
    """ConfigError: a sound for a model without audio input."""
    if kind is Kind.AUDIO and not rules.rate:
        raise ConfigError(
            "the prompts have sounds, but the model has no audio input; allowed: qwen3_omni_moe"
        )
