"""`python -m relax_hpc.ops.observe.summaries RUN`: bring the summaries of a run up to date.

The hub starts it again and again while the run grows. Commands that read the run then parse only
what was written since.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from relax_hpc.base import log_rotation
from relax_hpc.base.block_summaries import (
    FOLDER,
    BlockFormat,
    extend_summary,
    summarise_packed_file,
    summary_of,
)
from relax_hpc.base.errors import EXIT_DONE, EXIT_RETRY
from relax_hpc.base.metrics import read, read_spans
from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.process import die_with_parent, set_private_umask
from relax_hpc.queue.inspect.summarise_journal import summarise_journal
from relax_hpc.rollout import sample_index
from relax_hpc.rollout.sample_log import SUFFIX

JOURNAL_BYTES = 1 << 18
"""New bytes of the journal from which its summary is written again."""
_NICENESS = 19
_Task = tuple[Path, Callable[[], object]]


def update_summaries(run: RunDir) -> list[str]:
    """Bring all summaries of ``run`` up to date. The reasons why that was not possible for some."""
    problems = list[str]()
    for path, summarise in _files(run):
        try:
            summarise()
        except Exception as error:
            # A summary is never needed, and the next process tries it again.
            problems.append(f"{path}: not summarised: {type(error).__name__}: {error}")
    _delete_unused(run)
    return problems


def _files(run: RunDir) -> list[_Task]:
    """Files to summarise, and how."""

    def extend(path: Path, form: BlockFormat) -> _Task:
        return path, lambda: extend_summary(path, summary_of(run.root, path), form)

    def pack(path: Path) -> _Task:
        return path, lambda: summarise_packed_file(
            path, summary_of(run.root, path), read_spans.BLOCKS, read_spans.read_lines_of_part
        )

    files: list[_Task] = [(run.journal, lambda: summarise_journal(run, JOURNAL_BYTES))]
    if run.metrics.exists():
        files.append(extend(run.metrics, read.BLOCKS))
    files += [extend(path, sample_index.BLOCKS) for path in run.samples.glob(f"*{SUFFIX}")]
    for path in run.root.glob(read_spans.SPAN_FILES):
        packed = [part for part in log_rotation.rotated_files(path) if part.suffix == ".gz"]
        files += [*map(pack, packed), extend(path, read_spans.BLOCKS)]
    return files


def _delete_unused(run: RunDir) -> None:
    """Delete summaries of rotated files that were deleted."""
    sources = {summary_of(run.root, path) for path in run.root.glob("logs/*/inc-*/spans-*")}
    for summary in (run.root / FOLDER).glob("logs.*.blocks"):
        if summary not in sources:
            with contextlib.suppress(OSError):
                summary.unlink()


def main() -> int:
    die_with_parent()
    set_private_umask()
    os.nice(_NICENESS)
    problems = update_summaries(RunDir(Path(sys.argv[1])))
    for problem in problems:
        print(problem, flush=True)
    return EXIT_RETRY if problems else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
