"""The policy: a megatron-core GPT that loads and exports Hugging Face weights, and computes
log-probabilities of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.base.fields import ROUTES
from relax_hpc.config.schema import Experts, Kernels, ModelConfig, ParallelConfig, TrainerConfig
from relax_hpc.training import parallel as ranks
from relax_hpc.training.gather_text import gather_texts
from relax_hpc.training.logprobs import (
    PLAIN,
    ChunkKernels,
    likeliest,
    scored_states,
    token_logprobs,
)
from relax_hpc.training.lost_ranks import with_lost_rank_errors
from relax_hpc.training.models.attention import CausalAttention
from relax_hpc.training.models.batches import Batch
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import (
    SafetensorFiles,
    load_untrained_tensors,
    write_directory,
)
from relax_hpc.training.models.hf_mapping import (
    all_pieces,
    check_names,
    cut_slice,
    select_experts,
    split_views,
    stage_entries,
    unique_pieces,
)
from relax_hpc.training.models.packs import PackSplit
from relax_hpc.training.models.pieces import FusedParameter, Piece
from relax_hpc.training.models.replay import Routes
from relax_hpc.training.models.stages import stage_layers
from relax_hpc.training.models.stored_pieces import as_published, split_into_pieces
from relax_hpc.training.models.towers.encoder_input import MediaPass
from relax_hpc.training.weights.ring import WeightSlice
from relax_hpc.training.weights.tensors import TensorInfo
from relax_hpc.training.weights.transfers import Transfers

PUBLISHED_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class PolicyModel:
    """This rank's part of a model.

    Call `relax_hpc.training.parallel.initialize` first. Load the weights before you create a
    `Trainer`, because the optimizer copies them. ConfigError: the model or its split is not
    supported.
    """

    def __init__(
        self,
        hf_config: dict[str, Any],
        model: ModelConfig,
        parallel: ParallelConfig,
        training: TrainerConfig | None = None,
        kernels: Kernels = "plain",
        experts: Experts = "auto",
    ) -> None:
        """``training``: settings of the trainer, which include its ``kernels`` and ``experts``.
        None: the model is not trained, or with default settings."""
        from megatron.core import parallel_state

        from relax_hpc.training import parity
        from relax_hpc.training.models import megatron, replay
        from relax_hpc.training.models.kernels import prepare, transformer_settings

        self.hf_config = hf_config
        self.spec = spec_from_config(hf_config, model.ignore_keys)
        megatron.check_split(self.spec, parallel)
        if training and self.spec.towers:
            # Checked here, because a critic may have another family than the policy.
            megatron.check_frozen(self.spec, model)
        self.layout = ranks.layout()
        self.device = torch.device(model.device)
        self.dtype = megatron.DTYPES[model.dtype]
        self.kernels: Kernels = training.kernels if training else kernels
        prepare(self.kernels, model.device)
        further = megatron.training_settings(training, bool(self.spec.experts)) if training else {}
        further |= megatron.expert_settings(
            training.experts if training else experts, self.spec, model, parallel
        )
        kernel_settings = transformer_settings(self.kernels, bool(self.spec.experts))
        self.config = megatron.transformer_config(
            self.spec, model, parallel, further | kernel_settings
        )
        self._chunk_kernels = _chunk_kernels(self.kernels)
        # Seconds of the comparison with plain layers.
        self.compared_s = 0.0
        if self.kernels != "plain":
            layer = parity.LayerSlice.from_spec(self.spec, model, parallel, further)
            self.compared_s = parity.check(layer, self.kernels, self._chunk_kernels)
        sequence = parallel.tensor if self.config.sequence_parallel else 1
        first, last = self.layout.first_stage, self.layout.last_stage
        # Split of packs over ranks, with the numbers of this rank; see `collate`.
        self.pack_split = PackSplit(
            sequence,
            parallel.context,
            self.layout.context_rank,
            self.layout.tensor_rank % sequence,
            embeds=first,
        )
        self.module = self._build(first, last)
        if first and self.spec.towers:
            self.module.towers.freeze(model.frozen_towers)
            self.module.towers.packs_frames = model.tower_attention == "packed"
        for module in self.module.modules():
            if isinstance(module, CausalAttention):
                module.computes_long_rows_alone = model.long_row_attention == "by_row"
        layers = stage_layers(self.spec.layers, parallel)[self.layout.pipeline_rank]
        entries = stage_entries(
            self.spec, layers, first, last, "te" if self.kernels == "te" else "local"
        )
        self._entries = self._mapped_entries(
            select_experts(entries, self.layout.local_experts(self.spec.experts))
        )
        self._replays = model.routing_replay == "on"
        # Whether rows have routes.
        self.routed = self.spec.route_shape is not None and model.routing_replay != "off"
        # Token fields that a forward pass takes from rows that have them.
        self.row_fields = (*self.spec.row_fields, *((ROUTES.name,) if self.routed else ()))
        if self.routed:
            replay.install(self.module, layers)
        self._parameters = dict(self.module.named_parameters())
        self._transfers = Transfers(self.device)
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._context_group = parallel_state.get_context_parallel_group()

    def _build(self, first: bool, last: bool) -> Any:
        """Build this rank's pipeline stage, with random weights."""
        return self.spec.build(self.config, str(self.device), first, last, self.kernels)

    def _mapped_entries(self, entries: list[FusedParameter]) -> list[FusedParameter]:
        """The ``entries`` that this model has. A subclass may have fewer."""
        return entries

    def load_hf(self, directory: Path) -> None:
        """Load the weights of a Hugging Face directory. A rank reads only its slices. Errors as in
        `load_tensors`."""
        with SafetensorFiles(directory) as files:
            self._load(files, files.shapes(), str(directory))

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors by Hugging Face name. ConfigError names the first one that is missing,
        unknown or of a wrong shape."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._load(tensors, shapes, "weights")

    @torch.no_grad()
    def _load(
        self, source: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], name: str
    ) -> None:
        # Packed tensors are split first, so that names and shapes are those of single pieces.
        source, shapes = split_into_pieces(self.spec, source, shapes)
        check_names(self.spec, shapes, name)
        self._transfers.copy(self._live_pairs(source))

    def _live_pairs(self, source: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of this rank's slice of a tensor in ``source`` and its view in the live
        parameters. A slice is read when its pair is yielded."""
        for entry in self._entries:
            for piece in entry.pieces:
                view = self._view(entry, piece)
                if not view.numel():
                    continue
                held = self._holding(entry)
                part = cut_slice(piece, source[piece.name], held.tensor_size, held.tensor_rank)
                yield part.reshape(view.shape), view
                padding = self._padding(entry, piece)
                if padding:
                    self._parameters[entry.name].detach()[-padding:].zero_()

    def tensors(self) -> dict[str, TensorInfo]:
        """Type and shape of every published tensor of the whole model, by Hugging Face name."""
        return {
            name: TensorInfo(PUBLISHED_TYPES[self.dtype], piece.shape)
            for name, piece in all_pieces(self.spec).items()
        }

    def slices(self) -> list[WeightSlice]:
        """Slices that this rank publishes. All ranks together publish each element once.

        Ranks with the same weights share the work. The views are views of the live parameters.
        """
        slices = []
        for number, (entry, piece) in enumerate(unique_pieces(self.spec, self._entries)):
            held = self._holding(entry)
            is_replicated = piece.axis is None
            if number % held.copies != held.copy_rank or (is_replicated and held.tensor_rank):
                continue
            start, stop = self._bounds(entry, piece)
            if start < stop:
                view = partial(self._view, entry, piece)
                slices.append(WeightSlice(piece.name, piece.axis or 0, start, stop, view))
        return slices

    def _holding(self, entry: FusedParameter) -> ranks.Holding:
        return self.layout.dense if entry.expert is None else self.layout.experts

    def _bounds(self, entry: FusedParameter, piece: Piece) -> tuple[int, int]:
        """Bounds (start, stop) of this rank's slice along the piece's axis, or along the first axis
        if the piece is not split."""
        if piece.axis is None:
            return 0, piece.shape[0]
        held = self._holding(entry)
        return piece.bounds(held.tensor_size, held.tensor_rank)[:2]

    def _padding(self, entry: FusedParameter, piece: Piece) -> int:
        """Rows of zeros at the end of a parameter, if the vocabulary is not a multiple of the
        ranks."""
        if piece.axis != 0 or entry.fuse != "none":
            return 0
        start, stop, length = piece.bounds(self.layout.tensor_size, self.layout.tensor_rank)
        return length - (stop - start)

    def _view(self, entry: FusedParameter, piece: Piece) -> Tensor:
        parameter, held = self._parameters[entry.name].detach(), self._holding(entry)
        views = split_views(entry, parameter, self.spec, held.tensor_size, held.tensor_rank)
        view = views[entry.pieces.index(piece)]
        if entry.fuse == "qkv":
            return view
        start, stop = self._bounds(entry, piece)
        # Without the padding of the vocabulary.
        return view.narrow(piece.axis or 0, 0, stop - start)

    @torch.no_grad()
    def export_hf(self) -> dict[str, Tensor] | None:
        """Whole CPU tensors by Hugging Face name, in the model's type, on global rank 0; None on
        every other rank.

        Collective over all ranks.
        """
        slices = self.slices()
        bounds = [(part.name, part.axis, part.start, part.stop) for part in slices]
        all_bounds = [json.loads(text) for text in gather_texts(json.dumps(bounds), self.device)]
        if dist.get_rank() != 0:
            for part in slices:
                dist.send(part.view().contiguous(), 0)
            return None
        tensors = {
            name: torch.empty(info.shape, dtype=self.dtype) for name, info in self.tensors().items()
        }
        # Rank 0 receives in the order in which each rank sends, one slice at a time.
        for rank, rank_bounds in enumerate(all_bounds):
            for number, (name, axis, start, stop) in enumerate(rank_bounds):
                target = tensors[name].narrow(axis, start, stop - start)
                values = slices[number].view() if rank == 0 else self._receive(target, rank)
                target.copy_(values.reshape(target.shape))
        return tensors

    def _receive(self, like: Tensor, rank: int) -> Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        dist.recv(tensor, rank)
        return tensor

    def save_hf(self, directory: Path, source: Path | None = None) -> None:
        """Write a Hugging Face directory with tokenizer and untrained tensors of `source`.

        The complete directory appears by rename. Collective. ConfigError if `directory` exists.
        """
        tensors = self.export_hf()
        if tensors is not None:
            published = as_published(self.spec, tensors)
            if source:
                published |= load_untrained_tensors(source, self.spec)
            write_directory(directory, self.hf_config, published, source)
        dist.barrier()

    def hidden(
        self, batch: Batch, module: torch.nn.Module | None = None, routed: bool = True
    ) -> Tensor:
        """Hidden states of this stage, [s, b, h]. In the last stage they are after the final norm.

        Under sequence parallelism, s is this rank's share. ``routed``: whether the experts of the
        engine compute the tokens, if `batch` has routes and the configuration replays them.
        """
        batch.routes = self._batch_routes(batch) if routed else None
        media = MediaPass(batch.media) if batch.media else None
        packed = replace(batch.packed, routes=batch.routes, media=media)
        return (module or self.module)(**self.spec.inputs(batch) | {"packed_seq_params": packed})

    def _batch_routes(self, batch: Batch) -> Routes | None:
        """Routes of the tokens that this rank's routers process."""
        packed = batch.inputs.get(ROUTES.name)
        if packed is None:
            return None
        return Routes(packed[0][self.router_tokens(batch)], self._replays)

    def router_tokens(self, batch: Batch) -> slice:
        """Tokens of `batch` that this rank's routers process: with sequence parallelism a share of
        this rank's tokens."""
        split = self.pack_split
        share = batch.tokens.shape[1] // split.sequence
        first = share * self.layout.tensor_rank if split.sequence > 1 else 0
        return slice(first, first + share)

    def token_logprobs(
        self,
        hidden: Tensor,
        batch: Batch,
        temperature: float,
        entropy: bool = False,
        also: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of `batch.scored`, and entropies if requested, from the last stage's
        hidden states: [b, s] float32, 0 elsewhere. See `logprobs`.

        ``also``: ids [n, k] of alternative tokens. The log-probabilities are then those of the
        token and of its alternatives, [b, s, 1 + k].
        """
        scored, weight, shape = batch.scored, self.module.output_weight, batch.mask.shape
        states = scored_states(hidden, scored.states, self.config, self._tensor_group)
        targets = scored.tokens
        if also is not None:
            targets = torch.cat([targets[:, None], also], 1)
        values, entropies = token_logprobs(
            states,
            weight,
            targets,
            self.spec.vocab,
            temperature,
            self._tensor_group,
            entropy,
            self._chunk_kernels,
            self.spec.placeholders,
        )
        logprobs = self._sum_over_context(scored.scatter(values, shape))
        if entropies is None:
            return logprobs, None
        return logprobs, self._sum_over_context(scored.scatter(entropies, shape))

    @property
    def entropy_is_free(self) -> bool:
        """Whether entropies have no cost in addition to log-probabilities."""
        return self._chunk_kernels.entropy_is_free

    def likeliest(
        self, hidden: Tensor, batch: Batch, temperature: float, count: int, vocab: int
    ) -> Tensor:
        """Log-probabilities of `batch.scored` and of the ``count`` likeliest alternatives of each
        token, and the ids of these. Ids are below ``vocab``.

        Returns [b, s, 1 + 2 * count] float32, 0 elsewhere, without a gradient.
        """
        scored, group = batch.scored, self._tensor_group
        states = scored_states(hidden, scored.states, self.config, group)
        ids, logprobs = likeliest(
            states,
            self.module.output_weight,
            scored.tokens,
            self.spec.vocab,
            min(vocab, self.spec.vocab),
            count,
            temperature,
            group,
            self._chunk_kernels,
            self.spec.placeholders,
        )
        # float32 is exact for ids up to 2^24, which no vocabulary has.
        values = torch.cat([logprobs, ids.to(logprobs)], 1)
        return self._sum_over_context(scored.scatter(values, batch.mask.shape))

    def _sum_over_context(self, values: Tensor) -> Tensor:
        """Sum ``values`` [b, s, *tail] over context ranks, each of which has those of its tokens.

        All of them have the same loss then. Its gradient returns unchanged to each rank.
        """
        from megatron.core.tensor_parallel import mappings

        return mappings.reduce_from_tensor_model_parallel_region(values, group=self._context_group)

    def logprobs(
        self, batch: Batch, temperature: float, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each token of `batch.scored` given the preceding tokens, and entropies
        if requested: [b, s] float32, 0 elsewhere.

        Differentiable. Only without pipeline parallelism; `forward_logprobs` works with it.
        """
        return self.token_logprobs(self.hidden(batch), batch, temperature, entropy)

    def forward_logprobs(
        self, micro_batches: Sequence[Batch], temperature: float
    ) -> list[np.ndarray] | None:
        """Log-probabilities of each row's scored tokens, in order, [its length] float32, on the
        replica's leader; None on other ranks.

        Collective over the ranks of one data-parallel replica; replicas are independent.
        """
        return self.split_by_row(micro_batches, self.batch_logprobs(micro_batches, temperature))

    def split_by_row(
        self, micro_batches: Sequence[Batch], tables: Sequence[Tensor]
    ) -> list[np.ndarray] | None:
        """Values of each row from ``tables`` of micro-batches, [b, s, *tail] each, on the replica's
        leader; None on other ranks."""
        if not self.layout.leader:
            return None
        rows = []
        for table, batch in zip(tables, micro_batches, strict=True):
            # An idle batch has a line in the table, but no row.
            for line, length in zip(table.cpu().numpy(), batch.lengths, strict=False):
                rows.append(line[:length])
        return rows

    def forward_likeliest(
        self, micro_batches: Sequence[Batch], temperature: float, count: int, vocab: int
    ) -> list[np.ndarray] | None:
        """`likeliest` of each row, [its length, 1 + 2 * count]; as `forward_logprobs`."""

        def score(hidden: Tensor, batch: Batch) -> Tensor:
            return self.likeliest(hidden, batch, temperature, count, vocab)

        return self.split_by_row(micro_batches, self.batch_scores(micro_batches, score))

    @with_lost_rank_errors
    @torch.no_grad()
    def batch_logprobs(
        self, micro_batches: Sequence[Batch], temperature: float, routed: bool = True
    ) -> list[Tensor]:
        """Log-probabilities of each micro-batch [b, s] float32, on the ranks of the last stage;
        empty on other ranks. ``routed`` as in `hidden`.

        Collective as `forward_logprobs`.
        """

        def score(hidden: Tensor, batch: Batch) -> Tensor:
            return self.token_logprobs(hidden, batch, temperature)[0]

        return self.batch_scores(micro_batches, score, routed)

    @torch.no_grad()
    def batch_scores(
        self,
        micro_batches: Sequence[Batch],
        score: Callable[[Tensor, Batch], Tensor],
        routed: bool = True,
    ) -> list[Tensor]:
        """Scores of each micro-batch, [b, s, *tail], which ``score`` computes from the last stage's
        hidden states. Collective as `batch_logprobs`."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(batches: Iterator[Batch], module: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(batches)
            return self.hidden(batch, module, routed), partial(collect, batch)

        def collect(batch: Batch, hidden: Tensor, non_loss_data: bool) -> Tensor:
            return score(hidden, batch)

        if not micro_batches:
            return []
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=self.module,
            num_microbatches=len(micro_batches),
            # megatron-core 0.16.1 needs a shape here, but with `variable_seq_lengths` pipeline
            # stages exchange the real one.
            seq_length=micro_batches[0].tokens.shape[1],
            micro_batch_size=micro_batches[0].tokens.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )


def _chunk_kernels(kernels: Kernels) -> ChunkKernels:
    if kernels != "fused":
        return PLAIN
    from relax_hpc.training.triton_logprobs import TritonKernels

    return TritonKernels()
