"""What media cost a run whose generation takes longer than preparing them: steps of two runs, which
differ in nothing but that prompts of one have an image each, and those of the other as many tokens
of text.

Every process is a real one; what engine and trainer compute is replaced by waiting. Told are how
much longer rollout is at a step, from its tickets to its rows, because files are read and decoded
(the target), and how much longer the whole step takes, because trainers read media and lay them out
for towers, too.

    python tools/bench/media_beside.py --json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml
from figures import Figure, print_figures

from relax_hpc.base.metrics.read import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.helpers.media_files import encoded, picture
from tests.helpers.media_prompts import END, IMAGE, START, seeing_model

WARM_UP_STEPS = 3
"""First steps that are left out."""
TEXT_TOKEN, AROUND = 5, 3
"""A token of text, and tokens of a prompt beside those that stand for its image."""
_RUN_S = 600.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What both runs have."""

    staleness: int
    steps: int
    groups: int
    side: int
    generate_s: float
    """Of a step."""
    train_s: float

    @property
    def tokens(self) -> int:
        """Tokens that stand for an image."""
        return (self.side // 32) ** 2

    def settings(self, model: Path, rows: Path) -> dict[str, Any]:
        places, samples = self.groups // 4, 4
        window = self.groups * samples * (self.tokens + AROUND + 1)
        return {
            "steps": self.steps,
            "prompts_per_step": self.groups,
            "samples_per_prompt": samples,
            "max_staleness": self.staleness,
            "model": {"path": str(model)},
            "data": {"train": str(rows), "max_prompt_tokens": self.tokens + 2 * AROUND},
            "rollout": {
                "groups_per_request": 1,
                "requests_in_flight": places,
                "max_new_tokens": 1,
                "reward": "exact",
                "engine": {
                    "kind": "simulated",
                    "simulated": {
                        "response_s": self.generate_s * places / self.groups,
                        "sigma": 0.0,
                        "concurrency": places * samples,
                    },
                },
            },
            "actor": {"simulated_step_s": self.train_s, "max_tokens_per_micro_batch": window // 4},
            "checkpoint": {"every": 1_000_000},
            "weights": {"file_every": 0},
            "eval": {"every": 0},
            "groups": {"actor_fwd": None, "reference": None},
        }


def write_rows(folder: Path, shape: Shape) -> dict[str, Path]:
    """Files of prompts, of which each has an image of its own, or as many tokens of text."""
    count = shape.groups * (shape.steps + shape.staleness + 1)
    for number in range(count):
        (folder / f"{number}.jpg").write_bytes(
            encoded(picture(shape.side, shape.side, number), "JPEG", quality=90)
        )
    seen = [
        {"token_ids": [START, IMAGE, END, TEXT_TOKEN], "images": [f"{number}.jpg"]}
        for number in range(count)
    ]
    read = [{"token_ids": [TEXT_TOKEN] * (shape.tokens + AROUND)}] * count
    files = {"images": folder / "images.jsonl", "text": folder / "text.jsonl"}
    for name, rows in (("images", seen), ("text", read)):
        lines = (
            json.dumps({"id": str(number), "answer": "", **row}) for number, row in enumerate(rows)
        )
        files[name].write_text("\n".join(lines) + "\n")
    return files


def measured(shape: Shape, rows: Path, folder: Path) -> tuple[float, float]:
    """Mean seconds for which rollout was at a step of a run over ``rows``, and of the whole
    step."""
    folder.mkdir()
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(shape.settings(rows.with_name("model"), rows)))
    words = [
        sys.executable,
        "-m",
        "relax_hpc",
        "run",
        "--config",
        str(file),
        "--run_dir",
        str(folder / "run"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_RUN_S)
    if done.returncode:
        raise RuntimeError(f"{rows.name}: exit code {done.returncode}: {done.stderr[-500:]}")
    steps = [row for row in read_metrics(folder / "run") if "reward/mean" in row][WARM_UP_STEPS:]
    busy = [
        sum(row.get(f"perf/rollout_{kind}_s", 0.0) for kind in ("generate", "queue"))
        for row in steps
    ]
    return mean(busy), (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)


def figures(shapes: list[Shape], rounds: int) -> Iterator[Figure]:
    """What media add to rollout's part of a step, and to all of it, for each shape."""
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="relax-bench-") as name:
            folder, found = Path(name), []
            files = write_rows(folder, shape)
            seeing_model(folder / "model")
            for number in range(rounds):
                text, seen = (
                    measured(shape, files[kind], folder / f"{kind}-{number}")
                    for kind in ("text", "images")
                )
                found.append(
                    [media / without - 1 for media, without in zip(seen, text, strict=True)]
                )
        busy, step = zip(*found, strict=True)
        about = f"staleness {shape.staleness}, {shape.groups} images a step"
        yield Figure(
            f"{about}: added to rollout", median(busy), "", "<= 0.02", median(busy) <= 0.02, busy
        )
        yield Figure(f"{about}: added to the whole step", median(step), "", rounds=step)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs")
    parser.add_argument(
        "--steps", type=int, default=15, help=f"of each run; the first {WARM_UP_STEPS} are left out"
    )
    parser.add_argument(
        "--groups", type=int, default=32, help="prompts of a step, each with an image"
    )
    parser.add_argument("--side", type=int, default=1024, help="pixels of a side of an image")
    parser.add_argument(
        "--generate_s", type=float, default=4.0, help="seconds in which a step is generated"
    )
    parser.add_argument(
        "--train_s", type=float, default=1.0, help="seconds in which it is trained on"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all figures as one line of JSON at the end"
    )
    args = parser.parse_args()
    about = (args.steps, args.groups, args.side, args.generate_s, args.train_s)
    shapes = [Shape(staleness, *about) for staleness in args.staleness]
    print_figures(figures(shapes, args.rounds), vars(args), args.json)


if __name__ == "__main__":
    main()
