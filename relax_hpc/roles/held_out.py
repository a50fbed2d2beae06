"""Evaluation of a run that learns from files: the actor itself scores held-out rows between
steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np

from relax_hpc.base.errors import ConfigError
from relax_hpc.data.examples import Example, Learned
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.queue.process_context import Context
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import MediaStore
from relax_hpc.roles.data import ExampleMedia, rows_of
from relax_hpc.roles.forward import score_rows
from relax_hpc.roles.inner_forward import check_same
from relax_hpc.roles.media_reader import MediaReader
from relax_hpc.roles.ranks import Ranks
from relax_hpc.rollout.media import UNUSABLE
from relax_hpc.tasks.files import open_evals
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.weights.subscriber import NOTHING


class HeldOut:
    """Evaluation sets of one rank. Every rank creates it and makes the same calls."""

    def __init__(self, context: Context, ranks: Ranks, model: PolicyModel) -> None:
        """``model`` has the weights of the policy before its first step, and keeps them.

        ConfigError: the reference has another architecture.
        """
        self.context, self.config, self.ranks, self.model = context, context.config, ranks, model
        self._media = MediaReader(
            lambda: MediaStore(context.run.eval_media, durable=False), context.model
        )
        files = {}
        if self.config.eval.every:
            files = open_evals(context.run, self.config, load_tokenizer(context.model))
        count = self.config.eval.samples
        # Files contain examples, not prompts, if the algorithm learns from files.
        self.sets = {
            name: self._rows(cast(list[Example], file[:count])) for name, file in files.items()
        }
        if self.sets and "ref_logprobs" in self.config.algorithm.loss_needs():
            self._add_reference()

    def _rows(self, examples: list[Example]) -> list[Row]:
        """Return the rows of ``examples``. The leader decodes and stores their media for all
        ranks."""
        media_ids = self.ranks.control.run_on_leader(lambda: self._store_media(examples))
        rows: list[Row] = []
        for number, example in enumerate(examples):
            sequences = []
            for sequence, ids in zip(example.sequences, media_ids[number], strict=True):
                pairs = zip(sequence.media, ids, strict=True)
                media = tuple(replace(medium, blob=Path(media_id)) for medium, media_id in pairs)
                sequences.append(replace(sequence, media=media))
            rows += rows_of(replace(example, sequences=tuple(sequences)), number, NOTHING)
        return rows

    def _store_media(self, examples: list[Example]) -> list[list[list[str]]]:
        """Return the ids of the media of each sequence of each example. ConfigError: a medium
        cannot be used."""
        sequences = chain.from_iterable(example.sequences for example in examples)
        if not any(sequence.media for sequence in sequences):
            return [[[] for _ in example.sequences] for example in examples]
        with ExampleMedia(self.context) as media:
            try:
                stored = media.stored_for_evaluation(examples)
            except UNUSABLE as bad:
                raise ConfigError(f"data.eval: {bad}; restore the file, or remove its row") from bad
        return [[_ids_of(sequence) for sequence in example.sequences] for example in stored]

    def _add_reference(self) -> None:
        """Add the reference's log-probabilities to the rows. Its weights are those of the policy
        now, or are loaded for this purpose only."""
        path, policy = self.config.model.reference_path, self.context.model
        if path:
            check_same(read_config(Path(path)), self.model.hf_config, self.config.model.ignore_keys)
            self.model.load_hf(Path(path))
        for rows in self.sets.values():
            for row, scores in zip(rows, self._scores(rows), strict=True):
                row["ref_logprobs"] = scores
        if path:
            self.model.load_hf(policy)

    def evaluate(self, version: int) -> None:
        """Report the metrics of the rows with the present weights, ``version``, if they are due."""
        every = self.config.eval.every
        if not self.sets or (version % every and version != self.config.steps):
            return
        values: dict[str, float] = {}
        with self.context.spans("eval", step=version):
            for name, rows in self.sets.items():
                scores = self._scores(rows)
                if self.ranks.leader:
                    metrics = self.config.algorithm.held_out(rows, scores)
                    values |= {f"eval/{name}/{tag}": value for tag, value in metrics.items()}
        self.ranks.ask_queue(lambda client: client.status.report("eval", version, values))

    def _scores(self, rows: list[Row]) -> list[np.ndarray]:
        """Return log-probabilities of the rows' trained tokens, [tokens] each, complete in the
        leader."""
        score = partial(self.model.forward_logprobs, temperature=self.config.rollout.temperature)
        return score_rows(
            rows, self.ranks, self.model, self.config.actor, score, read_media=self._media.read
        )


def _ids_of(sequence: Learned) -> list[str]:
    return [medium.blob.name for medium in sequence.media if medium.blob]
