"""Process groups of a training or forward group: torch.distributed and megatron-core's parallel
state."""

from __future__ import annotations

import importlib
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.imports import fast_imports, hidden_package
from relax_hpc.config.schema import ParallelConfig
from relax_hpc.training.cpu import single_process

# References to the stores of the groups. torch keeps only the C++ part of a store, which fails
# after the Python part is collected.
_stores: list[dist.Store | None] = []


@dataclass(frozen=True, slots=True)
class Holding:
    """A rank's tensor-parallel part of some matrices, and its number among the ranks with the same
    part."""

    tensor_size: int
    tensor_rank: int
    copies: int
    copy_rank: int


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Numbers of this rank in the parallel layout. Every size is at least 1."""

    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    context_rank: int = 0
    context_size: int = 1
    expert_size: int = 1

    @property
    def dense(self) -> Holding:
        """Holding of all weights except the experts'. Context ranks of all data-parallel replicas
        have the same weights."""
        copies = self.data_size * self.context_size
        copy_rank = self.data_rank * self.context_size + self.context_rank
        return Holding(self.tensor_size, self.tensor_rank, copies, copy_rank)

    @property
    def experts(self) -> Holding:
        """Holding of this rank's experts: whole experts with expert parallelism, else a
        tensor-parallel part of all experts."""
        if self.expert_size == 1:
            return self.dense
        copies = self._stage_size // self.expert_size
        return Holding(1, 0, copies, self._stage_rank // self.expert_size)

    def local_experts(self, count: int) -> range:
        """This rank's experts of the ``count`` of a layer."""
        each = count // self.expert_size
        first = self._stage_rank % self.expert_size * each
        return range(first, first + each)

    @property
    def _stage_size(self) -> int:
        return self.data_size * self.context_size * self.tensor_size

    @property
    def _stage_rank(self) -> int:
        """Number of this rank in its stage, in megatron-core's order: neighbours share experts."""
        # Tensor ranks vary fastest, then context ranks, then data ranks.
        return self.dense.copy_rank * self.tensor_size + self.tensor_rank

    @property
    def first_stage(self) -> bool:
        """Whether it holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether it holds the output layer, and so computes log-probabilities."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def leader(self) -> bool:
        """Whether it is the rank of its data-parallel replica that receives results: the first
        tensor and context rank of the last stage."""
        return self.last_stage and self.tensor_rank == self.context_rank == 0


def initialize(
    parallel: ParallelConfig,
    rank: int,
    world: int,
    local_rank: int,
    store: dist.Store | None,
    device: str,
    seed: int,
    timeout_s: float,
) -> None:
    """Connect the group's `world` ranks over `store`, and create the process groups of `parallel`.

    A group of one rank needs no store and opens no socket. The timeout of ``store`` limits the time
    until all ranks have imported their libraries, ``timeout_s`` limits every collective after that.
    ConfigError if `parallel` does not describe `world` ranks.
    """
    if parallel.ranks != world:
        raise ConfigError(
            f"parallel: {parallel} = {parallel.ranks} ranks, found {world} processes; make them "
            "equal"
        )
    import_libraries(device, local_rank)
    timeout = timedelta(seconds=timeout_s)
    if world == 1:
        single_process.initialize(timeout)
    else:
        assert store is not None
        _stores.append(store)
        _await_imports(store, rank, world)
        # NCCL works only with GPUs, gloo is torch's backend for CPUs.
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    _create_groups(parallel, seed, timeout_s)


def _await_imports(store: dist.Store, rank: int, world: int) -> None:
    """Wait until all ranks have imported their libraries. On a cold filesystem one of them may take
    minutes longer than another, which must not count against the timeout of collectives."""
    store.set(f"imported/{rank}", "yes")
    store.wait([f"imported/{number}" for number in range(world)])


def import_libraries(device: str, local_rank: int | None, trains: bool = False) -> None:
    """Import the libraries with which a rank computes on ``device``, and those with which it
    ``trains``. It has no effect on libraries that are imported.

    ``local_rank``: number of the GPU to select; None: select none.
    """
    if device == "cuda" and local_rank is not None:
        # Before any import can allocate memory on another rank's GPU.
        torch.cuda.set_device(local_rank)
    # megatron-core 0.16.1 warns several times that Transformer Engine and Apex are absent.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    # megatron-core 0.16.1 imports Triton if it is installed. On a CPU that only costs 0.1 s of
    # every start.
    with fast_imports(), hidden_package("triton") if device == "cpu" else nullcontext():
        from relax_hpc.training.cpu import device_calls, upstream_fixes

        if device == "cpu":
            device_calls.install()
        upstream_fixes.install()
        importlib.import_module("relax_hpc.training.models.stage_model")
        if trains:
            importlib.import_module("relax_hpc.training.checkpoint.strategy")
            if device == "cuda":
                # torch 2.13 imports it when the first optimizer is created.
                importlib.import_module("torch._dynamo")


def initialize_alone(device: str, seed: int, timeout_s: float) -> None:
    """`initialize` for a group of one process."""
    initialize(ParallelConfig(), 0, 1, 0, None, device, seed, timeout_s)


def _create_groups(parallel: ParallelConfig, seed: int, timeout_s: float) -> None:
    from megatron.core import parallel_state, tensor_parallel

    single_process.use_one_backend()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        # megatron-core 0.16.1 declares whole minutes, and passes the number to `timedelta`.
        distributed_timeout_minutes=timeout_s / 60,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def layout() -> RankLayout:
    """This rank's layout. Call `initialize` first."""
    from megatron.core import parallel_state as state

    return RankLayout(
        tensor_rank=state.get_tensor_model_parallel_rank(),
        tensor_size=state.get_tensor_model_parallel_world_size(),
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        pipeline_size=state.get_pipeline_model_parallel_world_size(),
        data_rank=state.get_data_parallel_rank(),
        data_size=state.get_data_parallel_world_size(),
        context_rank=state.get_context_parallel_rank(),
        context_size=state.get_context_parallel_world_size(),
        expert_size=state.get_expert_model_parallel_world_size(),
    )


def destroy() -> None:
    """Destroy the process groups. It does nothing without a group."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _stores.clear()
