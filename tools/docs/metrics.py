"""docs/metrics.md: every metric of a run, by `relax_hpc.base.metrics.tags`."""

from __future__ import annotations

from relax_hpc.base.metrics.tags import TAG_GROUPS, TAGS, tensorboard_tag

_HEAD = """# Metrics

After reading this page you can find the meaning of any metric of a run.

```
tensorboard --logdir runs
tail -n 1 runs/mine/metrics.jsonl
```

A run writes one flat line for each step to `metrics.jsonl`, and the same scalars for TensorBoard.
There the name of each scalar begins with the number of its section, `{first}`, so that the most
important ones come first. Seconds of roles have a separate section, `{seconds}`. `<name>` stands
for any word. The page is generated from [relax_hpc/base/metrics/tags.py](../relax_hpc/base/metrics/tags.py) by
`python tools/docs`. Tests compare it with the output of runs.

TensorBoard also shows some episodes in its Text tab, every `samples.tensorboard_every` steps, and
the configuration with the last reward in its HParams tab. `relax-hpc samples RUN` shows more episodes.
[Monitoring](monitoring.md) sends the same lines to wandb, trackio, mlflow, a class of yours, or Prometheus. Names of
metrics for Prometheus follow from the names below.
"""


def page() -> str:
    """The whole page."""
    lines = [
        _HEAD.format(
            first=tensorboard_tag("reward/mean"), seconds=tensorboard_tag("perf/actor_train_s")
        )
    ]
    for group in TAG_GROUPS:
        lines += [f"## {group.name}", f"{group.description}.", "", "| metric | what |", "|---|---|"]
        lines += [
            f"| `{tag}` | {about} |"
            for tag, about in TAGS.items()
            if tag.startswith(f"{group.name}/")
        ]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
