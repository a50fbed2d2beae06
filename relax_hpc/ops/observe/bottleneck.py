"""The sentence at the begin of a report: what limits the speed of a run, and what would remove it.

A step ends when the actor has trained it. What takes the largest part of the actor's time therefore
limits the run: its own work, or a wait for another component.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from relax_hpc.config import Config

_LOST_SHARE = 0.25
"""Share of the hours from which on faults are named first."""
_BUSY_SHARE = 0.5
"""Share of a step in which rollout must be busy to need more engines."""
_FULLY_BUSY_SHARE = 0.9
_NOT_WORK = ("wait", "start", "other", "unfinished")
_FORWARD_ROLES = ("actor_fwd", "reference", "teacher", "critic")
_WORK = {
    "checkpoint": ("Saving checkpoints", "saves them", "a larger checkpoint.every would remove it"),
    "publish": (
        "Publishing weights",
        "copies or publishes weights",
        "weights.publish_every above 1 would reduce it",
    ),
    "eval": ("Evaluation", "evaluates", "a larger eval.every would remove it"),
    "queue": (
        "Reading rows",
        "reads rows of the queue",
        "rows on the actor's node, or a faster network or disk, would remove it",
    ),
}
"""Kinds of work of the actor besides training: name, predicate, remedy."""


def bottleneck_sentence(values: Mapping[str, Any], config: Config) -> str:
    """One sentence that names what limits a run, and what would remove it.

    ``values``: the report.
    """
    hours = values["hours"]
    lost = hours["lost_restarting"] + hours["lost_again"] if hours["asked"] else 0.0
    if lost and lost / hours["asked"] >= _LOST_SHARE:
        return (
            f"Faults limit this run: they cost {lost / hours['asked']:.0%} of its "
            f"{hours['unit']}-hours; RESTARTS has the reasons, and a smaller checkpoint.every "
            "reduces the steps that are trained again."
        )
    parts = _actor_parts(values)
    if values["last_step"] is None or not parts:
        return "What limits this run is not known yet, because no step was trained."
    (kind, peer), seconds = parts.most_common(1)[0]
    share = f"{seconds / parts.total():.0%} of its time"
    if kind == "wait":
        return _sentence_of_wait(peer, share, values, config)
    if kind in _WORK:
        name, predicate, remedy = _WORK[kind]
        return f"{name} limits this run: the actor {predicate} {share}; {remedy}."
    return _sentence_of_training(share, values, config)


def _actor_parts(values: Mapping[str, Any]) -> Counter[tuple[str, str]]:
    """Seconds of the actor by kind of work, and by the component for which it waits. The start of
    processes is left out."""
    parts = Counter[tuple[str, str]]()
    actor = values["roles"].get("actor", {"seconds": {}})
    for kind, seconds in actor["seconds"].items():
        if kind not in _NOT_WORK:
            # Scoring by roles inside the actor is work on the same devices as training.
            parts["train" if kind == "forward" else kind, ""] += seconds
    for wait in values["waits"]:
        if wait["role"] == "actor":
            parts["wait", wait["peer"]] += wait["seconds"]
    return parts


def _sentence_of_wait(peer: str, share: str, values: Mapping[str, Any], config: Config) -> str:
    if peer in ("rollout", "advantages"):
        return _sentence_of_generation(share, values, config)
    if peer == "data":
        return f"Reading files limits this run: the actor waits {share} for rows of role data."
    if peer in _FORWARD_ROLES:
        group = next((name for name, item in config.groups.items() if peer in item.roles), peer)
        remedy = f"more ranks ({peer}.parallel) for group {group} would remove it"
        if peer in ("actor_fwd", "reference"):
            remedy += f", or {peer} inside the actor (actor.forward)"
        return f"Role {peer} limits this run: the actor waits {share} for its fields; {remedy}."
    if peer == "disk":
        return (
            f"The disk limits this run: the actor waits {share} until rows are on disk; a run_dir "
            "on a faster filesystem would remove it."
        )
    if peer == "actor":
        return (
            f"Copies between device and host limit this run: the actor waits {share} for them; "
            "weights.publish_every above 1, or separate groups instead of colocate, would reduce "
            "it."
        )
    return (
        f"The queue limits this run: the actor waits {share} for {peer or 'an answer'}; a hub on a "
        "node with free cores and a fast disk would remove it."
    )


def _sentence_of_generation(share: str, values: Mapping[str, Any], config: Config) -> str:
    """The actor waits most for generated rows."""
    start = f"Generation limits this run: the actor waits {share} for rows"
    if config.colocate:
        return (
            f"{start}, because engines and actor take turns on the same devices; separate groups "
            "with max_staleness 1 would let them work at the same time."
        )
    pace = values["pace"]
    busy_share = pace["rollout_s"] / pace["step_s"] if pace and pace["step_s"] else 0.0
    if not config.max_staleness:
        return (
            f"{start}, because at max_staleness 0 they take turns; max_staleness 1 would let "
            f"engines generate while the actor trains{_more_engines(values, ', and ')}."
        )
    wait = _longest_wait(values["waits"], "rollout")
    if pace and busy_share < _BUSY_SHARE and wait:
        return (
            f"{start}, but engines are busy for only {busy_share:.0%} of a step: they wait for "
            f"{wait['peer'] or 'others'} ({wait['reason']}), which has to become faster."
        )
    return f"{start}; {_more_engines(values) or 'more engines would remove it'}."


def _more_engines(values: Mapping[str, Any], link: str = "") -> str:
    """A better split of the units, as the end of a sentence; empty if none is known."""
    split = values["split"]
    if not split or split["suggested"]["rollout"] <= split["present"]["rollout"]:
        return ""
    suggested, total = split["suggested"]["rollout"], sum(split["present"].values())
    return (
        f"{link}{suggested} instead of {split['present']['rollout']} of the {total} "
        f"{split['unit']}s for rollout would make both sides equally busy"
    )


def _sentence_of_training(share: str, values: Mapping[str, Any], config: Config) -> str:
    start = f"Training limits this run: the actor computes {share}"
    split, pace = values["split"], values["pace"]
    if split and split["suggested"]["actor"] > split["present"]["actor"]:
        suggested, total = split["suggested"]["actor"], sum(split["present"].values())
        return (
            f"{start}; {suggested} instead of {split['present']['actor']} of the {total} "
            f"{split['unit']}s for training would make both sides equally busy."
        )
    rollout_share = pace["rollout_s"] / pace["step_s"] if pace and pace["step_s"] else 0.0
    if rollout_share >= _FULLY_BUSY_SHARE:
        return (
            f"{start} and rollout is busy for {rollout_share:.0%} of a step, so that only more "
            "devices for both would make it faster."
        )
    if not config.max_staleness and pace and pace["rollout_s"]:
        return (
            f"{start}, while engines wait for it; max_staleness 1 would let them generate at the "
            "same time, and more ranks (actor.parallel) would shorten the step."
        )
    return f"{start}; more ranks for it (actor.parallel) would remove it."


def _longest_wait(waits: Sequence[Mapping[str, Any]], role: str) -> Mapping[str, Any] | None:
    own = [wait for wait in waits if wait["role"] == role]
    return max(own, key=lambda wait: wait["seconds"], default=None)
