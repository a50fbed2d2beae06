"""Plots of one or several runs from metrics.jsonl: reward, held-out scores, and any other tags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.metrics.read import Metrics, load_metrics, tags_of
from relax_hpc.base.metrics.writer import METRICS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD, LOSS, HELD_OUT, HELD_OUT_LOSS = "reward/mean", "loss/policy", "eval/*", "eval/*/loss"
_TITLES = {
    REWARD: "Training reward",
    LOSS: "Training loss",
    HELD_OUT: "Held-out evaluation",
    HELD_OUT_LOSS: "Held-out loss",
}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Palette of Okabe and Ito, which readers with any colour vision can distinguish
(https://jfly.uni-koeln.de/color/)."""
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
_UNITS = (
    ("*_share", "share"),
    ("idle/*", "share of time"),
    ("*_per_s", "tokens / s"),
    ("*_s", "seconds"),
    ("staleness/*", "versions"),
    ("kl/*", "nats"),
    ("parity/*", "nats"),
    ("reward/*", "reward"),
    ("loss/*", "loss"),
)
_SHARES = ("share", "share of time")
_EDGE = 0.03
"""Space beyond 0 and 1, so that a curve at one of them is visible."""
_GREY = "#555555"
_RESTART: dict[str, Any] = {"linestyle": ":", "linewidth": 1.0, "zorder": 1}
_LEGEND_CHARS, _HANDLE_CHARS = 44, 6
"""Characters of a legend that fit next to a title, and the width of the line before a label."""
_SPARSE = 40
"""Number of points below which a curve has markers and is not smoothed."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One tag of one run; x: steps [n], y: finite values [n]."""

    run: int
    tag: str
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True, slots=True)
class _Run:
    path: Path
    label: str
    metrics: Metrics


def main(runs: list[str], output: str, tags: list[str]) -> int:
    """Plot run directories to the file `output` and print its name. Errors: see `plot_runs`."""
    print(plot_runs([Path(run) for run in runs], Path(output), tags))
    return 0


def plot_runs(runs: Sequence[Path], output: Path, tags: Sequence[str] = ()) -> Path:
    """Draw panels: training reward (or loss, if there is no reward), held-out scores, each of
    `tags`.

    Args:
        runs: run directories, each with a metrics.jsonl.
        output: picture to write. Its suffix (.png, .pdf, .svg) is the format.
        tags: tags or patterns (`idle/*`), each with a panel.

    Raises:
        ConfigError: no runs, a run without values, tags that no run has, an unknown picture
            format, or no matplotlib.
    """
    loaded = [_load(path, label) for path, label in zip(runs, run_labels(runs), strict=True)]
    if not loaded:
        raise ConfigError("plot: no run directory given; name one or several")
    available = set[str]().union(*(tags_of(run.metrics.rows) for run in loaded))
    objective = LOSS if LOSS in available and REWARD not in available else REWARD
    panels = {
        pattern: _curves_of_runs(loaded, pattern)
        for pattern in dict.fromkeys((objective, HELD_OUT, *tags))
    }
    _check(loaded, panels, tags)
    # A loss can be far above 1. In the panel of scores it would flatten their curves.
    losses = [curve for curve in panels[HELD_OUT] if fnmatchcase(curve.tag, HELD_OUT_LOSS)]
    scores = [curve for curve in panels[HELD_OUT] if curve not in losses]
    if losses and scores:
        panels |= {HELD_OUT: scores, HELD_OUT_LOSS: losses}
    return _draw(loaded, {pattern: curves for pattern, curves in panels.items() if curves}, output)


def run_labels(runs: Sequence[Path]) -> list[str]:
    """Directory names, with as many parent folders as needed to distinguish the runs."""
    paths = [path.resolve() for path in runs]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(set(paths)):
            break
    return labels if paths else []


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean of [n] finite values over an odd window, which is cut at the ends."""
    ones, half = np.ones(window), window // 2
    sums, counts = np.convolve(values, ones), np.convolve(np.ones(len(values)), ones)
    return (sums / counts)[half : half + len(values)]


def _load(path: Path, label: str) -> _Run:
    metrics = load_metrics(path)
    if not metrics.rows:
        raise ConfigError(
            f"{path}: no steps in {path / METRICS_FILE}; expected a run directory with at least "
            "one step"
        )
    return _Run(path, label, metrics)


def _curves_of_runs(runs: Sequence[_Run], pattern: str) -> list[Curve]:
    """Curves of all tags that match ``pattern``."""
    curves = []
    for number, run in enumerate(runs):
        for tag in tags_of(run.metrics.rows):
            if fnmatchcase(tag, pattern):
                curves += _curves(number, run, tag)
    return curves


def _curves(number: int, run: _Run, tag: str) -> list[Curve]:
    """The curve of one tag; empty: it has no finite value."""
    points = [
        (row["step"], row[tag]) for row in run.metrics.rows if math.isfinite(row.get(tag, math.nan))
    ]
    if not points:
        return []
    x, y = np.array(points, dtype=float).T
    return [Curve(number, tag, x, y)]


def _check(runs: list[_Run], panels: dict[str, list[Curve]], tags: Sequence[str]) -> None:
    """Raise ConfigError if a run has no curve, or if no run has one of ``tags``."""
    shown: set[int] = set()
    for curves in panels.values():
        shown |= {curve.run for curve in curves}
    lacking = [run for number, run in enumerate(runs) if number not in shown]
    missing = [tag for tag in tags if not panels[tag]]
    if lacking or missing:
        run = (lacking or runs)[0]
        wanted = ", ".join(missing or panels)
        available = ", ".join(tags_of(run.metrics.rows)) or "none"
        raise ConfigError(
            f"{run.path / METRICS_FILE}: no values for {wanted}; it has the tags: {available}"
        )


def _draw(runs: list[_Run], panels: dict[str, list[Curve]], output: Path) -> Path:
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"plot: {error}; install matplotlib, or this package with its extra: relax_hpc[plot]"
        ) from None

    figure = Figure(figsize=(9.5, 0.6 + 2.9 * len(panels)), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if output.suffix.lstrip(".") not in canvas.get_supported_filetypes():
        raise ConfigError(
            f"plot: output {output} has an unknown picture format; use .png, .pdf or .svg"
        )
    with mpl.rc_context(
        {"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "svg.fonttype": "none"}
    ):
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (pattern, curves) in zip(all_axes, panels.items(), strict=True):
            _panel(axes, pattern, curves, runs)
        all_axes[-1].set_xlabel("training step")
        figure.align_ylabels()
        if len(runs) == 1:
            figure.suptitle(runs[0].label, x=0.01, horizontalalignment="left", fontsize=12)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
    return output


def _panel(axes: Axes, pattern: str, curves: list[Curve], runs: list[_Run]) -> None:
    """Colours distinguish runs, and dashes distinguish tags. With one run, colours distinguish
    tags."""
    tags = list(dict.fromkeys(curve.tag for curve in curves))
    shown = sorted({curve.run for curve in curves})
    window = 1
    for curve in curves:
        colour = _COLOURS[(curve.run if len(runs) > 1 else tags.index(curve.tag)) % len(_COLOURS)]
        dash = _DASHES[tags.index(curve.tag) % len(_DASHES)] if len(runs) > 1 else "-"
        window = max(window, _line(axes, curve, colour, dash))
    restarted = [_mark_restarts(axes, number, runs) for number in shown]
    _dress(axes, _title(pattern, tags, window), curves)
    _legend(
        axes,
        [runs[number].label for number in shown] if len(runs) > 1 else [],
        shown,
        tags,
        any(restarted),
    )


def _line(axes: Axes, curve: Curve, colour: str, dash: Any) -> int:
    """Draw a curve; a long one is faint, below its moving mean. Returns the window of the mean."""
    style: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": 1.8, "zorder": 3}
    if len(curve.x) < _SPARSE:
        axes.plot(curve.x, curve.y, marker="o", markersize=4.5, **style)
        return 1
    window = 2 * (len(curve.x) // 50) + 3
    axes.plot(curve.x, curve.y, color=colour, alpha=0.22, linewidth=0.8, zorder=2)
    axes.plot(curve.x, smooth(curve.y, window), **style)
    return window


def _mark_restarts(axes: Axes, number: int, runs: list[_Run]) -> bool:
    """Draw a thin vertical line at each step where a run resumed. Returns whether there is one."""
    metrics = runs[number].metrics
    steps = {
        row["step"]
        for before, row in pairwise(metrics.rows)
        if row["incarnation"] > before["incarnation"]
    }
    steps |= {step for _, step in metrics.rollbacks}
    for step in steps:
        axes.axvline(
            step, color=_COLOURS[number % len(_COLOURS)] if len(runs) > 1 else _GREY, **_RESTART
        )
    return bool(steps)


def _title(pattern: str, tags: list[str], window: int) -> str:
    title = _TITLES.get(pattern, pattern)
    if len(tags) == 1 and pattern not in (REWARD, tags[0]):
        title += f": {tags[0]}"
    return f"{title} (bold: mean over {window} steps)" if window > 1 else title


def lies_in_0_to_1(curves: Sequence[Curve]) -> bool:
    """Whether all curves are shares or scores, with all values in [0, 1]. Their axes are equal."""
    for curve in curves:
        if unit_of(curve.tag) not in _SHARES and not fnmatchcase(curve.tag, HELD_OUT):
            return False
        if curve.y.min() < 0.0 or curve.y.max() > 1.0:
            return False
    return True


def _dress(axes: Axes, title: str, curves: Sequence[Curve]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_title(title, loc="left")
    units = {unit_of(curve.tag) for curve in curves}
    if units <= set(_SHARES):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel(units.pop() if len(units) == 1 else "value")
    if lies_in_0_to_1(curves):
        axes.set_ylim(-_EDGE, 1.0 + _EDGE)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(
    axes: Axes, labels: list[str], shown: list[int], tags: list[str], restarted: bool
) -> None:
    """Legend: runs by colour, tags by dash (or colour), and the dotted line of restarts.

    Short entries are next to the title, so that the data has the whole width. Long ones are to the
    right of the data.
    """
    from matplotlib.lines import Line2D

    entries = [
        Line2D([], [], color=_COLOURS[n % len(_COLOURS)], lw=1.8, label=s)
        for n, s in zip(shown, labels, strict=False)
    ]
    for number, name in enumerate(short_names(tags) if len(tags) > 1 else []):
        colour = _GREY if labels else _COLOURS[number % len(_COLOURS)]
        dash: Any = _DASHES[number % len(_DASHES)] if labels else "-"
        entries.append(Line2D([], [], color=colour, linestyle=dash, lw=1.8, label=name))
    if restarted:
        entries.append(Line2D([], [], color=_GREY, label="restart", **_RESTART))
    style: dict[str, Any] = {
        "handles": entries,
        "borderaxespad": 0,
        "frameon": False,
        "fontsize": 9,
    }
    if sum(len(str(entry.get_label())) + _HANDLE_CHARS for entry in entries) <= _LEGEND_CHARS:
        style |= {"loc": "lower right", "bbox_to_anchor": (1.0, 1.01), "ncols": len(entries)}
    else:
        style |= {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    if entries:
        axes.legend(**style)


def short_names(tags: Sequence[str]) -> list[str]:
    """Tags without the leading and trailing words that all of them have.

    >>> short_names(["eval/digits/exact_match", "eval/long/exact_match"])
    ['digits', 'long']
    """
    paths = [tag.split("/") for tag in tags]
    while len({path[0] for path in paths}) == 1 and all(len(path) > 1 for path in paths):
        paths = [path[1:] for path in paths]
    while len({path[-1] for path in paths}) == 1 and all(len(path) > 1 for path in paths):
        paths = [path[:-1] for path in paths]
    return ["/".join(path) for path in paths]


def unit_of(tag: str) -> str:
    """Unit on the axis of a tag. Without a known unit, it is the last word of the tag."""
    return next(
        (unit for pattern, unit in _UNITS if fnmatchcase(tag, pattern)), tag.rsplit("/", 1)[-1]
    )
