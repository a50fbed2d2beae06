"""What people are told while an engine starts."""

from __future__ import annotations

from pathlib import Path

from relax_hpc.ops.observe.status_groups import describe_activity
from relax_hpc.rollout.engines.sglang.phases import STARTING, Phases


def test_the_phase_is_that_of_the_last_line_that_is_known(tmp_path: Path) -> None:
    """Lines as SGLang 0.5.21 writes them on a GPU, torn anywhere; those of an engine before are not
    of this one."""
    log = tmp_path / "engine-0.log"
    log.write_bytes(b"[2026-11-23 10:00:00] The server is fired up and ready to roll!\n")
    phases = Phases(log)
    assert phases.now() == STARTING
    told = []
    for text in (
        "[2026-11-23 10:01:00 TP0] Load weight begin. avail mem=78.00 GB\n[2026-11-23 10:0",
        "1:09 TP0] Load weight end. elapsed=9.00 s\n",
        "[2026-11-23 10:01:10 TP0] Capture prefill CUDA graph begin. backend=full\nCapturing "
        "batches 12%",
        "\n[2026-11-23 10:01:40 TP0] Capture target decode cuda graph begin. bs=[1, 2]\n",
        "[2026-11-23 10:01:41] INFO:     Uvicorn running on socket ('127.0.0.1', 4000)\nno newline",
    ):
        with log.open("a") as file:
            file.write(text)
        told.append(phases.now())
    words = [
        "loading weights",
        "making room for keys and values",
        *["capturing CUDA graphs"] * 2,
        "about to serve",
    ]
    assert told == [f"SGLang is {each}" for each in words]


def test_a_log_that_is_cut_meanwhile_is_read_from_its_new_beginning(tmp_path: Path) -> None:
    """Logs are bounded: what was written moves to a part, and the file begins again."""
    log = tmp_path / "engine-0.log"
    log.write_text("an earlier engine\n" * 100)
    phases = Phases(log)
    log.write_text("[2026-11-23 10:01:00 TP0] Load weight begin. avail mem=78.00 GB\n")
    assert phases.now() == "SGLang is loading weights"


def test_of_several_processes_the_longest_piece_is_told() -> None:
    assert describe_activity([]) == describe_activity([{"progress": 3}]) == ""
    beats = [
        {"doing": "b", "doing_s": 3.4},
        {"doing": "SGLang is loading weights", "doing_s": 75.2},
        {"progress": 1},
    ]
    assert describe_activity(beats) == "SGLang is loading weights (75 s)"
