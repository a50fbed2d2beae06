"""Subcommands about existing runs: show, change and stop them."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser

from relax_hpc.base.errors import ConfigError
from relax_hpc.commands.command import Command, json_argument, layer_arguments, run_argument
from relax_hpc.config.layer_validation import COMMAND_LINE

WATCH_S = 5.0
"""Seconds between two updates of `status --watch`."""


def _status_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    json_argument(parser)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=WATCH_S,
        metavar="SECONDS",
        help=f"Update the output every SECONDS until the run ends. Default: {WATCH_S:g}.",
    )


def _status(arguments: dict[str, Any]) -> int:
    from relax_hpc.ops.observe import status_screen

    return status_screen.main(
        arguments["run"], arguments.get("json", False), arguments.get("watch")
    )


def _report_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    json_argument(parser)
    parser.add_argument(
        "--first-step",
        type=int,
        metavar="N",
        help="First step of the report. Default: the oldest.",
    )
    parser.add_argument(
        "--last-step", type=int, metavar="N", help="Last step of the report. Default: the newest."
    )


def _report(arguments: dict[str, Any]) -> int:
    from relax_hpc.ops.observe import report_view

    steps = (arguments.get("first_step"), arguments.get("last_step"))
    return report_view.main(arguments["run"], arguments.get("json", False), *steps)


def _resubmit_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--group", metavar="G", help="Group to replace. The other groups continue.")
    parser.add_argument("--nodes", type=int, metavar="N", help="New number of nodes of the group.")
    parser.add_argument(
        "--code",
        metavar="DIR",
        help="Upgrade the group to the package relax_hpc in DIR, which must have the same protocol "
        "version.",
    )
    parser.add_argument(
        "--new-job",
        action="store_true",
        help="Start the group in a new job. This is the default in layout jobs, and with --nodes.",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="Restart the group on its present nodes. This is the default in layouts local and "
        "het.",
    )
    _parsable_argument(parser)
    layer_arguments(parser)


def _parsable_argument(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--parsable",
        action="store_true",
        help="Print only the ids of new jobs, as sbatch --parsable does.",
    )


def _resubmit(arguments: dict[str, Any]) -> int:
    from relax_hpc.commands.resubmit import ResubmitRequest, main

    run, group = arguments.pop("run"), _required(arguments, "group", "the group to replace")
    names = ("nodes", "code", "new_job", "in_place", "parsable")
    options = {name: arguments.pop(name) for name in names if name in arguments}
    files = arguments.pop("config", None) or ()
    return main(run, ResubmitRequest(group, files=files, overrides=arguments, **options))


def _scale_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--group",
        default="rollout",
        metavar="G",
        help="Group to scale. Its only role must be rollout. Default: rollout.",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="New number of groups of engines. On Slurm, each is one job.",
    )
    parser.add_argument(
        "--without",
        metavar="K,...",
        help="Instead of --replicas: numbers of the engines to remove. All other engines of the "
        "group serve. '' brings all engines back.",
    )
    parser.add_argument(
        "--time", metavar="T", help="Time limit of new jobs, in the format of sbatch."
    )
    parser.add_argument(
        "--time-min",
        metavar="T",
        help="Shortest time limit that Slurm may give to new jobs, so that they start earlier.",
    )
    _parsable_argument(parser)


def _scale(arguments: dict[str, Any]) -> int:
    from relax_hpc.commands import scale

    group = arguments.get("group", "rollout")
    if "without" in arguments:
        conflicts = sorted(arguments.keys() & {"replicas", "time", "time_min"})
        if conflicts:
            raise ConfigError(
                f"--without: found with --{conflicts[0].replace('_', '-')}, which is an option for "
                "jobs; leave out one"
            )
        return scale.remove_engines(arguments["run"], group, arguments["without"])
    replicas = _required(arguments, "replicas", "the number of jobs")
    names = {"time": "time", "time_min": "time-min"}
    options = [
        f"--{option}={arguments[name]}" for name, option in names.items() if arguments.get(name)
    ]
    return scale.main(arguments["run"], group, replicas, options, arguments.get("parsable", False))


def _join_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("engine", metavar="ENGINE_URL", help="Address of the SGLang server.")
    parser.add_argument(
        "--api", required=True, metavar="URL", help="Address of the service of the run."
    )
    parser.add_argument(
        "--token-file",
        required=True,
        metavar="F",
        help="File with a token of POST /members/tokens.",
    )
    parser.add_argument(
        "--engine-key-file", metavar="F", help="File with the API key of the server, if it has one."
    )
    parser.add_argument(
        "--staging",
        metavar="DIR",
        help="Folder for versions of the weights, which the server can read. Default: /dev/shm.",
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        metavar="S",
        help="Seconds without an answer of the service after which the command ends with 75. "
        "Default: 3600.",
    )


def _join(arguments: dict[str, Any]) -> int:
    from relax_hpc.service.join import member

    return member.main(
        arguments["engine"],
        arguments["api"],
        arguments["token_file"],
        arguments.get("engine_key_file", ""),
        arguments.get("staging", "/dev/shm"),
        arguments.get("wait_s", 3600.0),
    )


def _stop_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--now", action="store_true", help="Stop immediately, without waiting for a checkpoint."
    )


def _stop(arguments: dict[str, Any]) -> int:
    from relax_hpc.commands import stop

    return stop.main(arguments["run"], arguments.get("now", False))


def _replay_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--step", type=int, metavar="K", help="Last step to train again.")
    json_argument(parser)


def _replay(arguments: dict[str, Any]) -> int:
    from relax_hpc.commands import replay

    step = _required(arguments, "step", "the step to train again")
    return replay.main(arguments["run"], step, arguments.get("json", False))


def _logs_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--group", metavar="G", help="Show only logs of this group.")
    parser.add_argument(
        "--role", metavar="R", help="Show only logs of this role: controller, rollout, actor, ..."
    )
    parser.add_argument("--rank", type=int, metavar="K", help="Show only logs of this rank.")
    parser.add_argument(
        "--incarnation",
        type=int,
        metavar="E",
        help="Show logs of this incarnation. Default: the newest.",
    )
    parser.add_argument(
        "-n",
        "--lines",
        type=int,
        default=20,
        metavar="LINES",
        help="Number of last lines of each file. Default: 20.",
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="Print new lines until the run ends."
    )


def _logs(arguments: dict[str, Any]) -> int:
    from relax_hpc.ops.observe import logs

    run, follow = arguments.pop("run"), arguments.pop("follow", False)
    return logs.main(run, logs.LogFilter(**arguments), follow)


def _stacks_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--group", default="", metavar="G", help="Show only processes of this group."
    )
    parser.add_argument("--rank", type=int, metavar="K", help="Show only this rank of each role.")
    parser.add_argument(
        "--native",
        action="store_true",
        help="Show frames of C code too, by py-spy, which stops each process for some seconds.",
    )


def _stacks(arguments: dict[str, Any]) -> int:
    from relax_hpc.ops.inspect import stacks

    return stacks.main(arguments.pop("run"), **arguments)


def _attach_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("--group", metavar="G", help="Group of the rank.")
    parser.add_argument(
        "--role", default="", metavar="R", help="Role of the rank, if the group has several roles."
    )
    parser.add_argument(
        "--rank", type=int, default=0, metavar="K", help="Number of the rank. Default: 0."
    )


def _attach(arguments: dict[str, Any]) -> int:
    from relax_hpc.ops.inspect import attach

    run, group = arguments.pop("run"), _required(arguments, "group", "the group of the rank")
    return attach.main(run, group, **arguments)


def _track_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--to",
        metavar="TRACKER",
        help="wandb, trackio, mlflow, or a class of yours as package.module:Class.",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="End after the lines that exist now. Default: follow until the run ends.",
    )


def _track(arguments: dict[str, Any]) -> int:
    from relax_hpc.ops import track

    to = _required(arguments, "to", "a tracker: wandb, trackio, mlflow or package.module:Class")
    return track.main(arguments["run"], to, arguments.get("once", False))


def _profile_arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument(
        "--steps", metavar="STEPS", help="Steps to record: 5, or 5-7. They must not have begun."
    )
    parser.add_argument(
        "--role",
        default="actor",
        metavar="R,...",
        help="Roles to record; rollout: its engines. Default: actor.",
    )
    parser.add_argument(
        "--rank",
        default="0",
        metavar="K,...",
        help="Ranks of each role to record, or numbers of engines. Default: 0.",
    )
    parser.add_argument(
        "--stacks", action="store_true", help="Record the Python stack of each operation."
    )
    parser.add_argument(
        "--shapes", action="store_true", help="Record the shapes of the tensors of each operation."
    )


def _profile(arguments: dict[str, Any]) -> int:
    from relax_hpc.commands import profile

    run, steps = arguments.pop("run"), _required(arguments, "steps", "steps such as 5-7")
    roles = [role for role in arguments.pop("role", "actor").split(",") if role]
    ranks = arguments.pop("rank", "0").split(",")
    if not all(rank.isdecimal() for rank in ranks):
        raise ConfigError(f"--rank: found {','.join(ranks)!r}, allowed: numbers such as 0,3")
    return profile.main(run, steps, roles, [int(rank) for rank in ranks], **arguments)


def _list_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        default="runs",
        metavar="DIR",
        help="Folder with run directories. Default: runs.",
    )
    json_argument(parser)


def _list(arguments: dict[str, Any]) -> int:
    from relax_hpc.ops.observe import listing

    return listing.main(arguments.get("folder", "runs"), arguments.get("json", False))


def _required(arguments: dict[str, Any], name: str, meaning: str) -> Any:
    if arguments.get(name) is None:
        raise ConfigError(f"{COMMAND_LINE}: --{name}: found nothing, give {meaning}")
    return arguments.pop(name)


RUN_COMMANDS = {
    "status": Command(
        "Show the state of a run. The exit code is 0 if the run continues or is finished, else the "
        "exit code of the run.",
        "RUN [--json] [--watch [SECONDS]]",
        _status_arguments,
        _status,
        only_reads=True,
    ),
    "report": Command(
        "Report how a run used its time, tokens and nodes, and suggest a better division of nodes.",
        "RUN [--json] [--first-step N] [--last-step N]",
        _report_arguments,
        _report,
        only_reads=True,
    ),
    "logs": Command(
        "Show the logs of the processes of a run.",
        "RUN [--group G] [--role R] [--rank K] [--incarnation E] [-n LINES] [--follow]",
        _logs_arguments,
        _logs,
        only_reads=True,
    ),
    "stacks": Command(
        "Show the stacks of all threads of all processes of a run, also of processes that hang.",
        "RUN [--group G] [--rank K] [--native]",
        _stacks_arguments,
        _stacks,
    ),
    "attach": Command(
        "Open a shell, or run a program, on the node of a rank of a running group, with its "
        "environment and in its container.",
        "RUN --group G [--role R] [--rank K] [-- PROGRAM ...]",
        _attach_arguments,
        _attach,
        takes_program=True,
        for_others=True,
    ),
    "profile": Command(
        "Record traces of later steps of a running run, for https://ui.perfetto.dev.",
        "RUN --steps STEPS [--role R,...] [--rank K,...] [--stacks] [--shapes]",
        _profile_arguments,
        _profile,
    ),
    "resubmit": Command(
        "Replace one group of a run, optionally with another size, setting or code, while the "
        "other groups continue.",
        "RUN --group G [--nodes N] [--code DIR] [--new-job | --in-place] [--parsable] [--config "
        "F]... [--KEY VALUE]...",
        _resubmit_arguments,
        _resubmit,
        takes_config=True,
    ),
    "scale": Command(
        "Change the number of jobs or engines of a rollout group while the run continues.",
        "RUN [--group G] (--replicas N [--time T] [--time-min T] [--parsable] | --without K,...)",
        _scale_arguments,
        _scale,
    ),
    "join": Command(
        "Let an SGLang server join a running run, from a node that shares no filesystem with it.",
        "ENGINE_URL --api URL --token-file F [--engine-key-file F] [--staging DIR] [--wait-s S]",
        _join_arguments,
        _join,
    ),
    "stop": Command(
        "Stop a run cleanly: save a checkpoint, then end all of its jobs and processes.",
        "RUN [--now]",
        _stop_arguments,
        _stop,
    ),
    "track": Command(
        "Send the metrics of a run to an experiment tracker. It can be started, ended and repeated "
        "at any time.",
        "RUN --to TRACKER [--once]",
        _track_arguments,
        _track,
    ),
    "replay": Command(
        "Train a step of a run again on the rows of its journal, and compare the gradient norm and "
        "the bytes of the next version with those of the run. The exit code is 0 if they are "
        "equal.",
        "RUN --step K [--json]",
        _replay_arguments,
        _replay,
    ),
    "list": Command(
        "List the runs in a folder. The exit code is the most severe one of all runs.",
        "[DIR] [--json]",
        _list_arguments,
        _list,
        only_reads=True,
    ),
}
