"""`relax-hpc convert SOURCE TARGET`: convert models between Hugging Face and megatron-core."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from relax_hpc.base.errors import EXIT_DONE, ConfigError, RelaxError
from relax_hpc.base.terminal_text import escape_line, unfiltered
from relax_hpc.commands.command import Command, json_argument
from relax_hpc.config.layer_validation import COMMAND_LINE

if TYPE_CHECKING:
    from relax_hpc.convert.conversion import ConversionRequest

_DTYPES = ("float32", "bfloat16", "float16")
_CHECKS = ("digests", "all")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_JOB = ("partition", "account", "time", "mem", "cpus", "wait")


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="Hugging Face model, torch_dist checkpoint, or checkpoint of a run.",
    )
    parser.add_argument("target", metavar="TARGET", help="Directory to create.")
    parser.add_argument(
        "--dtype", metavar="T", help=f"Convert all tensors to this type: {', '.join(_DTYPES)}."
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        help="Size of the largest file, such as 5GB. Default: the sizes of the model's files.",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="Directory with config.json and the tokenizer. Default: <run>/model.",
    )
    parser.add_argument(
        "--verify",
        nargs="?",
        const="all",
        metavar="WHAT",
        help="Read all tensors again and compare them. `all` also compares logits.",
    )
    parser.add_argument(
        "--prompt",
        metavar="P",
        help="Prompt for the comparison of logits: a text, or token ids separated by commas.",
    )
    parser.add_argument(
        "--ignore-keys",
        nargs="+",
        metavar="KEY",
        help="Keys of config.json to ignore, as in model.ignore_keys.",
    )
    json_argument(parser)
    parser.add_argument("--slurm", action="store_true", help="Convert in a Slurm job (submitit).")
    parser.add_argument("--partition", metavar="P", help="Partition of the job.")
    parser.add_argument("--account", metavar="A", help="Account of the job.")
    parser.add_argument(
        "--time",
        type=int,
        metavar="MINUTES",
        help="Time limit of the job. At its limit the job is requeued and continues.",
    )
    parser.add_argument("--mem", type=int, metavar="GB", help="Memory of the job.")
    parser.add_argument("--cpus", type=int, metavar="N", help="CPUs of the job.")
    parser.add_argument("--wait", action="store_true", help="Wait until the job has ended.")


def _convert(arguments: dict[str, Any]) -> int:
    as_json, slurm = arguments.pop("json", False), arguments.pop("slurm", False)
    job = {name: arguments.pop(name) for name in _JOB if name in arguments}
    if job and not slurm:
        raise ConfigError(
            f"{COMMAND_LINE}: --{next(iter(job))}: found without --slurm, give both or none"
        )
    request = _request(arguments)
    if not slurm:
        from relax_hpc.convert.conversion import convert

        _print_report(convert(request, _print_step), as_json)
        return EXIT_DONE
    from relax_hpc.convert.conversion import check_paths
    from relax_hpc.convert.job import JobOptions, submit

    check_paths(request)
    answer = submit(request, JobOptions(**job))
    if "error" in answer:
        error = RelaxError(f"job {answer['job']}: {answer['error']}")
        error.exit_code = answer["exit_code"]
        raise error
    _print_report(answer.get("report", answer), as_json)
    return EXIT_DONE


def _request(arguments: dict[str, Any]) -> ConversionRequest:
    from relax_hpc.convert.conversion import ConversionRequest

    for name, allowed in (("dtype", _DTYPES), ("verify", _CHECKS)):
        if arguments.get(name) is not None and arguments[name] not in allowed:
            raise ConfigError(
                f"{COMMAND_LINE}: --{name}: found {arguments[name]!r}, allowed: "
                f"{', '.join(allowed)}"
            )
    if "prompt" in arguments and arguments.get("verify") != "all":
        raise ConfigError(f"{COMMAND_LINE}: --prompt: found without --verify, give both or none")
    return ConversionRequest(
        source=Path(arguments["source"]),
        target=Path(arguments["target"]),
        dtype=arguments.get("dtype", ""),
        shard_bytes=_bytes(arguments["shard_size"]) if "shard_size" in arguments else 0,
        model=Path(arguments["model"]) if "model" in arguments else None,
        verify=arguments.get("verify", ""),
        prompt=arguments.get("prompt", ""),
        ignore_keys=tuple(arguments.get("ignore_keys", ())),
    )


def _bytes(text: str) -> int:
    """Number of bytes of a size.

    >>> _bytes("5GB")
    5000000000
    """
    match = re.fullmatch(r"([0-9]+)(KB|MB|GB)", text)
    if not match or int(match[1]) == 0:
        raise ConfigError(
            f"{COMMAND_LINE}: --shard-size: found {text!r}, allowed: a number with KB, MB or GB, "
            "such as 5GB"
        )
    return int(match[1]) * _UNITS[match[2]]


def _print_step(line: str) -> None:
    """Print one line of progress to standard error. A terminal shows only the newest line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{escape_line(line)}", end="", file=unfiltered(sys.stderr), flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def _print_report(answer: dict[str, Any], as_json: bool) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=unfiltered(sys.stderr), flush=True)
    if as_json:
        print(json.dumps(answer))
    elif "job" in answer:
        print(f"job {answer['job']}, its log: {answer['log']}")
    else:
        kind = {"hf": "a Hugging Face model", "megatron": "a megatron-core checkpoint"}[
            answer["direction"]
        ]
        print(f"{answer['target']}: {kind}, in {answer['seconds']:.1f} s")
        if answer["files_kept"]:
            print(f"{answer['files_kept']} files were already finished")
        if "tensors" in answer:
            print(f"verified: {answer['tensors']} tensors are the same on both sides")
        logits = answer.get("logits")
        if logits:
            print(
                f"verified: logits of {logits['tokens']} tokens differ by "
                f"{logits['largest_difference']:.3g} at most "
                f"(the largest is {logits['largest']:.3g})"
            )


CONVERT = Command(
    "Convert a model between the formats of Hugging Face and megatron-core, or a checkpoint of a "
    "run to a Hugging Face model. An interrupted conversion continues where it stopped.",
    "SOURCE TARGET [--dtype T] [--shard-size SIZE] [--model DIR] [--verify [digests|all]] "
    "[--prompt P] [--ignore-keys KEY ...] [--json] [--slurm [--partition P] [--account A] [--time "
    "MINUTES] [--mem GB] [--cpus N] [--wait]]",
    _arguments,
    _convert,
    for_others=True,
)
