"""Names of TRL, verl and OpenRLHF: errors about them say what the setting is called here."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, ConfigError
from relax_hpc.commands.program import main
from relax_hpc.config import load
from relax_hpc.config.layer_validation import keys
from relax_hpc.config.options import options
from relax_hpc.config.other_trainers import TABLE, TRAINERS, explain_other_name, names_of

QUICKSTART = "configs/runs/quickstart.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def test_every_target_is_a_setting_of_ours() -> None:
    settings = {*keys(), *(option.key for option in options()), "--resume"}
    assert not [setting for setting in TABLE if setting.ours and setting.ours not in settings]
    assert all(setting.ours or setting.note for setting in TABLE)


def test_a_name_means_one_setting() -> None:
    for trainer in range(len(TRAINERS)):
        names = " ".join(setting.names[trainer] for setting in TABLE).split()
        assert len(names) == len(set(names))


def test_no_setting_of_ours_is_taken_for_another() -> None:
    """A key that is right never reaches the table; one that is only in the wrong place does."""
    ours = set(keys())
    for setting in TABLE:
        for _, names in names_of(setting):
            for name in ours.intersection(names):
                assert name == setting.ours, (name, setting.ours)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--learning_rate", "TRL's learning_rate is actor.optimizer.lr here"),
        ("--learning-rate", "TRL's learning_rate is actor.optimizer.lr here"),
        ("--learnign_rate", "did you mean TRL's learning_rate? It is actor.optimizer.lr here"),
        ("--num_generations", "is samples_per_prompt here"),
        ("--max_completion_length", "is rollout.max_new_tokens here"),
        ("--per_device_train_batch_size", "is actor.max_tokens_per_micro_batch here (in tokens"),
        ("--gradient_accumulation_steps", "is prompts_per_step here"),
        ("--beta", "is algorithm.kl.coefficient here"),
        ("--kl_coef", "is algorithm.kl_in_reward here"),
        ("--epsilon", "is algorithm.clip_low here"),
        ("--data.train_batch_size", "is prompts_per_step here"),
        ("--data.train_files", "is data.train here"),
        ("--rollout.n", "is samples_per_prompt here"),
        ("--trainer.total_epochs", "is steps here"),
        ("--trainer.save_freq", "is checkpoint.every here"),
        ("--micro_batch_size", "is actor.max_tokens_per_micro_batch here"),
        ("--n_samples_per_prompt", "OpenRLHF's n_samples_per_prompt is samples_per_prompt here"),
        ("--init_kl_coef", "is algorithm.kl_in_reward here"),
        ("--lora_rank", "LoRA is not supported"),
        ("--wandb_project", "metrics are in TensorBoard"),
        ("--report_to", "metrics are in TensorBoard"),
        ("--actor_rollout_ref.actor.optim.lr", "verl's optim.lr is actor.optimizer.lr here"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "verl's optim.lr is actor.optimizer.lr here"),
        ("+trainer.nnodes=2", "is groups here (groups.actor.resources:"),
        ("--resume_from_checkpoint", "is --resume here"),
    ],
)
def test_an_unknown_option_is_answered_with_ours(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [option] if "=" in option else [option, "1"]
    assert main(["run", "--config", QUICKSTART, *argv]) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1, error


def test_a_file_of_another_trainer_is_answered_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text(
        "data: {train_files: x.parquet, max_prompt_tokens: 5}\n"
        "actor_rollout_ref:\n"
        "  actor: {optim: {lr: 1e-6}}\n"
        "  rollout: {n: 8}\n"
        "trainer: {save_freq: 10, unheard_of: 1}\n"
        "unheard_of: {a: 1}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load([path])
    texts = [mistake.removeprefix(f"{path}:") for mistake in caught.value.mistakes]
    assert [text.partition(", allowed")[0] for text in texts] == [
        "1: data.train_files: unknown key; verl's data.train_files is data.train here",
        "3: actor_rollout_ref.actor.optim.lr: unknown key; verl's optim.lr is actor.optimizer.lr "
        "here",
        "4: actor_rollout_ref.rollout.n: unknown key; verl's rollout.n is samples_per_prompt here "
        "(responses to a prompt)",
        "5: trainer.save_freq: unknown key; verl's save_freq is checkpoint.every here",
        "6: unheard_of: unknown key",
    ]


def test_a_name_that_is_nowhere_is_left_to_other_hints() -> None:
    assert explain_other_name("stepz") == "" and explain_other_name("rollout.temprature") == ""


def test_the_page_has_the_whole_table() -> None:
    page = PAGE.read_text()
    for setting in TABLE:
        for _, names in names_of(setting):
            assert all(f"`{name}`" in page for name in names)
        assert not setting.ours or f"`{setting.ours}`" in page
