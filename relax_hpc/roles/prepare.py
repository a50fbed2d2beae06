"""`python -m relax_hpc.roles.prepare`: create the model, the data and the warm start of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.terminal_text import escape_controls, escape_line
from relax_hpc.config import load_resolved
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.life_signs import write_activity
from relax_hpc.net.rendezvous.process import die_with_parent

NOTE = "note: "
"""Prefix of lines that the launcher shows."""


def prepare(run: RunDir, config: Config) -> None:
    """Create a Hugging Face directory at <run>/model and the task's files in <run>/data. A second
    call does nothing."""
    if run.model.exists():
        return
    write_activity(run.preparing, "making model and data")
    start = Path(config.model.path).absolute() if config.model.path else _tiny_model(run, config)
    _prompts(run, config, start)
    if config.warm_start.steps:
        from relax_hpc.training.warm_start import warm_start

        write_activity(run.preparing, f"warm start of {config.warm_start.steps} steps")
        warm_start(config, start, run.data / "warm_start.jsonl", run.model)
    else:
        run.model.symlink_to(start)
    write_activity(run.preparing, "")


def _tiny_model(run: RunDir, config: Config) -> Path:
    from relax_hpc.training.models.tiny_model import make_tiny_model

    directory = run.root / "model-init"
    make_tiny_model(directory, config.model.tiny, config.seed)
    return directory


def _prompts(run: RunDir, config: Config, model: Path) -> None:
    """Write the task's files and the index of each. An unusable prompt file raises ConfigError
    here, before any group waits for a GPU."""
    from relax_hpc.data.prompt_file import PromptSets
    from relax_hpc.data.tokenizer import load_tokenizer
    from relax_hpc.tasks.files import make_files, open_evals, open_train

    tokenizer = load_tokenizer(model)
    make_files(run, config, tokenizer)
    train = open_train(run, config, tokenizer)
    files = train.sets if isinstance(train, PromptSets) else {"train": train}
    for name, file in (files | open_evals(run, config, tokenizer)).items():
        note = file.bad_rows_note()
        if note:
            print(escape_line(f"{NOTE}{name}: {note}"), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Prepare the run at ``--run_dir`` and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m relax_hpc.roles.prepare", description=__doc__)
    parser.add_argument("--run_dir", type=Path, required=True)
    args = parser.parse_args(argv)
    die_with_parent()
    try:
        prepare(RunDir(args.run_dir), load_resolved(args.run_dir))
    except RelaxError as error:
        print(escape_controls(str(error)), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
