"""The queue beside its peer (TransferQueue 0.1.11 on Ray) and a memcpy: the same work in one run, sides taking turns.

Every figure is a median of `--rounds`; memcpys are single-threaded, of the same bytes and in the same process. Without
`--peer-python`, a Python with TransferQueue and ray, the peer's columns are empty. Rows:

  fixed     put and get of 512 x 8192 x 4 int32 between two processes; bytes are compared in a round before
  variable  the same with lengths of an eighth of that and more
  small     1024 samples of up to 256 tokens, 6 fields
  latency   one small sample, put and read by a consumer who waits for it
  claims    a claim of 128 rows, with more and more rows in the queue
  control   64 producers and 16 consumers, no rows' bytes: every sample is taken once, or it fails
  fields    the bytes of `fixed` in 1 to 32 fields

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 TransferQueue==0.1.11 ray==2.60.0
    python tools/bench/queue --peer-python PEER/bin/python --json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from control import BATCH, CLAIM_ROWS, Crowd, crowd, deep_queue, timed_claims, without_sockets
from data import HOW, Load, move_of
from peer import Peer, peer_of
from table import Line, median, quantile, table

FIXED = Load(512, 8192, 4)
ONE = Load(1, 256, 1)
FIELDS = (1, 2, 4, 8, 16, 32)
DEPTHS = (1_000, 100_000, 1_000_000)
PEER_DEPTH = 100_000
"""The deepest of the peer's: filling it costs minutes beyond."""
DURABILITIES = ("flush", "commit")
CONTROL_TARGETS = {"flush": 100_000.0, "commit": 20_000.0}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all rows share."""

    folder: Path
    peer: Peer | None
    rounds: int
    quick: bool

    @contextmanager
    def place(self) -> Iterator[Path]:
        """A folder for one run."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            yield Path(name)

    def load(self, load: Load) -> Load:
        return replace(load, samples=min(load.samples, 16), tokens=min(load.tokens, 64)) if self.quick else load


# -- rows with their bytes ---------------------------------------------------------------------------------------------


def moved(setting: Setting, load: Load) -> dict[str, list[float]]:
    """Seconds of each round, by what was timed; the peer's under "peer put" and "peer get"."""
    seconds: dict[str, list[float]] = {}
    if setting.peer:
        setting.peer.ask("load", load.lengths, load.fields)
        setting.peer.ask("move", True)
    with setting.place() as folder, move_of(folder, load) as move:
        move.round(check=True)
        for _ in range(setting.rounds):
            found = move.round()
            found["get while written"] = move.round(while_written=True)["get"]
            checked = move.round(check=True)
            found |= {how: checked[how] for how in HOW if how in checked and how not in found}
            theirs = setting.peer.ask("move") if setting.peer else {}
            for name, value in {**found, **{f"peer {name}": value for name, value in theirs.items()}}.items():
                seconds.setdefault(name, []).append(value)
    return seconds


def data_lines(setting: Setting, name: str, load: Load, targets: dict[str, dict[str, float]]) -> list[Line]:
    """GB/s of a put, of a get, and of gets in other ways."""
    load = setting.load(load)
    seconds = moved(setting, load)
    speed = {what: load.bytes / median(values) / 1e9 for what, values in seconds.items()}
    limits = {
        "put": "1 memory copy, row by row and so through the cache (0.65 of one that is not), and a look at versions",
        "get": "1 memory copy, out of it: a memcpy",
        "get while written": "1 memory copy, while another core reads and writes the same bytes for the disk",
        "get rows": "1 memory copy, row by row, with a Python object for each row and field",
        "get tcp": "3 copies (kernel, kernel, reader) and a checksum at each end; checked",
        "get file": "1 copy and a checksum, of the file's pages in memory; checked",
    }
    if load.tokens <= 256:
        each = {what: 1e6 * median(seconds[what]) / load.samples for what in ("put", "get")}
        about = f"Python objects of {load.samples} samples x {load.fields} fields; "
        limits |= {what: f"{about}{value:.1f} us a sample" for what, value in each.items()}
    return [
        Line(
            f"{name}: {what}",
            "GB/s",
            speed[what],
            speed.get(f"peer {what.split()[0]}"),
            speed[f"{what.split()[0]} memcpy"],
            targets.get(what, {}),
            limits[what],
        )
        for what in ("put", *HOW)
    ]


TIMES_PEER = {"put": {"peer": 5.0, "memcpy": 0.4}, "get": {"peer": 15.0, "memcpy": 0.8}}


def fixed(setting: Setting) -> list[Line]:
    return data_lines(setting, "512 x 8192 x 4", FIXED, TIMES_PEER)


def variable(setting: Setting) -> list[Line]:
    return data_lines(setting, "512 x <=8192 x 4", Load(512, 8192, 4, True), TIMES_PEER)


def small(setting: Setting) -> list[Line]:
    targets = {"put": {"peer": 20.0}, "get": {"peer": 20.0}}
    return data_lines(setting, "1024 x <=256 x 6", Load(1024, 256, 6, True), targets)


def fields(setting: Setting) -> list[Line]:
    """GB/s at each number of fields, as a share of the most."""
    total, lines = setting.load(FIXED).tokens * FIXED.fields, []
    found = {}
    for count in FIELDS[:3] if setting.quick else FIELDS:
        load = Load(setting.load(FIXED).samples, total // count, count, plain=True)
        seconds = moved(setting, load)
        found[count] = {what: load.bytes / median(values) / 1e9 for what, values in seconds.items()}
    for what in ("put", "get"):
        first = found[FIELDS[0]][what]
        for count, speed in found.items():
            targets = {} if count == FIELDS[0] else {"least": 0.8 * first}
            about = f"fields: {what} of {count}"
            limit = f"{speed[what] / first:.2f} of the speed with 1 field"
            lines.append(
                Line(about, "GB/s", speed[what], speed.get(f"peer {what}"), speed[f"{what} memcpy"], targets, limit)
            )
    return lines


def latency(setting: Setting) -> list[Line]:
    """Milliseconds: medians over the rounds of the p50 and the p99 of each."""
    count, lines = (5 if setting.quick else 200), []
    theirs: list[list[float]] = []
    for durability in DURABILITIES:
        ours: list[dict[str, list[float]]] = []
        with setting.place() as folder, move_of(folder, ONE, durability) as move:
            move.round(check=True)
            for _ in range(setting.rounds):
                found = [move.latency() for _ in range(count)]
                ours.append({name: [one[name] for one in found] for name in found[0]})
                if setting.peer and durability == DURABILITIES[0]:
                    theirs.append(setting.peer.ask("latency", count))
        request = 1e3 * median([median(one["request"]) for one in ours])
        for share, most in ((0.5, 1.0), (0.99, 5.0)):
            value = 1e3 * median([quantile(one["put to read"], share) for one in ours])
            peers = 1e3 * median([quantile(one, share) for one in theirs]) if theirs else None
            targets = {"most": most} if durability == "flush" else {}
            limit = (
                f"two requests, each through 2 processes and 3 threads: one that does nothing takes {request:.3f} ms"
            )
            limit += "; a put is journaled before it is told" + (", by fdatasync" if durability == "commit" else "")
            name = f"one sample, p{100 * share:.0f}, {durability}"
            lines.append(Line(name, "ms", value, peers, None, targets, limit, less_is_better=True))
    return lines


# -- the control plane -------------------------------------------------------------------------------------------------


def claims(setting: Setting) -> list[Line]:
    """Milliseconds of a claim at each depth; the last line is how they grow."""
    depths = (1024, 2048) if setting.quick else DEPTHS
    count, lines = (3 if setting.quick else 200), []
    for depth in depths:
        ours, theirs = [], []
        with setting.place() as folder, deep_queue(folder, depth) as found:
            for _ in range(setting.rounds):
                ours.append(timed_claims(found.line, found.plan, count))
                if setting.peer and depth <= PEER_DEPTH:
                    theirs.append(median(setting.peer.ask("claims", depth, CLAIM_ROWS, 5)))
        peers = 1e3 * median(theirs) if theirs else None
        name, limit = f"claim of {CLAIM_ROWS} of {depth:,} rows", "a request, and the tickets that it gets"
        lines.append(Line(name, "ms", 1e3 * median(ours), peers, None, {}, limit, less_is_better=True))
    growth = max(line.ours for line in lines) / min(line.ours for line in lines)
    lines.append(Line("claims: slowest / fastest", "", growth, None, None, {"most": 1.5}, less_is_better=True))
    lines.append(
        Line(f"controller's memory, {depths[-1]:,} rows", "MB a million", found.bytes_per_row, less_is_better=True)
    )
    return lines


def control(setting: Setting) -> list[Line]:
    """Samples a second through the whole of a controller, and its memory at the first and the last fifth."""
    about = Crowd(16_384, 2, 2) if setting.quick else Crowd()
    lines = []
    for durability in DURABILITIES:
        found, alone = [], []
        for _ in range(setting.rounds):
            with setting.place() as folder:
                found.append(crowd(folder, about, durability))
            with setting.place() as folder:
                alone.append(without_sockets(folder, about.samples // 5, durability == "commit"))
        cost = {who: median([one[f"{who}_cpu_us_per_sample"] for one in found]) for who in ("controller", "clients")}
        limit = f"{median(alone):,.0f} by one process without sockets; {os.cpu_count()} cores for CPU time of "
        limit += " and ".join(f"{value:.2f} us ({who})" for who, value in cost.items()) + " a sample"
        name = f"{about.producers} x {about.consumers}, {about.samples:,} samples, by {BATCH}, {durability}"
        rate = median([one["samples_per_s"] for one in found])
        lines.append(Line(name, "samples/s", rate, None, None, {"least": CONTROL_TARGETS[durability]}, limit))
        memory = [(one["controller_mb"][0], one["controller_mb"][-1]) for one in found]
        first, last = (median(values) for values in zip(*memory, strict=True))
        limit = f"{first:.0f} MB at a fifth of the run, {last:.0f} MB at its end"
        lines.append(
            Line(f"memory of the controller, {durability}", "x", last / first, None, None, {"most": 1.2}, limit)
        )
    return lines


ROWS: dict[str, Callable[[Setting], list[Line]]] = {
    "fixed": fixed,
    "variable": variable,
    "small": small,
    "latency": latency,
    "claims": claims,
    "control": control,
    "fields": fields,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="append", choices=list(ROWS), help="default: all")
    parser.add_argument("--peer-python", type=Path, help="a Python with TransferQueue 0.1.11 and ray")
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--folder", type=Path, default=Path(), help="where runs are made: its disk matters")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it works")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (1 if options.quick else 5)
    if options.rounds < 1:
        parser.error(f"--rounds: found {options.rounds}, allowed 1 and more")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a target is missed."""
    options = parse(argv)
    about = {"rounds": options.rounds, "cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 2)}
    lines: list[Line] = []
    with peer_of(options.peer_python) as peer:
        setting = Setting(options.folder, peer, options.rounds, options.quick)
        for name in options.rows or ROWS:
            lines += ROWS[name](setting)
            print(f"{name}: done", file=sys.stderr, flush=True)
    print("\n".join(table(lines)))
    print("settings: " + ", ".join(f"{key}={value}" for key, value in about.items()))
    if options.json:
        print(json.dumps({"lines": [line.record() for line in lines], "settings": about}), flush=True)
    return int(not options.quick and any(line.met() is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
