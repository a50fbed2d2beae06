"""`relax-hpc status RUN`: what a run is doing, from the hub if it answers and from the run directory in any case."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from relax_hpc.config import Config, load_resolved
from relax_hpc.errors import ConfigError, RelaxError
from relax_hpc.rendezvous.roster import latest_card, latest_epoch
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.transfer_queue.records import OBSERVER_EPOCH


def status(run: RunDir, patience_s: float = 3.0) -> dict[str, Any]:
    """Groups with their epochs and last beats, and the queue's counters; `hub`: it answered within ``patience_s``."""
    if not run.config.exists():
        raise ConfigError(f"{run.root}: no run here (config.yaml is missing); name a run directory")
    config = load_resolved(run.root)
    finished = run.finished.exists()
    found = {} if finished else _ask_hub(run, config, patience_s)
    groups = {name: _group(run, name, found.get("beats", {})) for name in config.groups}
    return {"run_dir": str(run.root), "finished": finished, "hub": False, "groups": groups} | found


def _group(run: RunDir, name: str, beats: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Epoch, ranks and seconds since the last sign of a group: by the hub, else by the files that roles leave."""
    card = latest_card(run, name)
    ages = [beat["age_s"] for beat in beats.values() if beat["group"] == name]
    if not ages:
        now, files = time.time(), run.rendezvous(name).glob("beat-*.json")
        ages = [now - json.loads(path.read_text())["time"] for path in files]
    ranks = len(card.ranks) if card else 0
    return {"epoch": latest_epoch(run, name), "ranks": ranks, "last_beat_s": min(ages, default=None)}


def _ask_hub(run: RunDir, config: Config, patience_s: float) -> dict[str, Any]:
    with QueueClient(run, config, "observer", OBSERVER_EPOCH) as client:
        try:
            return {"hub": True, **client.call("status", timeout=patience_s)}
        except RelaxError:
            return {}


def main(run: str, as_json: bool) -> int:
    """Print the status of a run directory."""
    found = status(RunDir(Path(run)))
    if as_json:
        print(json.dumps(found))
        return 0
    state = "finished" if found["finished"] else "running" if found["hub"] else "not running (the hub does not answer)"
    print(f"{found['run_dir']}: {state}")
    if found["hub"]:
        depth = found["depth"]
        print(f"step {found['trained_steps']}/{found['steps']}  newest weights {found['newest']}")
        print(f"queue: {depth['generating']} prompt groups in generation, {depth['ready']} waiting for training")
        print("dropped: " + (", ".join(f"{k} {v}" for k, v in found["dropped"].items()) or "nothing"))
        print("waiting: " + (", ".join(sorted(set(found["waiting"]))) or "nobody"))
    print(f"{'GROUP':<12}{'EPOCH':>6}{'RANKS':>7}{'LAST BEAT':>11}")
    for name, group in found["groups"].items():
        age = "-" if group["last_beat_s"] is None else f"{group['last_beat_s']:.1f} s"
        print(f"{name:<12}{group['epoch']:>6}{group['ranks'] or '-':>7}{age:>11}")
    return 0
