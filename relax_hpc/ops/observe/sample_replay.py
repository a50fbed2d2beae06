"""`relax-hpc samples RUN --replay ID`: check that an environment repeats its observations.

The turns of the policy are those of the stored episode.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir, check_owner
from relax_hpc.base.terminal_text import escape_controls
from relax_hpc.config import load_resolved
from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.environments.base import EnvironmentFault
from relax_hpc.ops.observe.sample_reading import valid_samples
from relax_hpc.rollout.engines.engine import Episode, GenerateRequest, Sampling
from relax_hpc.rollout.episodes.history import OpenRow
from relax_hpc.rollout.episodes.recorded_episode import ReplayMismatch
from relax_hpc.rollout.episodes.recording import read_recording
from relax_hpc.rollout.episodes.replay import replay
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.rollout.readable_rows import reported_outcome
from relax_hpc.rollout.rows import draw_key
from relax_hpc.rollout.sample_log import CUT_SHORT, Sample, read_samples
from relax_hpc.tasks.files import open_evals, open_train

_ATTEMPTS = 1000
"""Number of a ticket's attempts in which the prompt is searched. It is in the first attempt, unless
attempts have failed."""


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """An episode in the samples of a run."""

    samples: Sequence[Sample]
    """Samples of its rows, in their order."""

    @property
    def first(self) -> Sample:
        return self.samples[0]

    @property
    def ticket(self) -> int:
        """Ticket; 0 in an evaluation."""
        return 0 if "eval" in self.first else int(self.first["id"].partition(".")[0])

    @property
    def number(self) -> int:
        """Number among the episodes of its prompt."""
        return int(self.first["recording"]["episode"])

    @property
    def turns(self) -> int:
        """Turns of the policy."""
        return sum(len(sample["recording"]["turns"]) for sample in self.samples)

    def rows(self) -> list[OpenRow]:
        """Rows of the episode. ConfigError: the recording is damaged."""
        try:
            return [read_recording(sample["recording"]) for sample in self.samples]
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--replay: the sample {self.first['id']} is damaged: {error!r}"
            ) from error


def main(folder: str, name: str, eval_set: str = "", step: int | None = None) -> int:
    """Replay the episode ``name`` and print differences; EXIT_CONFIG if there are any.

    ``eval_set``: evaluation set of the episode; ``step``: see `sample_view.SampleFilter`.
    ConfigError: there is no such episode, or the run belongs to another user. Its configuration
    names programs, which a replay would run with the rights of this user.
    """
    run = RunDir(Path(folder))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    check_owner(run.root, "--replay")
    stored = find_episode(read_samples(run.samples), name, eval_set, step)
    config, tokenizer = load_resolved(run.root), load_tokenizer(run.model)
    try:
        replayed = _replay(run, config, tokenizer, stored)
    except EnvironmentFault as fault:
        print(f"{name}: {escape_controls(str(fault))}")
        for line in _texts(fault, tokenizer) if isinstance(fault, ReplayMismatch) else ():
            print(line)
        return EXIT_CONFIG
    mistakes = list(differences(stored, replayed))
    result = "; ".join(mistakes) or f"{stored.turns} turns, and the same again"
    print(f"{name}: {escape_controls(result)}")
    return EXIT_CONFIG if mistakes else EXIT_DONE


def find_episode(
    samples: Iterable[Sample], name: str, eval_set: str = "", step: int | None = None
) -> StoredEpisode:
    """The newest episode ``name``, which is the id of a row, or an id without the row's number.

    ConfigError: no episode has this name.
    """
    episodes: dict[tuple, list[Sample]] = defaultdict(list)
    matching = set[tuple]()
    for sample in valid_samples(samples):
        is_of_set = sample.get("eval", "") == eval_set
        if "recording" not in sample or not is_of_set or step not in (None, sample["step"]):
            continue
        key = (
            sample["step"],
            sample.get("shard"),
            sample.get("prompt_id"),
            "" if eval_set else sample["id"].partition(".")[0],
            sample["recording"].get("episode"),
        )
        episodes[key].append(sample)
        if name in (sample["id"], sample["id"].rpartition(".")[0]):
            matching.add(key)
    if not matching:
        raise ConfigError(
            f"--replay: found {name!r}, of which no episode against an environment was kept; "
            "allowed: an id that `relax-hpc samples` shows, of an evaluation with --eval SET"
        )
    candidates = [rows for key, rows in episodes.items() if key in matching]
    newest = max(candidates, key=lambda rows: rows[0]["time"])
    return StoredEpisode(sorted(newest, key=lambda sample: sample["recording"].get("row", 0)))


def differences(stored: StoredEpisode, replayed: Episode) -> Iterator[str]:
    """Differences between the stored episode and a replay that reached its end."""
    rows = [[*row.prompt, *row.generation.token_ids] for row in replayed.rows]
    if rows != [sample["recording"]["token_ids"] for sample in stored.samples]:
        yield "its tokens differ"
    stored_reason = stored.first["finish_reason"]
    if replayed.finish_reason != stored_reason:
        yield f"it ended by {stored_reason}, and by {replayed.finish_reason} now"
    then = stored.first.get("environment", {})
    now = reported_outcome(replayed.outcome or {})
    if CUT_SHORT in then:
        return
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            yield f"{name}: {then.get(name)} then, {now.get(name)} now"


def _replay(run: RunDir, config: Config, tokenizer: Tokenizer, stored: StoredEpisode) -> Episode:
    prompt = _prompt(run, config, tokenizer, stored)
    budget = config.rollout.max_new_tokens
    if "eval" in stored.first:
        budget = config.eval.max_new_tokens or budget
    sampling = Sampling(1.0, 1.0, tokenizer.eos_ids, config.seed)
    key = draw_key(stored.ticket, prompt)
    request = GenerateRequest(prompt.token_ids, key, stored.number, sampling, budget)
    with tempfile.TemporaryDirectory(prefix="relax-replay-") as media:
        return asyncio.run(replay(config, tokenizer, prompt, request, stored.rows(), Path(media)))


def _prompt(run: RunDir, config: Config, tokenizer: Tokenizer, stored: StoredEpisode) -> Prompt:
    """Prompt of an episode. ConfigError: the data set does not have it any more."""
    prompts: Iterable[Prompt]
    if "eval" in stored.first:
        prompts = open_evals(run, config, tokenizer)[stored.first["eval"]]
    else:
        source = PromptSource(open_train(run, config, tokenizer), config)
        prompts = (source.prompt(stored.ticket, attempt) for attempt in range(_ATTEMPTS))
    prompt_id = stored.first["prompt_id"]
    for prompt in prompts:
        if prompt.prompt_id == prompt_id:
            return prompt
    raise ConfigError(
        f"--replay: prompt {prompt_id} of {stored.first['id']} is not in the file of prompts any "
        "more"
    )


def _texts(fault: ReplayMismatch, tokenizer: Tokenizer) -> Iterator[str]:
    """Texts of the observation then and now, with labels."""
    for label, tokens in (("then", fault.then), ("now", fault.now)):
        if tokens:
            lines = escape_controls(tokenizer.decode(tokens)).split("\n")
            yield f"{label:<6}{lines[0]}"
            yield from (f"{'':<6}{line}" for line in lines[1:])
