"""Make the prompts of configs/runs/gsm8k-qwen3-0.6b.yaml from a local copy of GSM8K (arXiv
2110.14168).

    python tools/prepare_gsm8k.py /data/gsm8k --output data/gsm8k

The copy is a folder with the data set as Hugging Face ships it
(`main/train-00000-of-00001.parquet`, `main/test-...`) or as its authors do (`train.jsonl`,
`test.jsonl`): rows of `question` and `answer`, which ends with `#### NUMBER`. Nothing is
downloaded. Written are two files of chat messages, `train.jsonl` and `test.jsonl`, with the number
alone as the answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import write_atomic
from relax_hpc.data.rows import BadLine, read_rows
from relax_hpc.rewards.number_text import read_number

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
SPLITS = {"train": 7473, "test": 1319}
"""Rows that the published data set has."""


def find(folder: Path, split: str) -> Path:
    """The file of a split. ConfigError: there is none, or there are several."""
    found = sorted(
        path for kind in ("jsonl", "parquet") for path in folder.rglob(f"{split}*.{kind}")
    )
    # Beside `main` Hugging Face's copy has `socratic`, the same problems with other solutions.
    found = [path for path in found if "socratic" not in str(path.relative_to(folder))]
    if len(found) != 1:
        names = ", ".join(str(path) for path in found) or "none"
        raise ConfigError(
            f"{folder}: found {names} as its {split} split, allowed: one {split}*.jsonl or .parquet"
        )
    return found[0]


def prompts(path: Path, split: str) -> Iterator[dict[str, object]]:
    """A row of prompts for each of the file's. ConfigError names the first that is none."""
    for number, row in enumerate(read_rows(path), start=1):
        problem = row.detail if isinstance(row, BadLine) else ""
        question, solution = (
            ("", "") if isinstance(row, BadLine) else (row[1].get("question"), row[1].get("answer"))
        )
        if not problem and not (
            isinstance(question, str) and isinstance(solution, str) and "####" in solution
        ):
            problem = "found no texts `question` and `answer`, of which the answer has ####"
        answer = str(solution).rpartition("####")[2].strip()
        if problem or read_number(answer) is None:
            raise ConfigError(
                f"{path}: row {number}: {problem or f'{answer!r} is no number'}; is this GSM8K?"
            )
        message = {"role": "user", "content": f"{question}\n{INSTRUCTION}"}
        yield {"id": f"{split}-{number:05d}", "messages": [message], "answer": answer}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("copy", type=Path, help="folder with the data set")
    parser.add_argument("--output", type=Path, default=Path("data/gsm8k"))
    args = parser.parse_args()
    try:
        for split, usual in SPLITS.items():
            lines = [json.dumps(row) + "\n" for row in prompts(find(args.copy, split), split)]
            args.output.mkdir(parents=True, exist_ok=True)
            write_atomic(args.output / f"{split}.jsonl", "".join(lines).encode())
            note = "" if len(lines) == usual else f" (the published data set has {usual})"
            print(f"{args.output / split}.jsonl: {len(lines)} prompts{note}")
    except (ConfigError, OSError) as error:
        print(f"prepare_gsm8k: {error}", file=sys.stderr)
        return 78
    files = (
        f"--data.train {args.output / 'train.jsonl'} --data.eval.gsm8k {args.output / 'test.jsonl'}"
    )
    print(
        f"next: relax-hpc check --config configs/runs/gsm8k-qwen3-0.6b.yaml {files} --model.path "
        "/models/Qwen3-0.6B"
    )
    print("no run of this recipe has been made yet: what it reaches, and how fast, is not known")
    return 0


if __name__ == "__main__":
    sys.exit(main())
