"""`relax-hpc samples`: options of the command that shows what the model has written."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.plugins import refuse_imports
from relax_hpc.commands.command import Command, run_argument
from relax_hpc.config.layer_validation import COMMAND_LINE


def _arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--step", type=int, metavar="N", help="Of this step; of an evaluation, of this version"
    )
    parser.add_argument("--eval", metavar="SET", help="Of this evaluation set, instead of training")
    parser.add_argument("--best", action="store_true", help="Those with the highest rewards first")
    parser.add_argument("--worst", action="store_true", help="Those with the lowest rewards first")
    parser.add_argument(
        "--reason", default="", metavar="R", help="With this finish reason: stop, length, ..."
    )
    parser.add_argument(
        "--limit", type=int, metavar="K", help="So many; 0: all. Else the newest 10, on a page 5000"
    )
    parser.add_argument(
        "--dropped", action="store_true", help="Those too that were dropped, or never accepted"
    )
    parser.add_argument("--json", action="store_true", help="For programs")
    parser.add_argument(
        "--replay",
        metavar="ID",
        help="Play this episode again, against its environment, and compare",
    )
    parser.add_argument(
        "--html", default="", metavar="FILE", help="Write a page to look through in a browser"
    )


def _samples(given: dict[str, Any]) -> int:
    if name := given.get("replay", ""):
        from relax_hpc.ops.observe import sample_replay

        return sample_replay.main(given["run"], name, given.get("eval", ""), given.get("step"))
    from relax_hpc.ops.observe import sample_view

    for one, other in (("best", "worst"), ("json", "html")):
        if given.get(one) and given.get(other):
            raise ConfigError(f"{COMMAND_LINE}: --{other}: found beside --{one}; give one of them")
    html = given.get("html", "")
    limit = given.get("limit", sample_view.PAGE_LIMIT if html else sample_view.LIMIT)
    if limit < 0:
        raise ConfigError(f"{COMMAND_LINE}: --limit: found {limit}, allowed: at least 0")
    selection = sample_view.SampleFilter(
        step=given.get("step"),
        # A page has them all, and a choice.
        eval_set=given.get("eval", None if html else ""),
        reason=given.get("reason", ""),
        order=next((name for name in ("best", "worst") if given.get(name)), "newest"),
        limit=limit,
        dropped=given.get("dropped", False),
    )
    # A replay, above, does what the configuration of the run says.
    with refuse_imports():
        return sample_view.main(given["run"], selection, given.get("json", False), html)


SAMPLES = Command(
    "Show what the model has written, and what it was given for it.",
    "RUN [--step N] [--eval SET] [--best | --worst] [--reason R] [--limit K] [--dropped] "
    "[--json | --html FILE | --replay ID]",
    _arguments,
    _samples,
    for_others=True,
)
