"""The queue beside its peer (TransferQueue 0.1.11 on Ray) and a memcpy: the same work in one run,
sides taking turns.

Every figure is a median of `--rounds`, with the least and the most of them, and the load of the
machine is printed before each row: the peer's processes starve where other work is. Memcpys are
single-threaded, of the same bytes and in the same process. Without `--peer-python`, a Python with
TransferQueue and ray, the peer's columns are empty. Rows:

  fixed     put and get of 512 x 8192 x 4 int32 between two processes of a node; a round before
            compares the bytes
  variable  the same with lengths of an eighth of that and more
  small     1024 samples of up to 256 tokens, 6 fields
  latency   one small sample, put and read by a consumer who waits for it
  claims    a claim of 128 rows, with more and more rows in the queue
  control   64 producers and 16 consumers, no rows' bytes: every sample is taken once, or it fails
  fields    the bytes of `fixed` in 1 to 32 fields
  stream    puts of 2 MB in a row, as a share of one that waits for the files of those before
  media     pictures, videos and sounds of prompt groups: stored, put, claimed, checked and read,
            and the peer's put and get of the same bytes, each once

    python -m venv PEER && PEER/bin/pip install torch==2.13.0 TransferQueue==0.1.11 ray==2.60.0
    python tools/bench/queue --peer-python PEER/bin/python --json
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from control import (
    BATCH,
    CLAIM_ROWS,
    GROUP,
    Crowd,
    crowd,
    deep_queue,
    timed_claims,
    without_sockets,
)
from data import HOW, Load, move_of
from figures import Figure, print_result
from peer import Peer, peer_of
from pictures import Pictures, gallery
from stream import streamed
from table import Line, head, median, quantile

FIXED = Load(512, 8192, 4)
ONE = Load(1, 256, 1)
FIELDS = (1, 2, 4, 8, 16, 32)
DEPTHS = (1_000, 100_000, 1_000_000)
PEER_DEPTH = 100_000
"""The deepest of the peer's: filling it costs minutes beyond."""
DURABILITIES = ("flush", "commit")
CONTROL_TARGETS = {"flush": 100_000.0, "commit": 20_000.0}
QUICK_STEPS = 66
"""More than engines may lag by default (weights.publish_lag), which no row may depend on."""
Lines = Iterator[Line]
"""As they are measured."""


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
        with tempfile.TemporaryDirectory(prefix="relax-bench-", dir=self.folder) as name:
            yield Path(name)

    def load(self, load: Load) -> Load:
        return (
            replace(load, samples=min(load.samples, 16), tokens=min(load.tokens, 64))
            if self.quick
            else load
        )

    def moves(self, load: Load) -> int:
        """Rounds of three moves each: of a quick session further than engines may lag once, as rows
        differ in their bytes alone."""
        if not self.quick:
            return self.rounds
        return QUICK_STEPS // 3 if load == self.load(FIXED) else 2


# -- rows with their bytes -------------------------------------------------------------------------


def moved(setting: Setting, load: Load) -> dict[str, list[float]]:
    """Seconds of each round, by what was timed; the peer's under "peer put" and "peer get"."""
    seconds: dict[str, list[float]] = {}
    if setting.peer:
        setting.peer.ask("load", load.lengths, load.fields)
        setting.peer.ask("move", True)
    with setting.place() as folder, move_of(folder, load) as move:
        move.round(check=True)
        for _ in range(setting.moves(load)):
            found = move.round()
            found["get while written"] = move.round(while_written=True)["get"]
            checked = move.round(check=True)
            found |= {how: checked[how] for how in HOW if how in checked and how not in found}
            theirs = setting.peer.ask("move") if setting.peer else {}
            for name, value in {
                **found,
                **{f"peer {name}": value for name, value in theirs.items()},
            }.items():
                seconds.setdefault(name, []).append(value)
    return seconds


def speeds_of(setting: Setting, load: Load) -> dict[str, list[float]]:
    """GB/s of each round, by what was timed."""
    return {
        what: [load.bytes / one / 1e9 for one in found]
        for what, found in moved(setting, load).items()
    }


def speed_line(
    speeds: dict[str, list[float]], name: str, what: str, targets: dict[str, float], limit: str
) -> Line:
    """Of ``what``, beside the peer's put or get, and a memcpy in the process that did ours."""
    side = what.split()[0]
    theirs, memcpy = speeds.get(f"peer {side}", []), median(speeds[f"{side} memcpy"])
    peer, rounds = (
        median(theirs) if theirs else None,
        {"rounds": speeds[what], "peer_rounds": theirs},
    )
    return Line(name, "GB/s", median(speeds[what]), peer, memcpy, targets, limit, **rounds)


def data_lines(
    setting: Setting, name: str, load: Load, targets: dict[str, dict[str, float]]
) -> Lines:
    """GB/s of a put, of a get, and of gets in other ways."""
    load = setting.load(load)
    speeds = speeds_of(setting, load)
    limits = {
        "put": "1 memory copy, row by row and so through the cache (0.65 of one that is not), and "
        "a look at versions",
        "get": "1 memory copy, out of it: a memcpy",
        (
            "get while written"
        ): "1 memory copy, while another core reads and writes the same bytes for the disk",
        "get rows": "1 memory copy, row by row, with a Python object for each row and field",
        "get tcp": "3 copies (kernel, kernel, reader) and a checksum at each end; checked",
        "get file": "1 copy and a checksum, of the file's pages in memory; checked",
    }
    if load.tokens <= 256:
        each = {
            what: 1e-3 * load.bytes / median(speeds[what]) / load.samples for what in ("put", "get")
        }
        about = f"Python objects of {load.samples} samples x {load.fields} fields; "
        limits |= {what: f"{about}{value:.1f} us a sample" for what, value in each.items()}
    for what in ("put", *HOW):
        yield speed_line(speeds, f"{name}: {what}", what, targets.get(what, {}), limits[what])


TIMES_PEER = {"put": {"peer": 5.0, "memcpy": 0.4}, "get": {"peer": 15.0, "memcpy": 0.8}}


def fixed(setting: Setting) -> Lines:
    return data_lines(setting, "512 x 8192 x 4", FIXED, TIMES_PEER)


def variable(setting: Setting) -> Lines:
    return data_lines(setting, "512 x <=8192 x 4", Load(512, 8192, 4, True), TIMES_PEER)


def small(setting: Setting) -> Lines:
    targets = {"put": {"peer": 20.0}, "get": {"peer": 20.0}}
    return data_lines(setting, "1024 x <=256 x 6", Load(1024, 256, 6, True), targets)


def fields(setting: Setting) -> Lines:
    """GB/s at each number of fields, as a share of the most."""
    total = setting.load(FIXED).tokens * FIXED.fields
    first: dict[str, float] = {}
    for count in FIELDS[:3] if setting.quick else FIELDS:
        load = Load(setting.load(FIXED).samples, total // count, count, plain=True)
        speeds = speeds_of(setting, load)
        for what in ("put", "get"):
            one = first.setdefault(what, median(speeds[what]))
            targets = {} if count == FIELDS[0] else {"least": 0.8 * one}
            limit = f"{median(speeds[what]) / one:.2f} of the speed with 1 field"
            yield speed_line(speeds, f"fields: {what} of {count}", what, targets, limit)


def latency(setting: Setting) -> Lines:
    """Milliseconds: medians over the rounds of the p50 and the p99 of each."""
    theirs: list[list[float]] = []
    for durability in DURABILITIES:
        count = 200 if not setting.quick else QUICK_STEPS if durability == DURABILITIES[0] else 3
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
            rounds = [1e3 * quantile(one["put to read"], share) for one in ours]
            peers = [1e3 * quantile(one, share) for one in theirs]
            targets = {"most": most} if durability == "flush" else {}
            limit = (
                "two requests, each through 2 processes and 3 threads: one that does nothing "
                f"takes {request:.3f} ms"
            )
            limit += "; a put is journaled before it is told" + (
                ", by fdatasync" if durability == "commit" else ""
            )
            name = f"one sample, p{100 * share:.0f}, {durability}"
            yield milliseconds(name, rounds, peers, targets, limit)


def milliseconds(
    name: str, rounds: list[float], peers: list[float], targets: dict[str, float], limit: str
) -> Line:
    peer, each = median(peers) if peers else None, {"rounds": rounds, "peer_rounds": peers}
    return Line(name, "ms", median(rounds), peer, None, targets, limit, less_is_better=True, **each)


MEDIA = (
    Pictures(),
    Pictures("videos of 30 s, 360p", groups=2, pictures=1, size=40_550_400),
    Pictures("sounds of 30 s", groups=32, pictures=1, size=960_000),
)
"""Media that prompt groups have: as many bytes as `tools/bench/media.py` finds of each."""
WAY = ("store", "put", "claim", "check", "read")
"""What the bytes of media and rows pass through, once."""


def media(setting: Setting) -> Lines:
    """Milliseconds of the whole way of media, beside the peer's put and get of the same bytes, and
    of its parts."""
    for about in (Pictures("bytes", 2, 2, 2, 12, 8),) if setting.quick else MEDIA:
        found: dict[str, list[float]] = {}
        if setting.peer:
            setting.peer.ask("load", *about.peer_load())
            setting.peer.ask("move", True)
        with setting.place() as folder, gallery(folder, about) as both:
            both.round()
            for _ in range(QUICK_STEPS if setting.quick else setting.rounds):
                theirs = setting.peer.ask("move") if setting.peer else {}
                for name, seconds in {
                    **both.round(),
                    **({"peer": sum(theirs.values())} if theirs else {}),
                }.items():
                    found.setdefault(name, []).append(1e3 * seconds)
        yield from media_lines(about, found)


def media_lines(about: Pictures, found: dict[str, list[float]]) -> Lines:
    """The whole way and its parts, of milliseconds of each round."""
    name, peers = (
        f"{about.groups * about.pictures} {about.name}, {about.bytes / 1e6:.0f} MB",
        found.get("peer", []),
    )
    way = [sum(parts) for parts in zip(*(found[part] for part in WAY), strict=True)]
    limit = f"a memcpy takes {median(found['memcpy']):.3g} ms; the peer looks at no checksum"
    yield milliseconds(f"{name}: {', '.join(WAY)}", way, peers, {"peer": 1 / 1.2}, limit)
    samples = f"{about.groups * about.samples} samples"
    limits = {
        "store": "the hash that names them, a checksum, and a write",
        "check": f"a checksum of each medium, and a look at the tokens of {samples}",
        "read": "1 memory copy",
        "check again": f"a look at each medium's file, and at the tokens of {samples}",
    }
    for what, limit in limits.items():
        targets = {"most": 150.0} if what == "check" else {}
        yield milliseconds(f"{name}: {what}", found[what], [], targets, limit)


def stream(setting: Setting) -> Lines:
    """GB/s of one put, of puts in a stream, and the share of the two."""
    load, puts = setting.load(Load(32, 4096, 4)), 4 if setting.quick else 40
    for durability in DURABILITIES:
        rates: dict[str, list[float]] = {"alone": [], "stream": []}
        for _ in range(setting.rounds):
            with setting.place() as folder:
                for kind, seconds in streamed(folder, load, durability, puts).items():
                    rates[kind].append(load.bytes / median(seconds) / 1e9)
        shares = [one / alone for one, alone in zip(rates["stream"], rates["alone"], strict=True)]
        for kind, limit in (
            ("alone", "as `put`"),
            ("stream", "as `put`, while the last is written to its file"),
        ):
            yield Line(
                f"put of 2 MB, {durability}: {kind}",
                "GB/s",
                median(rates[kind]),
                limit=limit,
                rounds=rates[kind],
            )
        targets = {"least": 0.7} if durability == "flush" else {}
        name = f"put of 2 MB, {durability}: stream / alone"
        yield Line(name, "", median(shares), None, None, targets, "1", rounds=shares)


# -- the control plane -----------------------------------------------------------------------------


def claims(setting: Setting) -> Lines:
    """Milliseconds of a claim at each depth; the last line is how they grow."""
    depths = (1024, 2048) if setting.quick else DEPTHS
    count, medians = (3 if setting.quick else 200), []
    for depth in depths:
        ours, theirs = [], []
        with setting.place() as folder, deep_queue(folder, depth) as found:
            for _ in range(setting.rounds):
                ours.append(1e3 * timed_claims(found.line, found.plan, count))
                if setting.peer and depth <= PEER_DEPTH:
                    theirs.append(1e3 * median(setting.peer.ask("claims", depth, CLAIM_ROWS, 5)))
        medians.append(median(ours))
        limit = "a request, and the tickets that it gets"
        yield milliseconds(f"claim of {CLAIM_ROWS} of {depth:,} rows", ours, theirs, {}, limit)
    growth = max(medians) / min(medians)
    yield Line(
        "claims: slowest / fastest", "", growth, None, None, {"most": 1.5}, less_is_better=True
    )
    name = f"controller's memory, {depths[-1]:,} rows"
    yield Line(name, "MB/1e6", found.bytes_per_row, less_is_better=True)


def control(setting: Setting) -> Lines:
    """Samples a second through the whole of a controller, and its memory at the first and the last
    fifth."""
    about = Crowd(16_384, 2, 2, 16_384 // GROUP // QUICK_STEPS) if setting.quick else Crowd()
    for durability in DURABILITIES:
        found, alone = [], []
        for _ in range(setting.rounds):
            with setting.place() as folder:
                found.append(crowd(folder, about, durability))
            with setting.place() as folder:
                alone.append(without_sockets(folder, about.samples // 5, durability == "commit"))
        cost = {
            who: median([one[f"{who}_cpu_us_per_sample"] for one in found])
            for who in ("controller", "clients")
        }
        limit = (
            f"{median(alone):,.0f} by one process without sockets; {os.cpu_count()} cores for "
            "CPU time of "
        )
        limit += (
            " and ".join(f"{value:.2f} us ({who})" for who, value in cost.items()) + " a sample"
        )
        name = (
            f"{about.producers} x {about.consumers}, {about.samples:,} samples, by {BATCH}, "
            f"{durability}"
        )
        rates, targets = (
            [one["samples_per_s"] for one in found],
            {"least": CONTROL_TARGETS[durability]},
        )
        yield Line(name, "samples/s", median(rates), None, None, targets, limit, rounds=rates)
        memory = [(one["controller_mb"][0], one["controller_mb"][-1]) for one in found]
        first, last = (median(values) for values in zip(*memory, strict=True))
        limit = f"{first:.0f} MB at a fifth of the run, {last:.0f} MB at its end"
        yield Line(
            f"memory of the controller, {durability}",
            "x",
            last / first,
            None,
            None,
            {"most": 1.2},
            limit,
        )


ROWS: dict[str, Callable[[Setting], Lines]] = {
    "fixed": fixed,
    "variable": variable,
    "small": small,
    "latency": latency,
    "claims": claims,
    "control": control,
    "fields": fields,
    "stream": stream,
    "media": media,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="append", choices=list(ROWS), help="default: all")
    parser.add_argument(
        "--peer-python", type=Path, help="a Python with TransferQueue 0.1.11 and ray"
    )
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where runs are made: its disk matters"
    )
    parser.add_argument(
        "--quick", action="store_true", help="little of everything, to see that it works"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (1 if options.quick else 5)
    if options.rounds < 1:
        parser.error(f"--rounds: found {options.rounds}, allowed 1 and more")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a target is missed."""
    options = parse(argv)
    about = {
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
    }
    lines: list[Line] = []
    loads: dict[str, float] = {}
    try:
        with peer_of(options.peer_python) as peer:
            setting = Setting(options.folder, peer, options.rounds, options.quick)
            print(head(), flush=True)
            for name in options.rows or ROWS:
                loads[name] = round(os.getloadavg()[0], 2)
                print(f"-- {name} (load {loads[name]:g})", flush=True)
                for line in ROWS[name](setting):
                    lines.append(line)
                    print(line.text(), flush=True)
    finally:
        # What was measured is told, whatever ends the rest.
        print("settings: " + ", ".join(f"{key}={value}" for key, value in about.items()))
        if options.json:
            figures = [
                Figure(line.what, line.ours, line.unit, line.target(), line.met(), line.rounds)
                for line in lines
            ]
            records = [line.record() for line in lines]
            print_result(figures, about | {"loads": loads}, lines=records)
    return int(not options.quick and any(line.met() is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
