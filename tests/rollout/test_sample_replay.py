"""`relax-hpc samples RUN --replay ID`: the environment replays a stored episode in its process."""

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
"""An episode without a picture. The episode of the evaluation has one."""


@dataclass
class StoredRun:
    """A run with stored episodes of training and of an evaluation, and the table of its
    environment."""

    run: RunDir
    table: Path

    def replay(
        self, capsys: pytest.CaptureFixture[str], *options: str, name: str = NAME
    ) -> tuple[int, str]:
        """Exit code and output of the command."""
        code = main(["samples", str(self.run.root), "--replay", name, *options])
        output = capsys.readouterr()
        return code, output.out + output.err

    def change_environment(self, **changed: Any) -> None:
        """Write the table of the environment with ``changed`` entries."""
        pictures = {"=2": str(self.table.with_name("picture.png"))}
        self.table.write_text(json.dumps(TABLE | {"pictures": pictures} | changed))


def make_stored_run(folder: Path, config: Config) -> StoredRun:
    """A run of a few prompts without stored episodes."""
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
    stored = StoredRun(run, table)
    stored.change_environment()
    return stored


@pytest.fixture(scope="module", name="stored")
def stored_fixture(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    folder, config = tmp_path_factory.mktemp("replay"), Config()
    options = {"table": str(folder / "table.json")}
    config.environment = EnvironmentConfig(
        kind="tests.rollout.lookup_environment:Lookup", options=options
    )
    stored = make_stored_run(folder, config)
    seeing_model(stored.run.model)
    asyncio.run(store_episodes(stored.run, config, evaluates=True))
    return stored


async def store_episodes(run: RunDir, config: Config, evaluates: bool = False) -> None:
    """Play and store episodes as a rollout process does."""
    tokenizer, media = load_tokenizer(run.model), PromptMedia(None, run.model, run.eval_media)
    player = make_player(config, tokenizer, media, note_fault=print)
    assert player
    log = SampleLog(run.samples / "rollout-inc-000001-rank-0.jsonl.gz", config.samples, steps=1)
    keeper = SampleKeeper(log, config, tokenizer)
    sampling = Sampling(1.0, 1.0, tokenizer.eos_ids, config.seed)

    async def play(prompt: Prompt, ticket: int) -> list[Episode | BadAnswer]:
        requests = requests_for(prompt, ticket, 2, sampling, config.rollout.max_new_tokens)
        return [
            await player.play(
                History(), EpisodeStart(prompt, request, DeterministicEngine(tokenizer))
            )
            for request in requests
        ]

    try:
        await player.start()
        prompt = PromptSource(open_train(run, config, tokenizer), config).prompt(TICKET, 0)
        episodes = dict(enumerate(await play(prompt, TICKET)))
        keeper.put([row | {"reward": 0.5} for row in rows_of(prompt, TICKET, episodes)], "shard")
        prompt = open_evals(run, config, tokenizer)["held"][2]
        answers = await play(prompt, 0) if evaluates else []
        keeper.put_evaluated(
            "held", Version(1, 4), [(prompt, answer, Score(1.0)) for answer in answers]
        )
    finally:
        await player.close()
        await media.close()
        log.close()


def test_a_replay_with_the_same_answers_is_reported_as_equal(
    stored: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, options in (
        (NAME, []),
        ("000000003.01.00", []),
        ("p2.01", ["--eval", "held", "--step", "4"]),
    ):
        assert stored.replay(capsys, *options, name=name) == (
            EXIT_DONE,
            f"{name}: 3 turns, and the same again\n",
        )


def test_a_changed_observation_or_reward_is_shown(
    stored: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    stored.change_environment(says=["a lamp.", "a window.", "end."])
    code, output = stored.replay(capsys)
    assert (
        code == EXIT_CONFIG
        and "environment_differs: row 1 of the episode has another observation" in output
    )
    assert output.endswith("when it is played again\nthen  a door.\nnow   a window.\n")
    stored.change_environment(reward=1.0)
    assert stored.replay(capsys) == (EXIT_CONFIG, f"{NAME}: reward: 0.5 then, 1.0 now\n")


def test_a_changed_picture_is_a_changed_observation(
    stored: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    other = stored.table.with_name("other.png")
    other.write_bytes(png(seed=1))
    stored.change_environment(pictures={"=2": str(other)})
    code, output = stored.replay(capsys, "--eval", "held", name="p2.01")
    assert code == EXIT_CONFIG and "row 0 of the episode has other media" in output
    stored.change_environment()


def test_a_changed_end_is_shown(stored: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    stored.change_environment(says=[*TABLE["says"], "more."])
    code, output = stored.replay(capsys)
    assert (
        code == EXIT_CONFIG
        and "row 1 of the episode has the policy speak where it did not" in output
    )
    stored.change_environment(says=TABLE["says"][:2])
    code, output = stored.replay(capsys)
    assert code == EXIT_CONFIG and "row 1 of the episode has an end" in output
    stored.change_environment(says=[])
    assert "environment_raised: IndexError" in stored.replay(capsys)[1]
    stored.change_environment()


def test_an_episode_that_cannot_be_replayed_is_refused(
    stored: StoredRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, options in (
        ("000000004.00", []),
        ("p2.01", []),
        (NAME, ["--step", "7"]),
        (NAME, ["--eval", "held"]),
    ):
        code, output = stored.replay(capsys, *options, name=name)
        assert (
            code == EXIT_CONFIG
            and "of which no episode against an environment was kept; allowed: an id" in output
        )
    (train,) = (path for path in stored.run.root.parent.iterdir() if path.name == "train.jsonl")
    lines = train.read_text()
    train.write_text(lines.replace("?", "!"))
    code, output = stored.replay(capsys)
    assert code == EXIT_CONFIG and "train.jsonl" in output and "other bytes" in output
    train.write_text(lines)


def test_a_damaged_recording_is_a_configuration_error(stored: StoredRun) -> None:
    (sample, *_) = find_episode(read_samples(stored.run.samples), NAME).samples
    for changed in (
        {"token_ids": [1, "x"]},
        {"turns": 3},
        {"sampled": [10_000]},
        {"spans": [3]},
        {"prompt_len": None},
    ):
        damaged = [sample | {"recording": sample["recording"] | changed}]
        with pytest.raises(ConfigError, match="is damaged"):
            find_episode(damaged, NAME).rows()


def test_an_agent_is_replayed_at_a_separate_endpoint(
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
    stored = make_stored_run(tmp_path, config)
    stored.run.model.mkdir()
    write_tokenizer(stored.run.model)
    (stored.run.model / "config.json").write_text("{}")
    stored.run.rendezvous("hub").mkdir(parents=True)

    async def play() -> None:
        async with gateway(stored.run):
            await store_episodes(stored.run, config)

    asyncio.run(play())
    assert stored.replay(capsys) == (EXIT_DONE, f"{NAME}: 3 turns, and the same again\n")
    stored.change_environment(says=["a lamp.", "a window.", "end."])
    code, output = stored.replay(capsys)
    assert (
        code == EXIT_CONFIG
        and "has the policy speak where it did not, after" in output
        and "a window." in output
    )
    assert output.count("\n") == 1
    stored.change_environment(says=["a lamp."])
    assert stored.replay(capsys) == (EXIT_CONFIG, f"{NAME}: its tokens differ\n")


def test_an_episode_of_another_user_is_not_replayed(
    stored: StoredRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration of the run names the environment, which would run with the reader's rights."""
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    code, output = stored.replay(capsys)
    assert code == EXIT_CONFIG and f"--replay: {stored.run.root} belongs to user" in output
    assert main(["samples", str(stored.run.root)]) == EXIT_DONE
    assert main(["resume", str(stored.run.root)]) == EXIT_CONFIG
    assert "resume: " in capsys.readouterr().err
