"""`relax-hpc warm`: two steps of a run, which compile its kernels for `site.kernel_cache`.

Each node of the run adds its kernels to an archive (`relax_hpc.net.kernel_caches`), which the
nodes of later runs read.
"""

from __future__ import annotations

import copy
import shutil
import time
from pathlib import Path

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.commands import local
from relax_hpc.commands.submit import submit
from relax_hpc.config import Config
from relax_hpc.net.kernel_caches.archive import SUFFIX, ArchiveError, open_archive, read_header
from relax_hpc.net.kernel_caches.node import archive_folder

_STEPS = 2
"""The first step compiles most kernels. The second one has rows of other lengths, and engines with
new weights."""


def main(config: Config) -> int:
    """Warm the caches of ``config``. Returns the exit code. ConfigError: no folder is set."""
    if not config.site.kernel_cache:
        raise ConfigError(
            "site.kernel_cache: found '', allowed with warm: a folder on the shared filesystem "
            "that only you can write"
        )
    folder = archive_folder(config.site.kernel_cache)
    short = short_run(config)
    if short.layout != "local" or short.site.name:
        code = submit(short, resume=False, dry_run=False)
        print(
            f"The kernels are in {folder} when this run has finished. Then remove {short.run_dir}."
        )
        return code
    code = local.run(short, resume=False)
    if code == EXIT_DONE:
        shutil.rmtree(short.run_dir)
        print("\n".join([f"{short.run_dir} is removed", *describe_archives(folder)]))
    return code


def short_run(config: Config) -> Config:
    """``config`` with two steps, and without what only a long run needs."""
    short = copy.deepcopy(config)
    date = time.strftime("%Y%m%d-%H%M%S")
    short.name, short.run_dir = f"{config.name}-warm", f"{config.run_dir}-warm-{date}"
    # The policy does not train in the first steps of a critic, see `algorithm.critic_warmup_steps`.
    short.steps = getattr(config.algorithm, "critic_warmup_steps", 0) + _STEPS
    short.eval.every = 0
    short.checkpoint.every_s = 0.0
    short.metrics.trackers = []
    short.site.on_end = []
    short.site.on_event = []
    return short


def describe_archives(folder: Path) -> list[str]:
    """A line for each archive in ``folder``, the newest first."""
    paths = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [_describe(path) for path in paths] or [f"{folder}: this run compiled no kernels"]


def _describe(path: Path) -> str:
    try:
        with open_archive(path) as file:
            header = read_header(file, path)
    except (ArchiveError, OSError) as error:
        return f"{path}: not used: {error}"
    return f"{path}: {header.file_count} files, {header.size_bytes / 1e6:.1f} MB"
