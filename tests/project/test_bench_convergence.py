"""The proof that learning is right: what is read off curves, its power against simulation, pairing,
runs that go on."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest

from relax_hpc.base.metrics.writer import METRICS_FILE
from relax_hpc.config import load
from relax_hpc.config.schema import Config
from relax_hpc.config.yaml_files import parse_yaml
from relax_hpc.ops.checks.settings import check


@pytest.fixture
def curves(bench):
    return bench("curves")


@pytest.fixture
def runs(bench):
    return bench("quickstart_runs")


# -- curves ----------------------------------------------------------------------------------------


def test_an_area_is_the_mean_height(curves) -> None:
    assert curves.area({0: 0.0, 10: 1.0}) == pytest.approx(0.5)
    # By hand: 10 versions at 0.2 in the mean, 30 at 0.6, 60 at 0.8.
    assert curves.area({100: 0.8, 0: 0.0, 10: 0.4, 40: 0.8}) == pytest.approx(
        0.1 * 0.2 + 0.3 * 0.6 + 0.6 * 0.8
    )


def test_fewer_evaluations_are_no_difference(curves) -> None:
    """Of a bent curve a coarse one has another area, but is level with the fine one where it is
    known."""
    fine = {version: (version / 100) ** 2 for version in range(0, 101, 10)}
    coarse = {version: fine[version] for version in (0, 50, 100)}
    assert curves.area(coarse) - curves.area(fine) > 0.03
    assert curves.area_between(coarse, fine) == pytest.approx(0)
    assert curves.area_between(
        {version: value - 0.05 for version, value in coarse.items()}, fine
    ) == pytest.approx(-0.05)


def test_steps_to_a_level_are_counted_between_evaluations(curves) -> None:
    curve = {0: 0.1, 10: 0.5, 20: 0.9, 30: 0.7}
    assert curves.steps_to(curve, 0.7) == pytest.approx(15) and curves.steps_to(curve, 0.05) == 0
    assert math.isinf(curves.steps_to(curve, 0.95))


# -- statistics ------------------------------------------------------------------------------------


def test_an_interval_is_that_of_student(curves) -> None:
    """Three differences of mean -0.1 and standard deviation 0.1; the quantile of t with 2 degrees
    is 4.3027."""
    seen = curves.paired([-0.2, -0.1, 0.0])
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert (seen.mean, seen.spread, seen.low, seen.high) == pytest.approx(
        (-0.1, 0.1, -0.1 - half, -0.1 + half)
    )
    assert not seen.lost and curves.paired([-0.11, -0.1, -0.09]).lost
    alone = curves.paired([-0.4])
    assert (
        alone.mean == -0.4
        and not alone.lost
        and math.isnan(alone.power(0.05))
        and alone.needed(0.05) == 0
    )


@pytest.mark.parametrize(
    ("loss", "spread", "seeds"), [(0.05, 0.03, 4), (0.05, 0.05, 10), (0.02, 0.05, 6), (0.0, 1.0, 5)]
)
def test_power_is_what_a_simulation_finds(curves, loss, spread, seeds) -> None:
    """20,000 comparisons of normal differences: their share that is found is known to 0.01 with
    99.5 %."""
    drawn = np.random.default_rng(seeds).normal(-loss, spread, (20_000, seeds))
    edge = curves.paired(list(drawn[0]))
    factor = (edge.high - edge.mean) * math.sqrt(seeds) / edge.spread
    found = drawn.mean(1) + factor * drawn.std(1, ddof=1) / math.sqrt(seeds) < 0
    assert [curves.paired(list(line)).lost for line in drawn[:50]] == found[:50].tolist()
    assert curves.power(loss, spread, seeds) == pytest.approx(found.mean(), abs=0.01)


def test_seeds_are_the_fewest_that_suffice(curves) -> None:
    for loss, spread in [(0.05, 0.01), (0.05, 0.05), (0.05, 0.2), (0.2, 0.01)]:
        seeds = curves.seeds_for(loss, spread)
        assert curves.power(loss, spread, seeds) >= curves.POWER
        assert seeds == 2 or curves.power(loss, spread, seeds - 1) < curves.POWER
    assert curves.seeds_for(0.05, 0.0) == 2 and curves.seeds_for(1e-6, 1.0) == 0


def test_a_spread_of_few_seeds_is_believed_less(curves) -> None:
    """In 4 of 5 cases the true standard deviation is below the bound, whatever the number of
    seeds."""
    draw = np.random.default_rng(0)
    for seeds in (3, 8):
        bounds = [curves.upper_spread(stdev(draw.normal(0, 1, seeds)), seeds) for _ in range(4000)]
        assert mean(bound >= 1 for bound in bounds) == pytest.approx(curves.PILOT, abs=0.03)
    assert curves.upper_spread(1.0, 3) > curves.upper_spread(1.0, 8) > 1.0


def test_an_interval_of_samples_that_are_not_paired(curves) -> None:
    """Against the textbook's formula: equal sizes and spreads make Welch's t that of 2 n - 2
    degrees of freedom."""
    found, low, high = curves.difference([0.5, 0.6, 0.7], [0.4, 0.5, 0.6])
    half = 2.776445 * math.sqrt(2 * 0.01 / 3)
    assert (found, low, high) == pytest.approx((0.1, 0.1 - half, 0.1 + half), rel=1e-5)


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [
        "0",
        "true-4",
        "true-4-group",
        "true-8",
        "colocate",
        "true-16-uncorrected",
        "shuffled",
        "m2po",
        "ppo",
    ],
)
def test_every_mode_is_a_good_configuration(runs, mode, tmp_path) -> None:
    words = ["--config", str(runs.CONFIG), "--run_dir", str(tmp_path / "run"), *runs.words_of(mode)]
    assert check(loaded(words)) == []


def test_a_forced_staleness_goes_round(runs, tmp_path) -> None:
    """By admission: the version that a step may be drawn with is at least step - max_staleness, and
    published. For steps of the first rounds there is one such version alone, whoever is fast:
    staleness is 0 to 8, 4 in the mean."""
    words = [
        "--config",
        str(runs.CONFIG),
        "--run_dir",
        str(tmp_path / "run"),
        *runs.words_of("true-4"),
    ]
    config = loaded(words)
    found = []
    for step in range(3 * config.weights.publish_every):
        published = range(0, step + 1, config.weights.publish_every)
        (version,) = (one for one in published if one >= step - config.max_staleness)
        found.append(step - version)
    assert found == 3 * list(range(9)) and mean(found) == 4


def loaded(words: list[str]) -> Config:
    """The configuration of a run's options."""
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    file = Path(pairs.pop("--config"))
    return load(
        [file], {name.removeprefix("--"): parse_yaml(value, name) for name, value in pairs.items()}
    )


def write_run(directory: Path, curve: dict[int, float], steps: int, old: float = 0.0) -> None:
    """What a run leaves of a learning curve, its two sets apart by 0.1, with rewards of older
    versions of the same."""
    lines = [
        {"step": v, "eval/a/x": score - 0.05, "eval/b/x": score + 0.05}
        for v, score in curve.items()
    ]
    drawn = np.interp(np.arange(steps) - old, list(curve), list(curve.values()))
    about = {"staleness/mean": old, "staleness/max": 2 * old}
    lines += [
        {"step": step, "reward/mean": float(reward)} | about for step, reward in enumerate(drawn)
    ]
    directory.mkdir(parents=True)
    texts = (json.dumps({"time": float(line["step"]), "incarnation": 1} | line) for line in lines)
    (directory / METRICS_FILE).write_text("\n".join(texts) + "\n")


def line(height: float) -> dict[int, float]:
    return {0: 0.1, 10: 0.1 + height, 20: 0.1 + 2 * height}


def report(bench, monkeypatch, capsys, keep: Path, *words: str) -> tuple[int, dict[str, list[str]]]:
    """Exit code and rows by their first cell, of what is there."""
    convergence = bench("convergence")
    monkeypatch.setattr(convergence, "plot", lambda found, path: path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["convergence.py", "--keep", str(keep), "--steps", "20", "--report", "--json", *words],
    )
    code = convergence.main()
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    return code, {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}


AREA, VERDICT = "reward area to staleness 0, paired, 95 %", "verdict"


def test_modes_are_compared_seed_by_seed(bench, monkeypatch, capsys, tmp_path) -> None:
    """Seeds differ by far more than modes do: unpaired nothing could be seen of a loss of 0.05, nor
    ruled out."""
    draw, luck = random.Random(0), {seed: 0.02 * seed for seed in range(6)}
    for seed, height in luck.items():
        near = {mode: height + draw.uniform(-0.003, 0.003) for mode in ("1", "true-4")}
        base = near | {
            "0": height,
            "colocate": height,
            "true-16-uncorrected": height - 0.05 + draw.uniform(-0.003, 0.003),
        }
        for mode, slope in base.items():
            old = {"true-4": 4.0, "true-16-uncorrected": 16.0}.get(mode, 0.0)
            write_run(tmp_path / "20-steps" / f"{mode}-seed-{seed}", line(slope), 20, old)
    seeds = ["--seeds", *map(str, luck)]
    code, rows = report(bench, monkeypatch, capsys, tmp_path, *seeds)
    assert code == 0 and rows["colocate"][AREA] == "+0.000 (+0.000 to +0.000)"
    assert (
        rows["true-4"][VERDICT] == "a loss of 0.05 is ruled out"
        and rows["true-4"]["power for 0.05"] == "1.00"
    )
    assert rows["true-16-uncorrected"][VERDICT] == "loses, as it must"
    assert rows["true-16-uncorrected"]["staleness, mean and most"] == "16.0, 32"
    # A comparison that cannot see what must be seen fails, also if nothing else is wrong.
    (tmp_path / "20-steps" / "true-16-uncorrected-seed-5" / METRICS_FILE).unlink()
    write_run(tmp_path / "20-steps" / "true-16-uncorrected-seed-9", line(0.3), 20)
    write_run(tmp_path / "20-steps" / "0-seed-9", line(0.1), 20)
    code, rows = report(bench, monkeypatch, capsys, tmp_path, "--seeds", "0", "9", "5")
    assert code == 1 and rows["true-16-uncorrected"][VERDICT] == "NOT FOUND to lose"
    assert rows["true-16-uncorrected"]["seeds"] == "2", "one is not finished"


@pytest.mark.parametrize(
    ("differences", "verdict", "ok"),
    [
        ([-0.016, -0.013, -0.012], "loses less than 0.05", True),
        ([0.002, -0.003, 0.001], "a loss of 0.05 is ruled out", True),
        ([-0.06, -0.07, -0.065], "LOSES", False),
        ([-0.05, 0.02, -0.03], "no loss found; TOO FEW SEEDS", False),
        (
            [-0.083, 0.043, -0.056, 0.016, -0.074, 0.034, -0.047, 0.007, -0.038, -0.002],
            "no loss found",
            True,
        ),
    ],
)
def test_a_loss_is_found_ruled_out_or_not_known(bench, differences, verdict, ok) -> None:
    assert bench("convergence").judged(bench("curves").paired(differences), 0.05) == (verdict, ok)


@pytest.mark.parametrize(
    ("differences", "verdict", "is_met"),
    [
        ([-0.02, -0.03] * 4, "at most 0.03 below: met", True),
        ([0.01, 0.02] * 4, "at most 0.03 below: met", True),
        ([-0.03, -0.04] * 4, "at most 0.03 below: MISSED", False),
        ([-0.02, -0.03] * 3 + [-0.02], "not decided: found 7 seeds, needs 8", False),
        ([-0.05, 0.05] * 4, "not decided: half-width 0.045, needs 0.015", False),
        ([], "not decided: found 0 seeds, needs 8", False),
    ],
)
def test_the_claim_needs_seeds_and_a_narrow_interval(bench, differences, verdict, is_met) -> None:
    assert bench("convergence").CLAIM.judged(differences) == (verdict, is_met)


def test_the_claim_is_of_1_and_of_a_true_4(bench, monkeypatch, capsys, tmp_path) -> None:
    """What staleness 8 loses is reported alone; without one of the two modes nothing is claimed."""
    for seed in range(8):
        lost = {"0": 0.0, "1": 0.01, "true-4": 0.02, "true-8": 0.2}
        for mode, loss in lost.items():
            write_run(
                tmp_path / "20-steps" / f"{mode}-seed-{seed}", line(0.3 + 0.001 * seed - loss), 20
            )
    options = ["--seeds", *map(str, range(8)), "--claim", "--modes"]
    code, rows = report(
        bench, monkeypatch, capsys, tmp_path, *options, "0", "1", "true-4", "true-8"
    )
    assert (
        code == 0
        and rows["true-8"]["claim"] == rows["0"]["claim"] == ""
        and rows["true-8"][VERDICT] == "LOSES"
    )
    assert rows["1"]["claim"] == rows["true-4"]["claim"] == "at most 0.03 below: met"
    assert report(bench, monkeypatch, capsys, tmp_path, *options, "0", "1", "true-8")[0] == 1


def test_few_seeds_are_no_proof(bench, monkeypatch, capsys, tmp_path) -> None:
    for seed, apart in enumerate((0.1, -0.1)):
        write_run(tmp_path / "20-steps" / f"0-seed-{seed}", line(0.2), 20)
        write_run(tmp_path / "20-steps" / f"1-seed-{seed}", line(0.2 + apart), 20)
    code, rows = report(
        bench, monkeypatch, capsys, tmp_path, "--seeds", "0", "1", "--modes", "0", "1"
    )
    assert (
        code == 1
        and rows["1"][VERDICT].endswith("TOO FEW SEEDS")
        and float(rows["1"]["power for 0.05"]) < 0.2
    )


def test_an_algorithm_has_to_beat_both_controls(bench, monkeypatch, capsys, tmp_path) -> None:
    """One that stays as it was beats permuted rewards, by which a policy may get worse; it does not
    beat itself."""
    made = {"0": 0.2, "shuffled": -0.05, "rloo": 0.2, "gspo": 0.0}
    for mode, height in made.items():
        write_run(tmp_path / "20-steps" / f"{mode}-seed-0", line(height), 20)
    words = ["--seeds", "0", "--algorithms"]
    code, rows = report(bench, monkeypatch, capsys, tmp_path, *words, "rloo", "gspo")
    assert code == 1 and rows["gspo"][VERDICT].startswith("MISSED")
    code, rows = report(bench, monkeypatch, capsys, tmp_path, *words, "rloo")
    assert code == 0 and rows["rloo"][VERDICT] == "over both by 0.400 or more"
    assert rows["grpo, rewards permuted"][VERDICT] == "control, over its first by -0.100"
    # Something is learned of rewards that say nothing: whatever algorithms reach is no proof then.
    write_run(tmp_path / "20-steps" / "shuffled-seed-1", line(0.2), 20)
    write_run(tmp_path / "20-steps" / "rloo-seed-1", line(0.4), 20)
    code, rows = report(
        bench, monkeypatch, capsys, tmp_path, "--seeds", "1", "--algorithms", "rloo"
    )
    assert code == 1 and rows["grpo, rewards permuted"][VERDICT].startswith("MISSED")


# -- runs ------------------------------------------------------------------------------------------


def test_runs_that_are_there_go_on_or_stay(runs, monkeypatch, tmp_path) -> None:
    """Of three: one is finished, one was cut off, one is new."""
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, **about: asked.append(command[4:]))
    done, cut, new = (runs.directory_of(tmp_path, "1", seed, 20) for seed in range(3))
    write_run(done, line(0.2), 20)
    write_run(cut, {0: 0.1}, 4)
    for directory in (done, cut):
        (directory / "config.yaml").write_text("")
    for seed, directory in enumerate((done, cut, new)):
        runs.run(directory, "1", seed, 20, evaluate_every=5)
    resumed, begun = asked
    assert resumed == ["--run_dir", str(cut), "--resume"]
    assert begun[:2] == ["--run_dir", str(new)] and begun[-2:] == ["--max_staleness", "1"]
    assert begun[begun.index("--eval.every") + 1] == "5" and begun[begun.index("--seed") + 1] == "2"


def test_a_teacher_is_there_before_its_pupil(runs, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="distill needs mode 0"):
        runs.taught_by(tmp_path, 0, 20)
    model = runs.directory_of(tmp_path, "0", 0, 20) / "weights" / "i000002-v000020" / "model"
    model.mkdir(parents=True)
    assert runs.taught_by(tmp_path, 0, 20) == ["--model.teacher_path", str(model)]
