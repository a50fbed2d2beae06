"""`relax-hpc samples RUN --replay ID`: an episode that was kept is played again by its environment,
in its process."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.commands.program import main
from relax_hpc.config import dump
from relax_hpc.config.schema import Config, EnvironmentConfig
from relax_hpc.config.schema.environment import AGENT
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.ops.observe.sample_replay import find_episode
from relax_hpc.rewards import Score
from relax_hpc.rollout.agents.gateway.serving import gateway
from relax_hpc.rollout.engines.engine import BadAnswer, Episode, Sampling
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.player import make_player
from relax_hpc.rollout.episodes.turns import EpisodeStart
from relax_hpc.rollout.media import PromptMedia
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.rollout.rows import requests_for, rows_of
from relax_hpc.rollout.sample_keeper import SampleKeeper
from relax_hpc.rollout.sample_log import SampleLog, read_samples
from relax_hpc.tasks.files import open_evals, open_train
from relax_hpc.training.models.tiny_model import write_tokenizer
from tests.helpers.media_prompts import png, seeing_model
from tests.helpers.queue_helpers import make_run
from tests.helpers.turns_helpers import DeterministicEngine

TABLE = {"says": ["a lamp.", "a door.", "end."], "reward": 0.5}
TICKET, NAME = 3, "000000003.01"
"""Of a prompt without a picture; that of the evaluation has one."""


@dataclass
class Kept:
    """A run of which an episode of training and one of an evaluation were kept, and the table of
    its environment."""

    run: RunDir
    table: Path

    def replayed(
        self, capsys: pytest.CaptureFixture[str], *words: str, name: str = NAME
    ) -> tuple[int, str]:
        code = main(["samples", str(self.run.root), "--replay", name, *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    def now_says(self, **changed: Any) -> None:
        pictures = {"=2": str(self.table.with_name("picture.png"))}
        self.table.write_text(json.dumps(TABLE | {"pictures": pictures} | changed))


def made_run(folder: Path, config: Config) -> Kept:
    """A run of a few prompts, of which nothing is kept yet."""
    run, table = make_run(folder / "run"), folder / "table.json"
    (folder / "picture.png").write_bytes(png())
    rows = [
        {"id": f"p{number}", "prompt": f"{number}?", "answer": f"={number}"} for number in range(5)
    ]
    for name in ("train", "held"):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config.prompts_per_step, config.run_dir = 4, str(run.root)
    config.data.train, config.data.eval = (
        str(folder / "train.jsonl"),
        {"held": str(folder / "held.jsonl")},
    )
    config.rollout.max_new_tokens, config.eval.responses, config.eval.temperature = 200, 2, 1.0
    dump(config, run.config)
    (kept := Kept(run, table)).now_says()
    return kept


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder, config = tmp_path_factory.mktemp("replay"), Config()
    options = {"table": str(folder / "table.json")}
    config.environment = EnvironmentConfig(
        kind="tests.rollout.lookup_environment:Lookup", options=options
    )
    kept = made_run(folder, config)
    seeing_model(kept.run.model)
    asyncio.run(keep(kept.run, config, evaluates=True))
    return kept


async def keep(run: RunDir, config: Config, evaluates: bool = False) -> None:
    """Play and keep as a rollout process does."""
    tokenizer, media = load_tokenizer(run.model), PromptMedia(None, run.model, run.eval_media)
    player = make_player(config, tokenizer, media, note_fault=print)
    assert player
    log = SampleLog(run.samples / "rollout-inc-000001-rank-0.jsonl.gz", config.samples, steps=1)
    keeper = SampleKeeper(log, config, tokenizer)
    sampling = Sampling(1.0, 1.0, tokenizer.eos_ids, config.seed)

    async def play(prompt: Prompt, ticket: int) -> list[Episode | BadAnswer]:
        requests = requests_for(prompt, ticket, 2, sampling, config.rollout.max_new_tokens)
        return [
            await player.play(History(), EpisodeStart(prompt, one, DeterministicEngine(tokenizer)))
            for one in requests
        ]

    try:
        await player.start()
        prompt = PromptSource(open_train(run, config, tokenizer), config).prompt(TICKET, 0)
        episodes = dict(enumerate(await play(prompt, TICKET)))
        keeper.put([row | {"reward": 0.5} for row in rows_of(prompt, TICKET, episodes)], "shard")
        prompt = open_evals(run, config, tokenizer)["held"][2]
        answers = await play(prompt, 0) if evaluates else []
        keeper.put_evaluated("held", Version(1, 4), [(prompt, one, Score(1.0)) for one in answers])
    finally:
        await player.close()
        await media.close()
        log.close()


def test_an_environment_that_says_the_same_is_told_so(
    made: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (
        (NAME, []),
        ("000000003.01.00", []),
        ("p2.01", ["--eval", "held", "--step", "4"]),
    ):
        assert made.replayed(capsys, *words, name=name) == (
            EXIT_DONE,
            f"{name}: 3 turns, and the same again\n",
        )


def test_what_is_another_is_said_in_words(made: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    made.now_says(says=["a lamp.", "a window.", "end."])
    code, said = made.replayed(capsys)
    assert (
        code == EXIT_CONFIG
        and "environment_differs: row 1 of the episode has another observation" in said
    )
    assert said.endswith("when it is played again\nthen  a door.\nnow   a window.\n")
    made.now_says(reward=1.0)
    assert made.replayed(capsys) == (EXIT_CONFIG, f"{NAME}: reward: 0.5 then, 1.0 now\n")


def test_another_picture_is_another_observation(
    made: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    (other := made.table.with_name("other.png")).write_bytes(png(seed=1))
    made.now_says(pictures={"=2": str(other)})
    code, said = made.replayed(capsys, "--eval", "held", name="p2.01")
    assert code == EXIT_CONFIG and "row 0 of the episode has other media" in said
    made.now_says()


def test_an_end_that_is_another_is_said(made: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    made.now_says(says=[*TABLE["says"], "more."])
    code, said = made.replayed(capsys)
    assert (
        code == EXIT_CONFIG and "row 1 of the episode has the policy speak where it did not" in said
    )
    made.now_says(says=TABLE["says"][:2])
    code, said = made.replayed(capsys)
    assert code == EXIT_CONFIG and "row 1 of the episode has an end" in said
    made.now_says(says=[])
    assert "environment_raised: IndexError" in made.replayed(capsys)[1]
    made.now_says()


def test_what_cannot_be_played_again_is_refused(
    made: Kept, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, words in (
        ("000000004.00", []),
        ("p2.01", []),
        (NAME, ["--step", "7"]),
        (NAME, ["--eval", "held"]),
    ):
        code, said = made.replayed(capsys, *words, name=name)
        assert (
            code == EXIT_CONFIG
            and "of which no episode against an environment was kept; allowed: an id" in said
        )
    (train,) = (path for path in made.run.root.parent.iterdir() if path.name == "train.jsonl")
    lines = train.read_text()
    train.write_text(lines.replace("?", "!"))
    code, said = made.replayed(capsys)
    assert code == EXIT_CONFIG and "train.jsonl" in said and "other bytes" in said
    train.write_text(lines)


def test_a_damaged_recording_ends_nothing(made: Kept) -> None:
    (sample, *_) = find_episode(read_samples(made.run.samples), NAME).samples
    for odd in (
        {"token_ids": [1, "x"]},
        {"turns": 3},
        {"sampled": [10_000]},
        {"spans": [3]},
        {"prompt_len": None},
    ):
        damaged = [sample | {"recording": sample["recording"] | odd}]
        with pytest.raises(ConfigError, match="is damaged"):
            find_episode(damaged, NAME).rows()


def test_an_agent_is_played_again_at_an_endpoint_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, template = Config(), tmp_path / "chat.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.role }}:{{ message.content }}.{% endfor "
        "%}assistant:"
    )
    command = ["python", "-m", "tests.rollout.lookup_agent", str(tmp_path / "table.json")]
    options = {"command": command, "chat_template": str(template)}
    config.environment = EnvironmentConfig(kind=AGENT, options=options, turn_tokens=20)
    kept = made_run(tmp_path, config)
    kept.run.model.mkdir()
    write_tokenizer(kept.run.model)
    (kept.run.model / "config.json").write_text("{}")
    kept.run.rendezvous("hub").mkdir(parents=True)

    async def play() -> None:
        async with gateway(kept.run):
            await keep(kept.run, config)

    asyncio.run(play())
    assert kept.replayed(capsys) == (EXIT_DONE, f"{NAME}: 3 turns, and the same again\n")
    kept.now_says(says=["a lamp.", "a window.", "end."])
    code, said = kept.replayed(capsys)
    assert (
        code == EXIT_CONFIG
        and "has the policy speak where it did not, after" in said
        and "a window." in said
    )
    assert said.count("\n") == 1
    kept.now_says(says=["a lamp."])
    assert kept.replayed(capsys) == (EXIT_CONFIG, f"{NAME}: its tokens differ\n")


def test_an_episode_of_another_user_is_not_replayed(
    made: Kept, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment is what the configuration of the run says, and would be run as the reader."""
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    code, said = made.replayed(capsys)
    assert code == EXIT_CONFIG and f"--replay: {made.run.root} belongs to user" in said
    assert main(["samples", str(made.run.root)]) == EXIT_DONE
    assert main(["resume", str(made.run.root)]) == EXIT_CONFIG
    assert "resume: " in capsys.readouterr().err
