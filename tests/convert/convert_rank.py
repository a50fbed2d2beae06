"""One rank of the test of layouts: `python -m tests.convert.convert_rank FILE WORLD RANK FOLDER`.

Under each split, loads <FOLDER>/<model>-megatron, compares its logits with the expected ones, and
saves it again as <FOLDER>/<model>-<split>.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file

from relax_hpc.config.schema import ModelConfig, ParallelConfig
from relax_hpc.convert.verify import load_module
from relax_hpc.examples.model_family import BiasedDecoder
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.training import parallel
from relax_hpc.training.checkpoint.strategy import StateWriter
from relax_hpc.training.models.batches import collate
from relax_hpc.training.models.families import FAMILIES, spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.qwen3 import Qwen3
from relax_hpc.training.models.spec import ModelSpec

SPLITS = {
    "tensor": ParallelConfig(tensor=2, sequence_parallel=True),
    "pipeline": ParallelConfig(pipeline=2),
    "expert": ParallelConfig(data=2, expert=2),
    "expert-tensor": ParallelConfig(tensor=2, sequence_parallel=True, expert=2),
}
CASES = [
    ("dense", "tensor"),
    ("biased", "tensor"),
    ("tied", "tensor"),
    ("tied", "pipeline"),
    ("mixed", "pipeline"),
    ("mixed", "expert"),
    ("mixed", "expert-tensor"),
    ("mixed", "tensor"),
]


def main() -> None:
    file, world, rank, folder = sys.argv[1:]
    torch.set_num_threads(1)
    FAMILIES["qwen2"] = BiasedDecoder
    store = dist.FileStore(file, int(world))
    parallel.initialize(
        ParallelConfig(data=2), int(rank), int(world), int(rank), store, "cpu", 0, 60.0
    )
    for name, split in CASES:
        check(Path(folder), name, split)
    parallel.destroy()


def check(folder: Path, name: str, split: str) -> None:
    """One model under one split."""
    from relax_hpc.training.models.megatron import transformer_config

    layout = SPLITS[split]
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    spec = spec_from_config(read_config(folder / name))
    config = transformer_config(spec, ModelConfig(), layout)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    module = spec.build(config, "cpu", first, last).eval()
    load_module(module, folder / f"{name}-megatron")
    expected = load_file(folder / f"{name}.logits")
    logits = forward(module, spec, expected["tokens"], first, last)
    if last:
        columns = expected["logits"].shape[-1]
        torch.testing.assert_close(
            whole(logits, layout.tensor)[..., :columns], expected["logits"], atol=1e-4, rtol=0
        )
    channel, target = RankChannel(60.0), folder / f"{name}-{split}"
    if channel.rank == 0:
        target.mkdir()
    channel.gather(None)
    writer = StateWriter(channel, parallel.layout().data_size, False)
    state = writer.stage({"model": module.sharded_state_dict(prefix="")})
    if channel.rank == 0:
        state.write_common(target)
    state.write_shards(target)


@torch.no_grad()
def forward(
    module: torch.nn.Module, spec: ModelSpec, tokens: torch.Tensor, first: bool, last: bool
) -> torch.Tensor:
    """[1, s, columns of this rank], or the hidden states of a stage that is not the last."""
    packed = collate([{"token_ids": tokens[0].tolist()}], 0, "cpu")
    if not first:
        hidden = torch.empty(tokens.shape[1], 1, module.config.hidden_size)
        torch.distributed.recv(hidden, 0)
        module.set_input_tensor(hidden)
    out = module(**spec.inputs(packed))
    if not last:
        torch.distributed.send(out, 1)
        return out
    return module.logits(out)


def whole(logits: torch.Tensor, tensor: int) -> torch.Tensor:
    """Gather all columns, [tokens, vocabulary], from the tensor ranks."""
    columns = [torch.empty_like(logits) for _ in range(tensor)]
    torch.distributed.all_gather(
        columns, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
    )
    return torch.cat(columns, dim=-1)


if __name__ == "__main__":
    # An odd vocabulary is padded with a tensor split, and not padded with other splits.
    sizes = dict.fromkeys(("hidden", "inner", "layers", "heads", "groups", "head_dim"), 1)
    assert Qwen3(**sizes, vocab=61, tied=False).padded_vocab(2) == 62
    main()
