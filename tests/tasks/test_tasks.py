"""Tasks: the digit-sorting one, one's own, and what is made of them when a run is prepared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_hpc.base.errors import EXIT_RETRY, ConfigError, RelaxError
from relax_hpc.base.plugins import RENAMED, refuse_imports
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands.run_setup import check_resumable
from relax_hpc.config import Config, dump, load, load_resolved
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data.chat import template_of
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.tokenizer import Tokenizer, load_tokenizer
from relax_hpc.examples.tasks.sort_digits import sets_of, sort_answer
from relax_hpc.ops.checks.settings import check
from relax_hpc.renamed_modules import RENAMED as RENAMED_PATHS
from relax_hpc.rewards import get_reward
from relax_hpc.rollout.engines.engine import BadAnswer, Draft, GenerateRequest, Generation, Sampling
from relax_hpc.rollout.episodes.play import EngineRetry, play
from relax_hpc.tasks import Task, eval_reward, files, get_task, train_reward
from relax_hpc.tasks.files import eval_files, make_files, open_evals, open_train, train_files
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.prompt_helpers import load_prompts

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(
        directory,
        TinyModelConfig(hidden_size=8, num_layers=1, head_dim=8, intermediate_size=8),
        seed=0,
    )
    return load_tokenizer(directory)


class TwoTurns(Task):
    """Asks again with what came first; rows of one's own."""

    evaluations = ("held_out",)

    def rows(self, split: str, data: object) -> Iterator[dict[str, Any]]:
        yield from ({"id": f"{split}-{n}", "prompt": f"{n}?", "answer": n} for n in range(3))

    async def episode(self, request: GenerateRequest, ask: Any) -> Generation:
        first = await ask(request)
        longer = GenerateRequest(
            (*request.prompt_ids, *first.token_ids), "p", 0, request.sampling, 2
        )
        second = await ask(longer)
        return Generation(
            [*first.token_ids, *second.token_ids], [-1.0] * 4, np.ones(4, np.int32), "stop"
        )

    def reward(self, samples: list) -> list[float]:
        return [1.0 / len(samples)] * len(samples)


class Broken(Task):
    def rows(self, split: str, data: object) -> Iterator[dict[str, Any]]:
        yield {"id": 1, "prompt": "1?", "answer": "1"}
        yield {"id": 2, "prompt": "1?", "answer": object()}

    async def episode(self, request: GenerateRequest, ask: Any) -> Generation:
        raise KeyError("tool")


class Misspelled(TwoTurns):
    evaluations = "held_out"  # type: ignore[assignment]
    reward = None  # type: ignore[assignment]


class Typos(Task):
    def rows(self, split: str, data: object) -> Iterator[dict[str, Any]]:
        return iter(open("/no/such/file"))  # noqa: PTH123

    def epsiode(self, request: GenerateRequest, ask: Any) -> None: ...

    def rewards(self, sample: object) -> float:
        return 1.0


class Needs(Task):
    def __init__(self, path: str) -> None: ...


class Flaky(Task):
    """A hub of data sets that does not answer ``left`` times."""

    left = 2

    def rows(self, split: str, data: object) -> Iterator[dict[str, Any]]:
        yield {"id": 1, "prompt": "1?", "answer": "1"}
        if Flaky.left:
            Flaky.left -= 1
            raise ConnectionResetError("reset by peer")
        yield {"id": 2, "prompt": "2?", "answer": "2"}


class Dawdling(Task):
    """Its own time is as long as it is told, after a response that takes longer."""

    def __init__(self, own_s: float = 60.0) -> None:
        self.own_s = own_s

    async def episode(self, request: GenerateRequest, ask: Any) -> Generation:
        first = await ask(request)
        await asyncio.sleep(self.own_s)
        return first


def config_of(task: str, **over: Any) -> Config:
    return load([], {"data.task": task, "data.max_prompt_tokens": 32, **over})


def made(folder: Path, tokenizer: Tokenizer, config: Config) -> RunDir:
    run = RunDir(folder)
    make_files(run, config, tokenizer)
    return run


def test_tasks_are_found_by_name_or_import_path() -> None:
    assert type(get_task("tests.tasks.test_tasks:TwoTurns")) is TwoTurns
    with pytest.raises(
        ConfigError, match=r"did you mean 'relax_hpc\.examples\.tasks\.sort_digits:SortDigits'"
    ):
        get_task("sort_digit")
    with pytest.raises(ConfigError, match=r"found no class derived from relax_hpc\.tasks\.Task"):
        get_task("pathlib:Path")
    with pytest.raises(
        ConfigError,
        match=r"task: 'tests\.tasks\.test_tasks:Needs': cannot be created: TypeError: .*'path'",
    ):
        get_task("tests.tasks.test_tasks:Needs")


OLD_NAMES = [
    *RENAMED["task"],
    "relax_hpc.tasks.sort_digits:SortDigits",
    "relax_hpc.tasks.arithmetic:Arithmetic",
]


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names_of_example_tasks_are_accepted_with_one_warning(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("relax_hpc.base.plugins._warned", set())
    task = get_task(name)
    assert type(get_task(name)) is type(task) and type(task).__module__.startswith(
        "relax_hpc.examples.tasks."
    )
    current = f"{type(task).__module__}:{type(task).__name__}"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: task: {name!r} is now called {current!r}")
    with refuse_imports():
        assert type(get_task(current)) is type(task), (
            "commands that only read a run know the tasks of this package"
        )
    assert capsys.readouterr().err == ""


def test_every_example_task_has_a_class_under_its_old_name() -> None:
    modules = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__"}
    assert modules == {name[len("tasks.") :] for name in RENAMED_PATHS if name.startswith("tasks.")}
    with (
        refuse_imports(),
        pytest.raises(ConfigError, match="imports no module that a configuration names"),
    ):
        get_task("relax_hpc.examples.tasks.avi:avi")


def test_the_configuration_of_an_old_run_has_the_old_name(
    run_dir: Path, tokenizer: Tokenizer
) -> None:
    (run_dir / "config.yaml").write_text(
        "data: {task: sort_digits, digits: 3, max_prompt_tokens: 32}\n"
    )
    config = load_resolved(run_dir)
    assert train_reward(config) == "answer_partial"
    run = made(run_dir, tokenizer, config)
    assert eval_files(run, config).keys() == {"heldout_multisets", "heldout_prompts"}
    assert len(open_train(run, config, tokenizer)) > 500


@pytest.mark.parametrize(
    ("task", "over", "train", "evaluation"),
    [
        ("", {"rollout.reward": "math"}, "math", "math"),
        ("", {"rollout.reward": "math", "eval.reward": "exact"}, "math", "exact"),
        ("relax_hpc.examples.tasks.sort_digits:SortDigits", {}, "answer_partial", "answer_partial"),
        (
            "tests.tasks.test_tasks:TwoTurns",
            {},
            "tests.tasks.test_tasks:TwoTurns.reward",
            "tests.tasks.test_tasks:TwoTurns.reward",
        ),
        ("tests.tasks.test_tasks:TwoTurns", {"rollout.reward": "a:b"}, "a:b", "a:b"),
    ],
)
def test_the_reward_is_the_tasks_own_unless_another_is_named(
    task: str, over: dict[str, Any], train: str, evaluation: str
) -> None:
    config = config_of(task, **over)
    assert (train_reward(config), eval_reward(config)) == (train, evaluation)
    if train.endswith("TwoTurns.reward"):
        assert get_reward(train)([None] * 4) == [0.25] * 4


def test_rows_of_a_task_become_files_unless_files_are_named(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = config_of("tests.tasks.test_tasks:TwoTurns")
    run = made(tmp_path / "one", tokenizer, config)
    assert {name: path.name for name, path in eval_files(run, config).items()} == {
        "held_out": "held_out.jsonl"
    }
    for path in (train_files(run, config)["train"], *eval_files(run, config).values()):
        assert [row["id"] for row in map(json.loads, path.open())] == [
            f"{path.stem}-{n}" for n in range(3)
        ]
    named = config_of("tests.tasks.test_tasks:TwoTurns", **{"data.eval.mine": "/my.jsonl"})
    run = made(tmp_path / "two", tokenizer, named)
    assert [path.name for path in run.data.iterdir()] == ["train.jsonl"]
    assert eval_files(run, named) == {"mine": Path("/my.jsonl")}
    with pytest.raises(
        ConfigError, match=r"data\.task: Broken: row 2 of train: TypeError: .*object is not JSON"
    ):
        made(tmp_path / "three", tokenizer, config_of("tests.tasks.test_tasks:Broken"))
    with pytest.raises(
        ConfigError,
        match=r"data\.task: Typos: row 1 of train: FileNotFoundError: .*'/no/such/file'",
    ):
        made(tmp_path / "four", tokenizer, config_of("tests.tasks.test_tasks:Typos"))


def test_rows_whose_source_does_not_answer_are_asked_for_again_and_are_no_mistake(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PAUSES_S", (0.0, 0.0))
    config = config_of("tests.tasks.test_tasks:Flaky")
    monkeypatch.setattr(Flaky, "left", 2)
    assert (
        len(
            train_files(made(tmp_path / "one", tokenizer, config), config)["train"]
            .read_text()
            .splitlines()
        )
        == 2
    )
    monkeypatch.setattr(Flaky, "left", 3)
    with pytest.raises(
        RelaxError, match=r"Flaky: row 2 of train: ConnectionResetError: reset .*again"
    ) as found:
        made(tmp_path / "two", tokenizer, config)
    assert (
        found.value.exit_code == EXIT_RETRY
        and not (tmp_path / "two" / "data" / "train.jsonl").exists()
    )


def test_an_episode_has_a_deadline_for_what_it_does_itself() -> None:
    turn = Generation([7, 2], [-1.0] * 2, np.ones(2, np.int32), "stop")
    request = GenerateRequest((5, 6), "p", 0, Sampling(1.0, 1.0, (), 0), 4)

    async def slow(asked: GenerateRequest) -> Generation:
        await asyncio.sleep(0.3)
        return turn

    assert asyncio.run(play(Dawdling(0.0), request, slow, 0.2)) is turn, (
        "the engine's time does not count"
    )
    late = asyncio.run(play(Dawdling(), request, slow, 0.2))
    assert isinstance(late, BadAnswer) and late.reason == "episode_timeout"
    assert str(late).endswith(
        "took 0.2 s without the time of responses (rollout.episode_timeout_s)"
    )


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"data.task": "no_such:Task"}, "data.task: 'no_such:Task': importing 'no_such' failed"),
        (
            {"data.task": "relax_hpc.tasks:Task"},
            "data.train: found nothing, and data.task 'relax_hpc",
        ),
        (
            {"data.train": "x.jsonl"},
            "data.train: found 'x.jsonl' with data.task 'tests.tasks.test_tasks:TwoTurns'",
        ),
        (
            {"data.task": "tests.tasks.test_tasks:Needs"},
            "data.task: 'tests.tasks.test_tasks:Needs': cannot be created: TypeError",
        ),
        (
            {"data.task": "tests.tasks.test_tasks:Misspelled"},
            "data.task: tests.tasks.test_tasks:Misspelled.evaluations: found 'held_out'",
        ),
        (
            {"data.task": "tests.tasks.test_tasks:Misspelled"},
            "data.task: tests.tasks.test_tasks:Misspelled.reward: found None, allowed: a method",
        ),
        (
            {"data.task": "tests.tasks.test_tasks:Typos"},
            "data.task: tests.tasks.test_tasks:Typos.epsiode: found it, and no 'episode', which",
        ),
        (
            {"data.task": "tests.tasks.test_tasks:Typos"},
            "data.task: tests.tasks.test_tasks:Typos.rewards: found it, and no 'reward', which",
        ),
        (
            {"warm_start.steps": 3},
            "warm_start.steps: found 3 without a task that has demonstrations",
        ),
    ],
)
def test_check_knows_what_a_task_has(over: dict[str, Any], says: str) -> None:
    findings = check(config_of(**{"task": "tests.tasks.test_tasks:TwoTurns"} | over))
    assert any(finding.startswith(says) for finding in findings), findings


def played(
    task: Task, *answers: Generation | BadAnswer | Exception
) -> tuple[Any, list[GenerateRequest], Draft]:
    asked, given, draft = list[GenerateRequest](), iter(answers), Draft()

    async def once(request: GenerateRequest) -> Generation | BadAnswer:
        asked.append(request)
        answer = next(given)
        if isinstance(answer, Exception) and not isinstance(answer, BadAnswer):
            raise answer
        return answer

    request = GenerateRequest((5, 6), "p", 0, Sampling(1.0, 1.0, (), 0), 4, draft=draft)
    return asyncio.run(play(task, request, once)), asked, draft


def test_an_episode_is_one_turn_unless_the_task_plays_it_otherwise() -> None:
    turn = Generation([7, 2], [-1.0] * 2, np.ones(2, np.int32), "stop")
    answer, [asked], draft = played(Task(), turn)
    assert answer is turn and asked.draft is draft
    whole, asked, draft = played(TwoTurns(), turn, turn)
    assert whole.token_ids == [7, 2, 7, 2] and [request.prompt_ids for request in asked] == [
        (5, 6),
        (5, 6, 7, 2),
    ]
    assert draft.ended is whole and [request.draft for request in asked] == [None, None]
    bad = BadAnswer("nan_logprob", "no")
    assert played(TwoTurns(), turn, bad)[0] is bad
    failed, _, draft = played(Broken())
    assert (
        isinstance(failed, BadAnswer)
        and str(failed) == "episode_exception: KeyError: 'tool'"
        and not draft.ended
    )
    with pytest.raises(EngineRetry):
        played(TwoTurns(), turn, EngineRetry())


def test_prompts_that_have_changed_are_said_before_a_run_is_resumed(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    run, files = RunDir(tmp_path / "run"), [tmp_path / "train.jsonl", tmp_path / "held.jsonl"]
    for path in files:
        path.write_text('{"id": 1, "prompt": "12?", "answer": "12"}\n')
    config = load([], {"data.train": str(files[0]), "data.eval.held": str(files[1])})
    run.create()
    run.model.symlink_to(tokenizer.directory)
    dump(config, run.config)
    open_train(run, config, tokenizer)
    open_evals(run, config, tokenizer)
    check_resumable(run, config)
    for path in files:
        before = path.read_bytes()
        path.write_bytes(before + before.replace(b"1", b"2"))
        with pytest.raises(ConfigError, match=rf"{path.name}: has changed since the run began"):
            check_resumable(run, config)
        path.write_bytes(before)


def test_another_template_is_said_before_a_run_is_resumed(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A run keeps its prompts: they are rendered again whenever one is used."""
    run, rows, template = (
        RunDir(tmp_path / "run"),
        tmp_path / "train.jsonl",
        tmp_path / "chat.jinja",
    )
    rows.write_text('{"id": 1, "prompt": "12?", "answer": "12"}\n')
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    data = {"train": str(rows), "chat_template": str(template), "template_date": "2026-01-31"}
    config = load([], {"data": data})
    run.create()
    run.model.symlink_to(tokenizer.directory)
    dump(config, run.config)
    open_train(run, config, load_tokenizer(run.model))
    check_resumable(run, config)
    template.write_text("{% for message in messages %}!{{ message.content }}{% endfor %}")
    template_of.cache_clear()
    with pytest.raises(
        ConfigError, match="would become other prompts than when the run began: the chat template"
    ):
        check_resumable(run, config)
    with pytest.raises(ConfigError, match="would become other prompts"):
        open_train(run, config, load_tokenizer(run.model))


# -- sorting digits --------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_split_is_disjoint_and_complete(digits):
    sets = sets_of(digits)
    assert all(sets.values())
    assert sorted(text for texts in sets.values() for text in texts) == [
        f"{i:0{digits}d}" for i in range(10**digits)
    ]
    trained = {sort_answer(text) for text in sets["train"]}
    assert trained.isdisjoint(sort_answer(text) for text in sets["heldout_multisets"])


def test_split_of_four_digits_never_changes():
    assert {name: len(texts) for name, texts in sets_of(4).items()} == {
        "train": 6434,
        "heldout_multisets": 1987,
        "heldout_prompts": 1579,
    }
    assert sets_of(4)["train"][:3] == ["1516", "6606", "0809"]


def sorting(**over: Any) -> Config:
    return config_of(
        "relax_hpc.examples.tasks.sort_digits:SortDigits",
        **{"data.digits": 3, "warm_start.batch_size": 50} | over,
    )


def test_sort_digits_files(tmp_path, tokenizer):
    settings = sorting(seed=1, **{"warm_start.steps": 10, "warm_start.noise": 0.7})
    one, two = (made(tmp_path / name, tokenizer, settings).data for name in ("one", "two"))
    names = ["heldout_multisets.jsonl", "heldout_prompts.jsonl", "train.jsonl", "warm_start.jsonl"]
    assert sorted(path.name for path in one.iterdir()) == names
    assert all((one / n).read_bytes() == (two / n).read_bytes() for n in names)
    prompts, bad = load_prompts(one / "train.jsonl", tokenizer, PromptRules(8), 0.0)
    assert not bad
    assert all(
        p.text == p.prompt_id + "?" and p.answer == sort_answer(p.prompt_id) for p in prompts
    )
    train = {p.prompt_id for p in prompts}
    rows = [json.loads(line) for line in (one / "warm_start.jsonl").open()]
    wrong = 0
    for row in rows:
        ids, n = row["token_ids"], row["prompt_len"]
        asked, answered = tokenizer.decode(ids[:n]).removesuffix("?"), tokenizer.decode(ids[n:])
        assert (ids[0], ids[-1], len(ids)) == (tokenizer.bos_id, tokenizer.eos_ids[0], n + 4)
        assert asked in train
        assert sort_answer(answered) == answered
        wrong += answered != sort_answer(asked)
    assert len(rows) == 500
    assert 0.6 < wrong / 500 < 0.8


def test_warm_start_without_noise_is_right(tmp_path, tokenizer):
    run = made(
        tmp_path,
        tokenizer,
        sorting(**{"data.digits": 2, "warm_start.steps": 1, "warm_start.noise": 0.0}),
    )
    for line in (run.data / "warm_start.jsonl").open():
        question, answer = tokenizer.decode(json.loads(line)["token_ids"]).split("?")
        assert answer == sort_answer(question)
