"""`python -m relax_hpc.launch.tied COMMAND...`: become COMMAND, killed when the process that started it ends.

For programs that are not ours, such as MPI launchers: without it a supervisor's death would leave them running.
"""

from __future__ import annotations

import os
import sys

from relax_hpc.rendezvous.process import die_with_parent


def main(words: list[str]) -> None:
    """Does not return. The tie survives the exec."""
    die_with_parent()
    os.execv(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
