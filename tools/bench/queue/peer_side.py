"""The peer's side of the benchmark: TransferQueue with its SimpleStorage on Ray, in an environment
of its own.

It imports nothing of this project. Commands come as lines of JSON on standard input, and answers go
as such to what was standard output: what the libraries print goes to standard error. A writer and a
reader are two Ray actors.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time

os.environ |= {"TQ_LOGGING_LEVEL": "ERROR", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_raylet_start_wait_time_s": "120"}

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

STORE_BYTES = 200 << 20
UNITS = 2
CHUNK = 10_000
SMALL_TOKENS = 256
"""Tokens of the one sample of `latency`."""
CONFIG = {
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"num_data_storage_units": UNITS, "total_storage_size": None},
    }
}


def timed(call, *args, **named) -> tuple[float, object]:
    """Seconds of ``call``, and what it gives."""
    started = time.perf_counter()
    result = call(*args, **named)
    return time.perf_counter() - started, result


@ray.remote(num_cpus=0.01)
class Side:
    """A process with a client."""

    def begin(self, config: dict | None) -> None:
        logging.disable(logging.INFO)
        torch.set_num_threads(1)
        tq.init(OmegaConf.create(config) if config else None)
        self.client = tq.get_client()

    def load(self, lengths: list[int], fields: int, seed: int) -> int:
        """Rows of so many numbers in each of ``fields`` int32 fields; bytes of all of them."""
        random, columns = np.random.default_rng(seed), {}
        for field in range(fields):
            flat = torch.from_numpy(random.integers(0, 150_000, sum(lengths), dtype=np.int32))
            if len(set(lengths)) == 1:
                columns[f"f{field}"] = flat.view(len(lengths), -1)
            else:
                rows = list(torch.split(flat, lengths))
                columns[f"f{field}"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        self.rows = TensorDict(columns, batch_size=(len(lengths),))
        self.keys = [f"k{number}" for number in range(len(lengths))]
        return 4 * fields * sum(lengths)

    def sums(self) -> list[int]:
        return sums(self.rows)

    def put(self, part: str) -> float:
        return timed(tq.kv_batch_put, keys=self.keys, partition_id=part, fields=self.rows)[0]

    def get(self, part: str, count: int, check: bool) -> tuple[float, list[int]]:
        keys = [f"k{number}" for number in range(count)]
        seconds, rows = timed(tq.kv_batch_get, keys=keys, partition_id=part)
        return seconds, sums(rows) if check else []

    def clear(self, part: str, count: int) -> None:
        tq.kv_clear(keys=[f"k{number}" for number in range(count)], partition_id=part)

    def put_one(self, name: str) -> float:
        fields = {"x": torch.arange(SMALL_TOKENS, dtype=torch.int32)}
        return timed(tq.kv_put, key=name, partition_id="one", fields=fields, tag=None)[0]

    def get_one(self, name: str) -> float:
        return timed(tq.kv_batch_get, keys=[name], partition_id="one")[0]

    def fill(self, part: str, rows: int) -> None:
        for first in range(0, rows, CHUNK):
            count = min(CHUNK, rows - first)
            row = TensorDict({"x": torch.zeros(count, 8, dtype=torch.int32)}, batch_size=(count,))
            self.client.put(data=row, partition_id=part)

    def claim(self, part: str, count: int) -> float:
        about = {
            "data_fields": ["x"],
            "batch_size": count,
            "partition_id": part,
            "mode": "fetch",
            "task_name": "t",
        }
        return timed(self.client.get_meta, **about)[0]

    def clear_all(self, part: str) -> None:
        self.client.clear_partition(part)


def sums(rows: TensorDict) -> list[int]:
    """Of every field, in their order."""
    values = [rows[name] for name in sorted(rows.keys())]
    return [
        int((value.values() if value.is_nested else value).to(torch.int64).sum())
        for value in values
    ]


class Peer:
    """What this program is told to do, by the name of the method."""

    def __init__(self, folder: str) -> None:
        about = {"num_cpus": 16, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        about |= {"_node_ip_address": "127.0.0.1", "_temp_dir": folder, "log_to_driver": False}
        ray.init(address="local", logging_level=logging.ERROR, **about)
        self.writer, self.reader = Side.remote(), Side.remote()
        ray.get(self.writer.begin.remote(CONFIG))
        ray.get(self.reader.begin.remote(None))
        self.rounds = 0

    def load(self, lengths: list[int], fields: int) -> int:
        self.count = len(lengths)
        return ray.get(self.writer.load.remote(lengths, fields, 0))

    def move(self, check: bool = False) -> dict[str, float]:
        """A put and a get of what was loaded; with ``check`` what comes is compared with what
        went."""
        self.rounds += 1
        part = f"part{self.rounds}"
        put = ray.get(self.writer.put.remote(part))
        get, found = ray.get(self.reader.get.remote(part, self.count, check))
        if check and found != ray.get(self.writer.sums.remote()):
            raise RuntimeError("the peer gave other numbers than it was given")
        ray.get(self.writer.clear.remote(part, self.count))
        return {"put": put, "get": get}

    def latency(self, count: int) -> list[float]:
        """Seconds of a put and a get of one sample, one after the other."""
        seconds = []
        for _ in range(count):
            self.rounds += 1
            put = ray.get(self.writer.put_one.remote(f"s{self.rounds}"))
            seconds.append(put + ray.get(self.reader.get_one.remote(f"s{self.rounds}")))
        return seconds

    def claims(self, depth: int, rows: int, count: int) -> list[float]:
        """Seconds of each claim of ``rows`` rows in a partition of ``depth``."""
        self.rounds += 1
        part = f"deep{self.rounds}"
        ray.get(self.writer.fill.remote(part, depth))
        seconds = [ray.get(self.reader.claim.remote(part, rows)) for _ in range(count)]
        ray.get(self.writer.clear_all.remote(part))
        return seconds


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        peer = Peer(folder)
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            what, args = json.loads(line)
            print(json.dumps(getattr(peer, what)(*args)), file=answers, flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
