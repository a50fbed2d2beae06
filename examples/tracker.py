"""A tracker that writes the mean reward and the loss of every step to a CSV file."""

import csv

from relax_hpc.base.metrics.trackers import Tracker

TAGS = ("reward/mean", "loss/policy")


class CsvTracker(Tracker):
    """One row for each training step, in RUN_DIR/rewards.csv."""

    def __init__(self, run_dir, settings):
        super().__init__(run_dir, settings)
        self.path = run_dir / "rewards.csv"

    def log(self, step, values, time):
        if "reward/mean" not in values:  # an evaluation
            return
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow([step, *(values.get(tag) for tag in TAGS)])

    def rolled_back(self, step):
        rows = list(csv.reader(self.path.open())) if self.path.exists() else []
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows(row for row in rows if int(row[0]) < step)
