"""Running engines for the tests of their contract, and requests for them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from relax_hpc.base.versions import Version
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import (
    Draft,
    Engine,
    GenerateRequest,
    Generation,
    Sampling,
)
from tests.helpers.engine_helpers import make_config, make_model, make_slab
from tests.requirements import requires

PROMPTS = [(1, 3 + k, 9, 2 + k, 7) for k in range(4)]
TOLERANCE = {"sglang": 1e-3, "transformers": 1e-4}
"""By engine: the largest difference of a log-probability from the reference."""


@dataclass
class Served:
    """A running engine, its event loop, and the version that it serves. Version n has the weights of
    models[n % 2]."""

    engine: Engine
    runner: asyncio.Runner
    models: list[Path]
    logs: Path
    version: Version

    def generate(self, *requests: GenerateRequest) -> list[Generation]:
        return self.runner.run(generate_together(self.engine, requests))

    def update(self) -> Path:
        """Load the next version, and return the directory of its weights."""
        self.version = Version(self.version.incarnation, self.version.number + 1)
        self.runner.run(self.engine.update_weights(self.slab, self.version))
        return self.model

    @property
    def slab(self) -> Path:
        """Folder of the current version, as a node has it after a pull."""
        folder = self.logs.parent / "node" / str(self.version)
        return folder if folder.exists() else make_slab(self.model, self.version, folder.parent)

    @property
    def model(self) -> Path:
        return self.models[self.version.number % 2]


async def generate_together(
    engine: Engine, requests: Sequence[GenerateRequest]
) -> list[Generation]:
    return await asyncio.gather(*map(engine.generate, requests))


def make_request(
    prompt: tuple[int, ...],
    key: str = "p",
    sample: int = 0,
    budget: int = 8,
    draft: Draft | None = None,
    **changes: object,
) -> GenerateRequest:
    sampling = {"temperature": 1.0, "top_p": 1.0, "stop_token_ids": (), "seed": 5} | changes
    return GenerateRequest(prompt, key, sample, Sampling(**sampling), budget, draft=draft)


def make_requests(**sampling: object) -> list[GenerateRequest]:
    """Two samples of each prompt."""
    requests = list[GenerateRequest]()
    for number, prompt in enumerate(PROMPTS):
        requests += [make_request(prompt, f"p{number}", k, **sampling) for k in range(2)]
    return requests


@pytest.fixture(scope="module", name="models")
def models_fixture(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / f"model-{seed}", seed) for seed in range(2)]


def serve(kind: str, models: list[Path], folder: Path, **settings: object) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        engine = make_engine(
            make_config(kind, **settings), 0, models[0], Version(3, 0), folder / "logs"
        )
        runner.run(engine.start())
        try:
            yield Served(engine, runner, models, folder / "logs", Version(3, 0))
        finally:
            runner.run(engine.close())


@pytest.fixture(scope="module", name="sglang")
def sglang_fixture(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """An SGLang server that reports every fourth token. Its radix cache, which is off by default, is
    on, so that tests can see the reuse of keys and values."""
    folder = tmp_path_factory.mktemp("sglang")
    (folder / "chat.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    flags = {"disable_radix_cache": False, "enable_cache_report": True, "stream_interval": 4}
    yield from serve(
        "sglang", models, folder, flags=flags | {"chat_template": str(folder / "chat.jinja")}
    )


def stub_nccl(folder: Path) -> Path:
    """A libnccl.so.2 that does nothing. SGLang loads it on a CPU like the library of torch's CUDA
    build."""
    (package,) = find_spec("sglang").submodule_search_locations
    wrapper = Path(package) / "srt/distributed/device_communicators/pynccl_wrapper.py"
    names = sorted(set(re.findall(r'"(nccl[A-Z]\w+)"', wrapper.read_text())))
    assert "ncclCommInitRank" in names
    library = folder / "libnccl.so.2"
    source = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return library


@pytest.fixture(scope="module", name="sglang_of_two_ranks")
def sglang_of_two_ranks_fixture(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """An SGLang server of two ranks without radix cache. Each rank reads its slices from the same
    mapped file.

    The server finds a libnccl, as with the CUDA build of torch from package indexes.
    """
    requires("gcc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_NCCL_SO_PATH", str(stub_nccl(tmp_path_factory.mktemp("nccl"))))
        # On CPUs, SGLang 0.5.21 needs the cores of each rank unless each has a NUMA domain.
        cpus = sorted(os.sched_getaffinity(0))
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[-1]}")
        yield from serve(
            "sglang", models, tmp_path_factory.mktemp("sglang-two"), flags={"tp_size": 2}
        )


@pytest.fixture(scope="module", name="transformers")
def transformers_fixture(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    yield from serve("transformers", models, tmp_path_factory.mktemp("transformers"))


@pytest.fixture(params=["sglang", "transformers"], name="served")
def served_fixture(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(request.param)
