"""docs/metrics.md: every metric of a run, by `relax_hpc.base.metrics.tags`."""

from __future__ import annotations

from relax_hpc.base.metrics.tags import PARTS, TAGS, in_tensorboard

_HEAD = """# Metrics

What a run writes of each step: one flat line in `metrics.jsonl`, and the same scalars for TensorBoard, where the name
of each has the place of its part before it, `{first}`, so that what people look for first comes first. Made from
[relax_hpc/base/metrics/tags.py](../relax_hpc/base/metrics/tags.py) by `python tools/docs`; tests compare it with what runs
write. `<name>` stands for any word; seconds by role are in a part of their own there, `{seconds}`.

TensorBoard has two more: in its Text tab a few episodes every `samples.tensorboard_every` steps, and in its HParams tab
the run's configuration beside its last reward. `relax-hpc samples RUN` shows more of what the model writes.
`metrics.trackers` names classes of yours that receive the same lines: [a tracker](extending.md#a-tracker).
"""


def page() -> str:
    """The whole page."""
    lines = [
        _HEAD.format(
            first=in_tensorboard("reward/mean"), seconds=in_tensorboard("perf/actor_train_s")
        )
    ]
    for part in PARTS:
        lines += [f"## {part.name}", f"{part.about}.", "", "| metric | what |", "|---|---|"]
        lines += [
            f"| `{tag}` | {about} |"
            for tag, about in TAGS.items()
            if tag.startswith(f"{part.name}/")
        ]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
