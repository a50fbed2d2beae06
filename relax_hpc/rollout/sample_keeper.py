"""Samples that a rollout rank stores for people: rows that it has put, and evaluations."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.data.generation import Episode, FinishReason, Generation
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.queue.row_schema import Row
from relax_hpc.rewards import RewardError, Score
from relax_hpc.rollout.attempt import EpisodeResult
from relax_hpc.rollout.engines.engine import EngineFault
from relax_hpc.rollout.evaluation import Evaluated
from relax_hpc.rollout.readable_rows import readable_sample
from relax_hpc.rollout.rows import rows_of
from relax_hpc.rollout.sample_log import Sample, SampleLog, kept_of

_SHOWN_CHARS = 1500
"""Most characters of a prompt or a response in TensorBoard."""


class SampleKeeper:
    """Selects episodes, decodes their tokens, and appends them to a `SampleLog`. Threads may share
    it."""

    def __init__(
        self,
        log: SampleLog,
        config: Config,
        tokenizer: Tokenizer,
        media: Path = Path(),
        eval_media: Path = Path(),
    ) -> None:
        """``media``, ``eval_media``: folders with the media of rows and of evaluations."""
        self.log, self.config, self.tokenizer = log, config, tokenizer
        self._media, self._eval_media = media, eval_media

    def keeps(self, ticket: int) -> bool:
        """Whether the episodes of ``ticket`` are selected."""
        config = self.config
        return kept_of(
            ticket, config.samples.per_step, config.prompts_per_step, config.samples_per_prompt
        )

    def put(
        self,
        rows: Iterable[Row],
        shard: str,
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[Sample]:
        """Store the selected ones of ``rows``, which are in ``shard``, and return their samples.

        ``details``: row id -> further entries of the sample, such as `answer` or the `components`
        of the reward.
        """
        details = details or {}
        by_step: dict[int, list[Sample]] = defaultdict(list)
        for row in rows:
            if self.keeps(row["ticket"]):
                step = row["ticket"] // self.config.prompts_per_step
                sample = self._sample(row, row["row_id"], step, row["reward"], self._media)
                row_details = dict(details.get(row["row_id"], {}))
                by_step[step].append(sample | {"shard": shard} | row_details)
        stored: list[Sample] = []
        for step, samples in by_step.items():
            self.log.keep(samples, step)
            stored += samples
        return stored

    def put_evaluated(self, name: str, version: Version, evaluated: Iterable[Evaluated]) -> None:
        """Store the episodes of the evaluation set ``name``, if evaluations are stored."""
        if not self.config.samples.evaluations:
            return
        entries = {"eval": name, "weights": str(version)}
        samples: list[Sample] = []
        for index, (prompt, answer, score) in enumerate(evaluated):
            number = index % self.config.eval.responses
            rows = self._evaluated_rows(number, version.number, prompt, answer, score)
            samples += [sample | entries for sample in rows]
        self.log.keep(samples)

    def _evaluated_rows(
        self,
        number: int,
        step: int,
        prompt: Prompt,
        answer: EpisodeResult | EngineFault,
        score: Score | RewardError,
    ) -> Iterator[Sample]:
        """Samples of the rows of response ``number`` to ``prompt``."""
        episode_id = prompt.prompt_id
        if self.config.eval.responses != 1:
            episode_id = f"{prompt.prompt_id}.{number:02d}"
        if isinstance(answer, EngineFault):
            # Samples show the reason of a fault as the finish reason.
            reason = cast(FinishReason, answer.reason)
            answer = Generation([], [], np.zeros(0, np.int32), reason)
        entries: Sample = {"answer": prompt.answer}
        if isinstance(score, RewardError):
            # Shown as 0. The metrics leave out a response without a reward.
            reward = 0.0
            entries |= {"components": Score(0.0).components, "failed": score.reason}
        else:
            reward = score.total
            entries["components"] = score.components
        has_rows = isinstance(answer, Episode) and len(answer.rows) > 1
        for row in rows_of(prompt, 0, {number: answer}):
            # Rows of evaluations are not trained on.
            del row["loss_mask"]
            name = f"{episode_id}.{row['row']:02d}" if has_rows else episode_id
            yield self._sample(row, name, step, reward, self._eval_media) | entries

    def _sample(self, row: Row, name: str, step: int, reward: float, media: Path) -> Sample:
        head = {"id": name, "step": step, "prompt_id": row["prompt_id"], "reward": float(reward)}
        content = readable_sample(row, self.tokenizer, media)
        return head | content | {"finish_reason": row["finish_reason"], "time": time.time()}


def in_tensorboard(samples: list[Sample]) -> list[str]:
    """The best and the worst of ``samples`` as texts."""
    ordered = sorted(samples, key=lambda sample: -sample["reward"])
    return [_text(sample) for sample in ordered[:1] + ordered[1:][-1:]]


def _text(sample: Sample) -> str:
    head = f"{sample['id']}  reward {sample['reward']:.4g}  {sample['finish_reason']}"
    texts = [("prompt", sample["prompt"])]
    if "turns" in sample:
        texts += [(turn["by"], turn["text"].strip("\n")) for turn in sample["turns"]]
    else:
        texts.append(("response", sample["response"]))
    if "answer" in sample:
        texts.append(("answer", sample["answer"]))
    return "\n".join([head, *(f"{name}: {text[:_SHOWN_CHARS]}" for name, text in texts)])
