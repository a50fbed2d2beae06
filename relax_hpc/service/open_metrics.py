"""Text of a run's metrics in the format OpenMetrics 1.0, for Prometheus and compatible programs.

https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md. A tag of
metrics.jsonl becomes a name by its entry in `TAGS`: `eval/<set>/pass@<k>` becomes
`relax_eval_set_pass_at_k{set="...",k="..."}`. Labels have few values: sets, roles, groups, engines,
reasons; never ids of samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from relax_hpc.base.metrics.tags import TAGS
from relax_hpc.config.roles import ROLES

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "relax_"
OTHER = f"{PREFIX}other_metric"
"""Name of metrics of a user's own roles and algorithms, whose tags are not declared."""
MAX_SERIES = 512
"""Series of one name, at most. Further ones are counted, and left out."""
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")
_PLACEHOLDER = re.compile(r"<(\w+)>")
_COUNTED_BY_HUB = "queue/<what>_<reason>"
"""Entry whose tags are left out: the hub's status has the same counts with separate words."""
Kind = Literal["gauge", "counter", "stateset", "info"]
Labels = tuple[tuple[str, str], ...]
NO_LABELS: Mapping[str, str] = MappingProxyType({})
_SUFFIXES = {"counter": "_total", "info": "_info"}


class Exposition:
    """Collects samples by name, then gives their text."""

    def __init__(self) -> None:
        self._heads: dict[str, str] = {}
        self._samples: dict[str, dict[Labels, float]] = {}
        self.left_out = 0
        """Samples beyond `MAX_SERIES` of their name."""

    def add(
        self,
        name: str,
        value: float,
        text: str,
        labels: Mapping[str, str] = NO_LABELS,
        kind: Kind = "gauge",
    ) -> None:
        """Add a sample. A later one with the same name and labels replaces it.

        Args:
            name: name without the suffix of its kind.
            value: number.
            text: description of the name.
            labels: value by name of the label.
            kind: type of the metric.
        """
        if name not in self._heads:
            self._heads[name] = f"# HELP {name} {_escape(text)}\n# TYPE {name} {kind}\n"
            self._samples[name] = {}
        samples, key = self._samples[name], tuple(labels.items())
        if key not in samples and len(samples) >= MAX_SERIES:
            self.left_out += 1
            return
        samples[key] = value

    def text(self) -> str:
        """All samples, with the mark of the end."""
        parts = []
        for name in sorted(self._heads):
            head = self._heads[name]
            suffix = _SUFFIXES.get(head.rstrip("\n").rpartition(" ")[2], "")
            parts.append(head)
            parts += [
                f"{name}{suffix}{_braces(labels)} {_number(value)}\n"
                for labels, value in self._samples[name].items()
            ]
        return "".join([*parts, "# EOF\n"])


def add_tags(exposition: Exposition, values: Mapping[str, float]) -> None:
    """Add the newest value of each tag of metrics.jsonl."""
    for tag, value in values.items():
        name, text, labels = describe_tag(tag)
        if name:
            exposition.add(name, value, text, dict(labels))


@lru_cache(maxsize=4096)
def describe_tag(tag: str) -> tuple[str, str, Labels]:
    """Name, description and labels of a tag. An empty name: it is left out.

    >>> describe_tag("idle/actor_fwd_for_rollout")[::2]
    ('relax_idle_role_for_peer', (('role', 'actor_fwd'), ('peer', 'rollout')))
    >>> describe_tag("mine/score")[::2]
    ('relax_other_metric', (('tag', 'mine/score'),))
    """
    for patterns in _patterns():
        for declared, pattern in patterns.items():
            if match := pattern.fullmatch(tag):
                if declared == _COUNTED_BY_HUB:
                    return "", "", ()
                return name_of(declared), TAGS[declared], tuple(match.groupdict().items())
    return OTHER, "newest value of a metric that relax_hpc does not declare", (("tag", tag),)


def name_of(declared: str) -> str:
    """Name of the metric for an entry of `TAGS`.

    >>> name_of("perf/<role>_<kind>_s"), name_of("eval/<set>/pass@<k>")
    ('relax_perf_role_kind_s', 'relax_eval_set_pass_at_k')
    """
    words = _PLACEHOLDER.sub(r"\1", declared).replace("@", "_at_")
    return PREFIX + _NOT_IN_NAMES.sub("_", words)


@lru_cache
def _patterns() -> tuple[dict[str, re.Pattern[str]], ...]:
    """Patterns of all entries: first with the roles of this package, then with any word, because
    underscores occur in roles, and between them and other words."""
    roles = "|".join(sorted(ROLES, key=len, reverse=True))
    strict: dict[str, re.Pattern[str]] = {}
    loose: dict[str, re.Pattern[str]] = {}
    for declared in TAGS:
        escaped = re.sub(r"([.+*?@])", r"\\\1", declared)
        loose[declared] = re.compile(_PLACEHOLDER.sub(r"(?P<\1>[^/]+)", escaped))
        with_roles = re.sub(r"<(role|peer)>", rf"(?P<\1>{roles})", escaped)
        with_roles = with_roles.replace("(?P<", "\0")
        with_roles = _PLACEHOLDER.sub(r"(?P<\1>[^/]+)", with_roles)
        strict[declared] = re.compile(with_roles.replace("\0", "(?P<"))
    return strict, loose


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(text: str) -> str:
    # Bytes of names that are not UTF-8 become surrogates, which cannot be encoded.
    valid = text.encode(errors="replace").decode()
    return valid.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if value != int(value) else str(int(value))
