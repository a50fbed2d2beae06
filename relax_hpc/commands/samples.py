"""`relax-hpc samples` and `relax-hpc page`: options of the commands that show a run to people."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.plugins import refuse_imports
from relax_hpc.commands.command import Command, json_argument, run_argument
from relax_hpc.config.layer_validation import COMMAND_LINE


def _arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="Show samples of this step, or with --eval of this version.",
    )
    parser.add_argument(
        "--eval", metavar="SET", help="Show samples of this evaluation set instead of training."
    )
    parser.add_argument(
        "--best", action="store_true", help="Show samples with the highest rewards first."
    )
    parser.add_argument(
        "--worst", action="store_true", help="Show samples with the lowest rewards first."
    )
    parser.add_argument(
        "--reason",
        default="",
        metavar="R",
        help="Show only samples with this finish reason: stop, length, ...",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="K",
        help="Show at most K samples; 0: all. Default: the newest 10, with --html 5000.",
    )
    parser.add_argument(
        "--dropped",
        action="store_true",
        help="Include samples that were dropped or never accepted.",
    )
    json_argument(parser)
    parser.add_argument(
        "--replay",
        metavar="ID",
        help="Play this episode again in its environment, and compare the result.",
    )
    parser.add_argument(
        "--html", default="", metavar="FILE", help="Write a page for a browser to this file."
    )


def _samples(arguments: dict[str, Any]) -> int:
    name = arguments.get("replay", "")
    if name:
        from relax_hpc.ops.observe import sample_replay

        return sample_replay.main(
            arguments["run"], name, arguments.get("eval", ""), arguments.get("step")
        )
    from relax_hpc.ops.observe import sample_view

    for first, second in (("best", "worst"), ("json", "html")):
        if arguments.get(first) and arguments.get(second):
            raise ConfigError(
                f"{COMMAND_LINE}: --{second}: found together with --{first}; give one of them"
            )
    html = arguments.get("html", "")
    limit = arguments.get("limit", sample_view.PAGE_LIMIT if html else sample_view.LIMIT)
    if limit < 0:
        raise ConfigError(f"{COMMAND_LINE}: --limit: found {limit}, allowed: at least 0")
    selection = sample_view.SampleFilter(
        step=arguments.get("step"),
        # A page has the samples of all sets, and a menu to choose one.
        eval_set=arguments.get("eval", None if html else ""),
        reason=arguments.get("reason", ""),
        order=next((name for name in ("best", "worst") if arguments.get(name)), "newest"),
        limit=limit,
        dropped=arguments.get("dropped", False),
    )
    # A replay, above, imports the modules that the configuration of the run names. This does not.
    with refuse_imports():
        return sample_view.main(arguments["run"], selection, arguments.get("json", False), html)


SAMPLES = Command(
    "Show samples: prompts, responses of the model, and their rewards.",
    "RUN [--step N] [--eval SET] [--best | --worst] [--reason R] [--limit K] [--dropped] "
    "[--json | --html FILE | --replay ID]",
    _arguments,
    _samples,
    for_others=True,
)


def _page_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--html",
        default="",
        metavar="FILE",
        help="File to write. Default: in the working directory, with the name of the run "
        "directory and .html.",
    )


def _page(arguments: dict[str, Any]) -> int:
    from relax_hpc.service.page import command

    return command.main(arguments["run"], arguments.get("html", ""))


PAGE = Command(
    "Write a page for a browser with the state, curves, events and newest samples of a run.",
    "RUN [--html FILE]",
    _page_arguments,
    _page,
    only_reads=True,
    for_others=True,
)
