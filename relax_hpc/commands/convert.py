"""`relax-hpc convert SOURCE TARGET`: models between Hugging Face and megatron-core."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser

from relax_hpc.base.errors import EXIT_DONE, ConfigError, RelaxError
from relax_hpc.base.terminal_text import escape_line, unfiltered
from relax_hpc.commands.command import Command
from relax_hpc.config.layer_validation import COMMAND_LINE

if TYPE_CHECKING:
    from relax_hpc.convert.conversion import ConversionRequest

_DTYPES = ("float32", "bfloat16", "float16")
_CHECKS = ("digests", "all")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_JOB = ("partition", "account", "time", "mem", "cpus", "wait")


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="Hugging Face model, torch_dist checkpoint, or a run's"
    )
    parser.add_argument("target", metavar="TARGET", help="Directory to make")
    parser.add_argument("--dtype", metavar="T", help=f"Change the type: {', '.join(_DTYPES)}")
    parser.add_argument(
        "--shard-size", metavar="SIZE", help="Largest file, as 5GB; else as the model's files were"
    )
    parser.add_argument(
        "--model", metavar="DIR", help="Where config.json and tokenizer are; else <run>/model"
    )
    parser.add_argument(
        "--verify",
        nargs="?",
        const="all",
        metavar="WHAT",
        help="Read all tensors again; all: compare logits too",
    )
    parser.add_argument(
        "--prompt", metavar="P", help="For logits: a text, or token ids with commas between"
    )
    parser.add_argument(
        "--ignore-keys", nargs="+", metavar="KEY", help="Of config.json, as model.ignore_keys"
    )
    parser.add_argument("--json", action="store_true", help="For programs")
    parser.add_argument("--slurm", action="store_true", help="As a job, by submitit")
    parser.add_argument("--partition", metavar="P", help="Of the job")
    parser.add_argument("--account", metavar="A", help="Of the job")
    parser.add_argument(
        "--time", type=int, metavar="MINUTES", help="Of the job; it goes on after its limit"
    )
    parser.add_argument("--mem", type=int, metavar="GB", help="Of the job")
    parser.add_argument("--cpus", type=int, metavar="N", help="Of the job")
    parser.add_argument("--wait", action="store_true", help="Until the job has ended")


def _convert(given: dict[str, Any]) -> int:
    as_json, slurm = given.pop("json", False), given.pop("slurm", False)
    job = {name: given.pop(name) for name in _JOB if name in given}
    if job and not slurm:
        raise ConfigError(
            f"{COMMAND_LINE}: --{next(iter(job))}: found without --slurm, give both or none"
        )
    request = _request(given)
    if not slurm:
        from relax_hpc.convert.conversion import convert

        _show(convert(request, _say), as_json)
        return EXIT_DONE
    from relax_hpc.convert.conversion import check_paths
    from relax_hpc.convert.job import JobOptions, submit

    check_paths(request)
    answer = submit(request, JobOptions(**job))
    if "error" in answer:
        error = RelaxError(f"job {answer['job']}: {answer['error']}")
        error.exit_code = answer["exit_code"]
        raise error
    _show(answer.get("report", answer), as_json)
    return EXIT_DONE


def _request(given: dict[str, Any]) -> ConversionRequest:
    from relax_hpc.convert.conversion import ConversionRequest

    for name, allowed in (("dtype", _DTYPES), ("verify", _CHECKS)):
        if given.get(name) is not None and given[name] not in allowed:
            raise ConfigError(
                f"{COMMAND_LINE}: --{name}: found {given[name]!r}, allowed: {', '.join(allowed)}"
            )
    if "prompt" in given and given.get("verify") != "all":
        raise ConfigError(f"{COMMAND_LINE}: --prompt: found without --verify, give both or none")
    return ConversionRequest(
        source=Path(given["source"]),
        target=Path(given["target"]),
        dtype=given.get("dtype", ""),
        shard_bytes=_bytes(given["shard_size"]) if "shard_size" in given else 0,
        model=Path(given["model"]) if "model" in given else None,
        verify=given.get("verify", ""),
        prompt=given.get("prompt", ""),
        ignore_keys=tuple(given.get("ignore_keys", ())),
    )


def _bytes(text: str) -> int:
    """
    >>> _bytes("5GB")
    5000000000
    """
    found = re.fullmatch(r"([0-9]+)(KB|MB|GB)", text)
    if not found or int(found[1]) == 0:
        raise ConfigError(
            f"{COMMAND_LINE}: --shard-size: found {text!r}, allowed: a number with KB, MB or GB, "
            "as 5GB"
        )
    return int(found[1]) * _UNITS[found[2]]


def _say(line: str) -> None:
    """One line a step, beside the answer; a terminal shows the newest alone."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{escape_line(line)}", end="", file=unfiltered(sys.stderr), flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def _show(answer: dict[str, Any], as_json: bool) -> None:
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
            print(f"{answer['files_kept']} files were finished before")
        if "tensors" in answer:
            print(f"verified: {answer['tensors']} tensors are the same on both sides")
        if logits := answer.get("logits"):
            print(
                f"verified: logits of {logits['tokens']} tokens differ by "
                f"{logits['largest_difference']:.3g} at most "
                f"(the largest is {logits['largest']:.3g})"
            )


CONVERT = Command(
    "Convert a model between Hugging Face and megatron-core, or a run's checkpoint to Hugging "
    "Face.",
    "SOURCE TARGET [--dtype T] [--shard-size SIZE] [--model DIR] [--verify [digests|all]] "
    "[--prompt P] [--ignore-keys KEY ...] [--json] [--slurm [--partition P] [--account A] [--time "
    "MINUTES] [--mem GB] [--cpus N] [--wait]]",
    _arguments,
    _convert,
    for_others=True,
)
