"""`relax-hpc page`: write the page of a run to a file, from its run directory alone."""

from __future__ import annotations

from pathlib import Path

from relax_hpc.base.errors import EXIT_DONE, ConfigError
from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.ops.observe.status import SLURM_S
from relax_hpc.service.address import address_file, read_address
from relax_hpc.service.page.document import MARK, render_document
from relax_hpc.service.page.snapshot import take_snapshot


def main(folder: str, html: str = "") -> int:
    """Write the page of the run in ``folder`` to ``html``.

    Empty: to NAME.html in the working directory, NAME is that of the folder. ConfigError: there is
    no run, the file cannot be written, or NAME.html is another file.
    """
    run = RunDir(Path(folder))
    path = Path(html) if html else Path(f"{run.root.resolve().name}.html")
    if not html:
        _check_own_page(path)
    snapshot = take_snapshot(run, Slurm(timeout_s=SLURM_S, tries=1))
    text = render_document(snapshot)
    try:
        write_atomic(path, text.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"--html: {path}: {error.strerror}; name a file in a folder of yours"
        ) from error
    print(f"{path}: open it in a browser")
    service = read_address(run)
    if service and snapshot["state"]["run"]["state"] == "running":
        print(
            f"{service.url}/page on {service.host} shows the run while it continues; the token is "
            f"in {address_file(run)}"
        )
    return EXIT_DONE


def _check_own_page(path: Path) -> None:
    """Raise ConfigError if ``path`` is a file that this command has not written."""
    if not path.exists():
        return
    is_page = False
    if path.is_file():
        with path.open("rb") as file:
            is_page = MARK.encode() in file.read(1024)
    if not is_page:
        raise ConfigError(
            f"--html: found nothing, and {path} is not a page of a run; name another file"
        )
