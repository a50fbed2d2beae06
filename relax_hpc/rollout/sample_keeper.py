"""Samples that a rollout rank keeps for people: of rows that it has put, and of evaluations."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import Tokenizer
from relax_hpc.engines.engine import Generation
from relax_hpc.rewards import RewardError, Score
from relax_hpc.rollout.evaluation import Evaluated
from relax_hpc.rollout.sample_log import Sample, SampleLog, kept_of
from relax_hpc.rollout.thumbnails import thumbnail_of
from relax_hpc.transfer_queue.row_schema import Row
from relax_hpc.versions import Version

_SHOWN_CHARS = 1500
"""Characters of a prompt or a response in TensorBoard."""


class SampleKeeper:
    """Chooses episodes, has their tokens spelled out, and appends them to a `SampleLog`. Safe to use from threads."""

    def __init__(self, log: SampleLog, config: Config, tokenizer: Tokenizer, media: Path = Path()) -> None:
        """``media``: folder of the store of what rows name in their spans."""
        self.log, self.config, self.tokenizer, self._media = log, config, tokenizer, media

    def keeps(self, ticket: int) -> bool:
        """Whether the episodes of ``ticket`` are among those of its step that are kept."""
        config = self.config
        return kept_of(ticket, config.samples.per_step, config.prompts_per_step, config.samples_per_prompt)

    def put(
        self, rows: Iterable[Row], shard: str, about: Mapping[str, Mapping[str, Any]] | None = None
    ) -> list[Sample]:
        """Keep those of ``rows``, which lie in ``shard``, that are to be kept, and return them.

        ``about``: by row id what else is known of it, such as its `answer` or the `components` of its reward.
        """
        by_step: dict[int, list[Sample]] = defaultdict(list)
        for row in rows:
            if self.keeps(row["ticket"]):
                known, versions = int(row["prompt_len"]), row["token_versions"]
                made = Generation(row["token_ids"][known:].tolist(), [], versions[known:], row["finish_reason"])
                step, prompt = row["ticket"] // self.config.prompts_per_step, row["token_ids"][:known].tolist()
                sample = self._sample(row["row_id"], step, row["prompt_id"], prompt, made, row["reward"])
                sample |= self._seen(self._media / span["media_id"] for span in row["spans"])
                by_step[step].append(sample | {"shard": shard} | dict((about or {}).get(row["row_id"], {})))
        for step, samples in by_step.items():
            self.log.keep(samples, step)
        return [sample for samples in by_step.values() for sample in samples]

    def evaluated(self, name: str, version: Version, scored: Iterable[Evaluated]) -> None:
        """Keep the episodes of the evaluation set ``name``, if evaluations are kept."""
        if not self.config.samples.evaluations:
            return
        samples = []
        for place, (prompt, answer, score) in enumerate(scored):
            made = (
                answer if isinstance(answer, Generation) else Generation([], [], np.zeros(0, np.int32), answer.reason)
            )
            responses = self.config.eval.responses
            called = prompt.prompt_id if responses == 1 else f"{prompt.prompt_id}.{place % responses:02d}"
            known = Score(0.0) if isinstance(score, RewardError) else score
            sample = self._sample(called, version.number, prompt.prompt_id, prompt.token_ids, made, known.total)
            more = {"answer": prompt.answer, "weights": str(version), "components": known.components}
            more |= self._seen(medium.blob for medium in prompt.media if medium.blob)
            # Nobody counts its reward.
            failed = {"failed": score.reason} if isinstance(score, RewardError) else {}
            samples.append(sample | {"eval": name} | more | failed)
        self.log.keep(samples)

    @staticmethod
    def _seen(blobs: Iterable[Path]) -> Sample:
        """Thumbnails of media, each once; nothing where there are none."""
        found = [shown for blob in dict.fromkeys(blobs) if (shown := thumbnail_of(blob))]
        return {"media": found} if found else {}

    def _sample(
        self, name: str, step: int, prompt_id: str, prompt: Iterable[int], made: Generation, reward: float
    ) -> Sample:
        return {
            "id": name,
            "step": step,
            "prompt_id": prompt_id,
            "prompt": self.tokenizer.decode(list(prompt)),
            "response": self.tokenizer.decode(list(made.token_ids)),
            "reward": float(reward),
            "finish_reason": made.finish_reason,
            "tokens": int(np.count_nonzero(made.token_versions)),
            "versions": [str(Version.decode(code)) for code in np.unique(made.token_versions).tolist() if code],
            "time": time.time(),
        }


def in_tensorboard(samples: list[Sample]) -> list[str]:
    """The best and the worst of ``samples`` as texts for people."""
    ordered = sorted(samples, key=lambda sample: -sample["reward"])
    return [_text(sample) for sample in ordered[:1] + ordered[1:][-1:]]


def _text(sample: Sample) -> str:
    head = f"{sample['id']}  reward {sample['reward']:.4g}  {sample['finish_reason']}"
    return "\n".join([head, *(f"{name}: {sample[name][:_SHOWN_CHARS]}" for name in ("prompt", "response"))])
