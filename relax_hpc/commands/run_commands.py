"""Subcommands about runs that are there already: look at them, change them, end them."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser

from relax_hpc.base.errors import ConfigError
from relax_hpc.commands.command import Command, layer_arguments, run_argument
from relax_hpc.config.layer_validation import COMMAND_LINE

WATCH_S = 5.0


def _status_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--json", action="store_true", help="For programs")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=WATCH_S,
        metavar="SECONDS",
        help="Again and again until the run ends",
    )


def _status(given: dict[str, Any]) -> int:
    from relax_hpc.ops.observe import status_view

    return status_view.main(given["run"], given.get("json", False), given.get("watch"))


def _report_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--json", action="store_true", help="For programs")
    parser.add_argument(
        "--first-step", type=int, metavar="N", help="From this step on; else from the start"
    )
    parser.add_argument(
        "--last-step", type=int, metavar="N", help="Up to this step; else up to now, or the end"
    )


def _report(given: dict[str, Any]) -> int:
    from relax_hpc.ops.observe import report_view

    steps = (given.get("first_step"), given.get("last_step"))
    return report_view.main(given["run"], given.get("json", False), *steps)


def _resubmit_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--group", metavar="G", help="Group to replace, the others go on")
    parser.add_argument("--nodes", type=int, metavar="N", help="Its new number of nodes")
    parser.add_argument(
        "--code",
        metavar="DIR",
        help="Upgrade it to the package relax_hpc in DIR, of the same protocol",
    )
    parser.add_argument(
        "--new-job",
        action="store_true",
        help="A job of its own (layout het: the rule with --nodes)",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="On the nodes that it has (the rule in local and het)",
    )
    parser.add_argument(
        "--parsable", action="store_true", help="The job's id alone, as sbatch does"
    )
    layer_arguments(parser)


def _resubmit(given: dict[str, Any]) -> int:
    from relax_hpc.commands.resubmit import Wish, main

    run, group = given.pop("run"), _required(given, "group", "the group to replace")
    names = ("nodes", "code", "new_job", "in_place", "parsable")
    own = {name: given.pop(name) for name in names if name in given}
    return main(run, Wish(group, files=given.pop("config", None) or (), overrides=given, **own))


def _scale_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--group", default="rollout", metavar="G", help="Group whose only role is rollout"
    )
    parser.add_argument("--replicas", type=int, metavar="N", help="Jobs that it shall have")
    parser.add_argument(
        "--without",
        metavar="K,...",
        help="Instead of --replicas: its engines that leave, the others serve; '': none",
    )
    parser.add_argument("--time", metavar="T", help="Time limit of new jobs, as sbatch takes it")
    parser.add_argument(
        "--time-min", metavar="T", help="They may be given less time, down to this, to fill a hole"
    )
    parser.add_argument(
        "--parsable", action="store_true", help="Ids of new jobs alone, as sbatch does"
    )


def _scale(given: dict[str, Any]) -> int:
    from relax_hpc.commands import engine_removal, scale

    if "without" in given:
        if beside := sorted(given.keys() & {"replicas", "time", "time_min"}):
            raise ConfigError(
                f"--without: found with --{beside[0].replace('_', '-')}, which is of jobs; leave "
                "out one"
            )
        return engine_removal.main(given["run"], given.get("group", "rollout"), given["without"])
    replicas = _required(given, "replicas", "the number of jobs")
    names = {"time": "time", "time_min": "time-min"}
    options = [f"--{option}={given[name]}" for name, option in names.items() if given.get(name)]
    return scale.main(
        given["run"], given.get("group", "rollout"), replicas, options, given.get("parsable", False)
    )


def _stop_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--now", action="store_true", help="Do not wait for the actor to save")


def _stop(given: dict[str, Any]) -> int:
    from relax_hpc.commands import stop

    return stop.main(given["run"], given.get("now", False))


def _logs_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--group", metavar="G", help="Of this group")
    parser.add_argument("--role", metavar="R", help="Of this role: controller, rollout, actor, ...")
    parser.add_argument("--rank", type=int, metavar="K", help="Of this rank")
    parser.add_argument(
        "--incarnation", type=int, metavar="E", help="Of this incarnation; else the newest"
    )
    parser.add_argument(
        "-n", "--lines", type=int, default=20, metavar="LINES", help="Last lines of each file"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="Go on until the run ends")


def _logs(given: dict[str, Any]) -> int:
    from relax_hpc.ops.observe import logs

    run, follow = given.pop("run"), given.pop("follow", False)
    return logs.main(run, logs.LogFilter(**given), follow)


def _list_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", default="runs", metavar="DIR", help="Folder of run directories"
    )
    parser.add_argument("--json", action="store_true", help="For programs")


def _list(given: dict[str, Any]) -> int:
    from relax_hpc.ops.observe import listing

    return listing.main(given.get("folder", "runs"), given.get("json", False))


def _required(given: dict[str, Any], name: str, what: str) -> Any:
    if given.get(name) is None:
        raise ConfigError(f"{COMMAND_LINE}: --{name}: found nothing, give {what}")
    return given.pop(name)


LIVING = {
    "status": Command(
        "Show what a run is doing; exit code 0: it goes on or is finished, else as run's.",
        "RUN [--json] [--watch [SECONDS]]",
        _status_arguments,
        _status,
        only_reads=True,
    ),
    "report": Command(
        "Say where the time, the tokens and the nodes of a run went, and how to divide them "
        "better.",
        "RUN [--json] [--first-step N] [--last-step N]",
        _report_arguments,
        _report,
        only_reads=True,
    ),
    "logs": Command(
        "Show what the processes of a run print.",
        "RUN [--group G] [--role R] [--rank K] [--incarnation E] [-n LINES] [--follow]",
        _logs_arguments,
        _logs,
        only_reads=True,
    ),
    "resubmit": Command(
        "Replace one group of a run, also with another size or setting, while the others go on.",
        "RUN --group G [--nodes N] [--code DIR] [--new-job | --in-place] [--parsable] [--config "
        "F]... [--KEY VALUE]...",
        _resubmit_arguments,
        _resubmit,
        takes_config=True,
    ),
    "scale": Command(
        "Give a rollout group more or fewer jobs, or engines, while the run goes on.",
        "RUN [--group G] (--replicas N [--time T] [--time-min T] [--parsable] | --without K,...)",
        _scale_arguments,
        _scale,
    ),
    "stop": Command(
        "End a run in good order, and everything of it.", "RUN [--now]", _stop_arguments, _stop
    ),
    "list": Command(
        "List the runs below a folder; the exit code is that of the gravest.",
        "[DIR] [--json]",
        _list_arguments,
        _list,
        only_reads=True,
    ),
}
