"""Forward and backward passes over a batch of texts, images, videos and sounds at once, beside the
same rows by kinds.

A tiny Qwen3-Omni on the CPU, all of it trained, by the trainer of runs; the two sides take turns,
and times are of the processor. What is measured is what mixing costs: micro-batches in which some
rows have no media, or those of another tower.

    python tools/bench/media_step.py --json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from figures import Figure, print_figures

from relax_hpc.algorithms import Sft
from relax_hpc.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from relax_hpc.data.media import spans_of
from relax_hpc.data.multimodal.medium import Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.training import parallel
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import collate, split_rows
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.towers.media import RowMedia
from relax_hpc.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.helpers.media_files import avi, clip, encoded, picture, sound, tone
from tests.helpers.media_prompts import hearing_model, placed, stored

ANSWER = 16
"""Tokens of a row that are learned."""
START_TIMEOUT_S = 60.0
Rows = Sequence[Row]


class Passes:
    """Passes of a model over rows, in micro-batches."""

    def __init__(self, model: Path, media: dict[str, Medium], max_tokens: int) -> None:
        self.model = PolicyModel(read_config(model), ModelConfig(), ParallelConfig())
        self.model.load_hf(model)
        self.trainer = Trainer(self.model, Sft(), OptimizerConfig(lr=1e-6), temperature=1.0)
        self.media, self.rules, self.max_tokens = media, Rules.from_model(model), max_tokens

    def seconds(self, rows: Rows) -> float:
        """Seconds of the passes over ``rows``; what comes before, and the step of the optimizer,
        are not in them."""
        batches = [
            collate(part, 0, "cpu", media=self._media(part))
            for part in split_rows(rows, self.max_tokens)
        ]
        begun = time.process_time()
        self.trainer.accumulate(batches)
        took = time.process_time() - begun
        self.trainer.discard()
        return took

    def _media(self, rows: Rows) -> RowMedia | None:
        names = {span["media_id"] for row in rows for span in row["spans"]}
        return (
            RowMedia.from_media({name: self.media[name] for name in names}, self.rules)
            if names
            else None
        )


def rows_of(
    folder: Path, model: Path, count: int
) -> tuple[dict[str, list[Row]], dict[str, Medium]]:
    """Rows of each kind, each with a medium of its own, and all media."""
    store, media, rows = (
        MediaStore(folder / "media", durable=False),
        dict[str, Medium](),
        dict[str, list[Row]](),
    )
    text = load_tokenizer(model).encode("a" * 300)
    for number in range(count):
        contents = {
            Kind.IMAGE: encoded(picture(256, 256, number)),
            Kind.VIDEO: avi(clip(20, 96, 96 + 32 * number), 10),
            Kind.AUDIO: sound(tone(5.0, pitch=200.0 + number), 16000),
        }
        rows.setdefault("text", []).append(_row(text, []))
        for kind, content in contents.items():
            ids, found = placed(model, store, (kind, content))
            media |= {one.blob.name: stored(one) for one in found if one.blob}
            rows.setdefault(str(kind), []).append(_row(ids, spans_of(found)))
    return rows, media


def _row(prompt: Sequence[int], spans: list[dict]) -> Row:
    tokens = np.array([*prompt, *[5] * ANSWER], np.int32)
    return {
        "token_ids": tokens,
        "loss_mask": (np.arange(len(tokens)) >= len(prompt)).astype(np.uint8),
        "spans": spans,
    }


def figures(rounds: int, count: int, max_tokens: int) -> Iterator[Figure]:
    """The passes over all rows mixed, as a share of the sum of those over each kind."""
    torch.set_num_threads(1)
    parallel.initialize_alone("cpu", 1, START_TIMEOUT_S)
    try:
        with tempfile.TemporaryDirectory() as name:
            model = hearing_model(Path(name) / "model")
            rows, media = rows_of(Path(name), model, count)
            passes = Passes(model, media, max_tokens)
            mixed = [
                row for number in range(count) for row in (some[number] for some in rows.values())
            ]
            alone: dict[str, list[float]] = {kind: [] for kind in rows}
            together = list[float]()
            for number in range(rounds + 1):
                found = {kind: passes.seconds(some) for kind, some in rows.items()}
                whole = passes.seconds(mixed)
                if number:
                    together.append(whole)
                    for kind, seconds in found.items():
                        alone[kind].append(seconds)
            for kind, seconds in alone.items():
                yield Figure(f"{count} rows: {kind}", median(seconds), "s", rounds=seconds)
            ratios = [
                whole / sum(parts) for whole, *parts in zip(together, *alone.values(), strict=True)
            ]
            yield Figure(
                "mixed: of the sum of its parts",
                median(ratios),
                "x",
                "<= 1.1",
                median(ratios) <= 1.1,
                ratios,
            )
    finally:
        parallel.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=8, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument(
        "--json", action="store_true", help="print all figures as one line of JSON at the end"
    )
    args = parser.parse_args()
    print_figures(figures(args.rounds, args.rows, args.max_tokens), vars(args), args.json)


if __name__ == "__main__":
    main()
