"""Samples that a rollout rank keeps for people: of rows that it has put, and of evaluations."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.queue.row_schema import Row
from relax_hpc.rewards import RewardError, Score
from relax_hpc.rollout.attempt import Made
from relax_hpc.rollout.engines.engine import EngineFault, Episode, Generation
from relax_hpc.rollout.evaluation import Evaluated
from relax_hpc.rollout.readable_rows import readable
from relax_hpc.rollout.sample_log import Sample, SampleLog, kept_of
from relax_hpc.rollout.samples import rows_of

_SHOWN_CHARS = 1500
"""Characters of a prompt or a response in TensorBoard."""


class SampleKeeper:
    """Chooses episodes, has their tokens spelled out, and appends them to a `SampleLog`. Safe to
    use from threads."""

    def __init__(
        self,
        log: SampleLog,
        config: Config,
        tokenizer: Tokenizer,
        media: Path = Path(),
        eval_media: Path = Path(),
    ) -> None:
        """``media``, ``eval_media``: folders of the stores of what rows name in their spans, and of
        evaluations."""
        self.log, self.config, self.tokenizer = log, config, tokenizer
        self._media, self._eval_media = media, eval_media

    def keeps(self, ticket: int) -> bool:
        """Whether the episodes of ``ticket`` are among those of its step that are kept."""
        config = self.config
        return kept_of(
            ticket, config.samples.per_step, config.prompts_per_step, config.samples_per_prompt
        )

    def put(
        self, rows: Iterable[Row], shard: str, about: Mapping[str, Mapping[str, Any]] | None = None
    ) -> list[Sample]:
        """Keep those of ``rows``, which lie in ``shard``, that are to be kept, and return them.

        ``about``: by row id what else is known of it, such as its `answer` or the `components` of
        its reward.
        """
        by_step: dict[int, list[Sample]] = defaultdict(list)
        for row in rows:
            if self.keeps(row["ticket"]):
                step = row["ticket"] // self.config.prompts_per_step
                sample = self._sample(row, row["row_id"], step, row["reward"], self._media)
                by_step[step].append(
                    sample | {"shard": shard} | dict((about or {}).get(row["row_id"], {}))
                )
        for step, samples in by_step.items():
            self.log.keep(samples, step)
        return [sample for samples in by_step.values() for sample in samples]

    def evaluated(self, name: str, version: Version, scored: Iterable[Evaluated]) -> None:
        """Keep the episodes of the evaluation set ``name``, if evaluations are kept."""
        if self.config.samples.evaluations:
            about = {"eval": name, "weights": str(version)}
            self.log.keep(
                [
                    sample | about
                    for place, one in enumerate(scored)
                    for sample in self._evaluated(
                        place % self.config.eval.responses, version.number, *one
                    )
                ]
            )

    def _evaluated(
        self,
        number: int,
        step: int,
        prompt: Prompt,
        answer: Made | EngineFault,
        score: Score | RewardError,
    ) -> Iterator[Sample]:
        """The rows of response ``number`` to ``prompt``."""
        called = (
            prompt.prompt_id
            if self.config.eval.responses == 1
            else f"{prompt.prompt_id}.{number:02d}"
        )
        made = (
            Generation([], [], np.zeros(0, np.int32), answer.reason)
            if isinstance(answer, EngineFault)
            else answer
        )
        # Nobody counts the reward of one that has none.
        failed = {"failed": score.reason} if isinstance(score, RewardError) else {}
        known = Score(0.0) if isinstance(score, RewardError) else score
        about = {"answer": prompt.answer, "components": known.components} | failed
        several = isinstance(made, Episode) and len(made.rows) > 1
        for row in rows_of(prompt, 0, {number: made}):
            del row["loss_mask"]  # Nothing of it is trained on.
            name = f"{called}.{row['row']:02d}" if several else called
            yield self._sample(row, name, step, known.total, self._eval_media) | about

    def _sample(self, row: Row, name: str, step: int, reward: float, media: Path) -> Sample:
        about = {"id": name, "step": step, "prompt_id": row["prompt_id"], "reward": float(reward)}
        told = readable(row, self.tokenizer, media)
        return about | told | {"finish_reason": row["finish_reason"], "time": time.time()}


def in_tensorboard(samples: list[Sample]) -> list[str]:
    """The best and the worst of ``samples`` as texts for people."""
    ordered = sorted(samples, key=lambda sample: -sample["reward"])
    return [_text(sample) for sample in ordered[:1] + ordered[1:][-1:]]


def _text(sample: Sample) -> str:
    head = f"{sample['id']}  reward {sample['reward']:.4g}  {sample['finish_reason']}"
    response = [("response", sample["response"])]
    said = (
        [(turn["by"], turn["text"].strip("\n")) for turn in sample["turns"]]
        if "turns" in sample
        else response
    )
    texts = [("prompt", sample["prompt"]), *said]
    if "answer" in sample:
        texts.append(("answer", sample["answer"]))
    return "\n".join([head, *(f"{name}: {text[:_SHOWN_CHARS]}" for name, text in texts)])
