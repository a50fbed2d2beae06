"""`relax-hpc samples RUN --replay ID`: an episode again, against its environment, which is to say
the same."""

from __future__ import annotations

import asyncio
import tempfile
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
from relax_hpc.ops.observe.sample_reading import whole
from relax_hpc.rollout.engines.engine import Episode, GenerateRequest, Sampling
from relax_hpc.rollout.episodes.history import OpenRow
from relax_hpc.rollout.episodes.recorded_episode import Differs
from relax_hpc.rollout.episodes.recording import open_row
from relax_hpc.rollout.episodes.replay import replay
from relax_hpc.rollout.readable_rows import reported_outcome
from relax_hpc.rollout.sample_log import CUT_SHORT, Sample, read_samples
from relax_hpc.rollout.samples import PromptSource, draw_key
from relax_hpc.tasks.files import open_evals, open_train

_ATTEMPTS = 1000
"""Prompts of a ticket among which that of an episode is looked for: the first one, unless attempts
have failed."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An episode as samples have it."""

    samples: Sequence[Sample]
    """Samples of its rows, in their order."""

    @property
    def first(self) -> Sample:
        return self.samples[0]

    @property
    def ticket(self) -> int:
        """Ticket, 0 of an evaluation."""
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
        """Rows of the episode. ConfigError: they are no more what was recorded."""
        try:
            return [open_row(sample["recording"]) for sample in self.samples]
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--replay: the sample {self.first['id']} is damaged: {error!r}"
            ) from error


def main(folder: str, name: str, of: str = "", step: int | None = None) -> int:
    """Print whether the environment of the episode ``name`` says the same again; EXIT_CONFIG if it
    does not.

    ``of``: evaluation set that it is of; ``step``: see `sample_view.Wanted`. ConfigError: there is
    no such episode, or the run is another user's: its configuration names programs, which would be
    run as this one.
    """
    run = RunDir(Path(folder))
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    check_owner(run.root, "--replay")
    found = find(read_samples(run.samples), name, of, step)
    config, tokenizer = load_resolved(run.root), load_tokenizer(run.model)
    try:
        again = _again(run, config, tokenizer, found)
    except EnvironmentFault as fault:
        print(f"{name}: {escape_controls(str(fault))}")
        for line in _texts(fault, tokenizer) if isinstance(fault, Differs) else ():
            print(line)
        return EXIT_CONFIG
    mistakes = list(differences(found, again))
    told = "; ".join(mistakes) or f"{found.turns} turns, and the same again"
    print(f"{name}: {escape_controls(told)}")
    return EXIT_CONFIG if mistakes else EXIT_DONE


def find(samples: Iterable[Sample], name: str, of: str = "", step: int | None = None) -> Kept:
    """The newest episode called ``name``, by the id of a row or without the row's number.
    ConfigError: there is none."""
    groups: dict[tuple, list[Sample]] = {}
    for sample in whole(samples):
        called = name in (sample["id"], sample["id"].rpartition(".")[0])
        if (
            "recording" in sample
            and sample.get("eval", "") == of
            and step in (None, sample["step"])
        ):
            ticket = "" if of else sample["id"].partition(".")[0]
            about = sample["step"], sample.get("shard"), sample.get("prompt_id"), ticket
            groups.setdefault((*about, sample["recording"].get("episode")), []).append(
                sample | {"called": called}
            )
    wanted = [group for group in groups.values() if any(sample["called"] for sample in group)]
    if not wanted:
        raise ConfigError(
            f"--replay: found {name!r}, of which no episode against an environment was kept; "
            "allowed: an id that `relax-hpc samples` shows, of an evaluation with --eval SET"
        )
    newest = max(wanted, key=lambda group: group[0]["time"])
    return Kept(sorted(newest, key=lambda sample: sample["recording"].get("row", 0)))


def differences(found: Kept, again: Episode) -> Iterator[str]:
    """Differences of an episode that its environment has gone through to an end."""
    rows = [[*row.prompt, *row.generation.token_ids] for row in again.rows]
    if rows != [sample["recording"]["token_ids"] for sample in found.samples]:
        yield "its tokens are others"
    if (now := again.finish_reason) != (then := found.first["finish_reason"]):
        yield f"it ended by {then}, and by {now} now"
    then, now = found.first.get("environment", {}), reported_outcome(again.outcome or {})
    for what in sorted(then.keys() | now.keys()) if CUT_SHORT not in then else ():
        if then.get(what) != now.get(what):
            yield f"{what}: {then.get(what)} then, {now.get(what)} now"


def _again(run: RunDir, config: Config, tokenizer: Tokenizer, found: Kept) -> Episode:
    prompt = _prompt(run, config, tokenizer, found)
    budget = config.rollout.max_new_tokens
    if "eval" in found.first:
        budget = config.eval.max_new_tokens or budget
    sampling = Sampling(1.0, 1.0, tokenizer.eos_ids, config.seed)
    request = GenerateRequest(
        prompt.token_ids, draw_key(found.ticket, prompt), found.number, sampling, budget
    )
    with tempfile.TemporaryDirectory(prefix="relax-replay-") as media:
        return asyncio.run(replay(config, tokenizer, prompt, request, found.rows(), Path(media)))


def _prompt(run: RunDir, config: Config, tokenizer: Tokenizer, found: Kept) -> Prompt:
    """Prompt of an episode. ConfigError: it is not in its file any more."""
    prompts: Iterable[Prompt]
    if "eval" in found.first:
        prompts = open_evals(run, config, tokenizer)[found.first["eval"]]
    else:
        source = PromptSource(open_train(run, config, tokenizer), config)
        prompts = (source.prompt(found.ticket, attempt) for attempt in range(_ATTEMPTS))
    wanted = found.first["prompt_id"]
    prompt = next((one for one in prompts if one.prompt_id == wanted), None)
    if prompt is None:
        raise ConfigError(
            f"--replay: prompt {wanted} of {found.first['id']} is not in the file of prompts any "
            "more"
        )
    return prompt


def _texts(fault: Differs, tokenizer: Tokenizer) -> Iterator[str]:
    for word, tokens in (("then", fault.then), ("now", fault.now)):
        for number, line in enumerate(
            escape_controls(tokenizer.decode(tokens)).split("\n") if tokens else ()
        ):
            yield f"{word if not number else '':<6}{line}"
