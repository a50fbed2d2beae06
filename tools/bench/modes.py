"""What a step of the quickstart takes in each mode, with the real engine and the real actor, one
thread each.

G is how long the engine is at work for a step, T how long the actor is, both as measured in that
run. While they take turns a step cannot take less than G + T, nor much less at staleness 0, where
what is drawn last is trained last. From staleness 1 on it cannot take less than the longer of the
two.

    python tools/bench/modes.py --modes colocate 0 1 4 --steps 60
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from figures import Figure, print_result
from quickstart_runs import run

from relax_hpc.base.rundir import RunDir
from relax_hpc.ops.observe.report import report

WARM_UP_STEPS = 5


def measured(mode: str, pace: Mapping[str, float]) -> dict[str, Any]:
    """A mode's line from the medians of its run's steps, seconds."""
    generate, train = pace["rollout_s"], pace["actor_s"]
    ideal = generate + train if mode in ("colocate", "0") else max(generate, train)
    about = {"generate_s": generate, "train_s": train, "ideal_s": ideal, "step_s": pace["step_s"]}
    return {"mode": mode, **about, "ideal_share": ideal / pace["step_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--modes", nargs="+", default=["colocate", "0", "1", "4"], help="as in convergence.py"
    )
    parser.add_argument(
        "--steps", type=int, default=60, help=f"of each run; the first {WARM_UP_STEPS} are left out"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    print(f"{'mode':10s}    G, s    T, s  ideal, s  step, s  ideal/step  load", flush=True)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for mode in args.modes:
            load_before = os.getloadavg()[0]
            path = run(Path(folder) / mode, mode, 0, args.steps)
            line = measured(mode, report(RunDir(path), WARM_UP_STEPS)["pace"]) | {
                "load_before": load_before
            }
            print(
                f"{line['mode']:10s} {line['generate_s']:7.3f} {line['train_s']:7.3f} "
                f"{line['ideal_s']:9.3f} "
                f"{line['step_s']:8.3f} {line['ideal_share']:11.2f}  {load_before:4.1f}",
                flush=True,
            )
            found.append(line)
    if args.json:
        figures = []
        for line in found:
            for name in ("generate_s", "train_s", "ideal_s", "step_s"):
                figures.append(Figure(f"{line['mode']}: {name}", line[name], "s"))
            figures.append(Figure(f"{line['mode']}: ideal_share", line["ideal_share"], ""))
        print_result(figures, {"steps": args.steps, "load_before": found[0]["load_before"]})


if __name__ == "__main__":
    main()
