"""Audio tower of Qwen3-Omni (AuT): three convolutions, then attention within windows. arXiv
2509.17765."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from relax_hpc.data.multimodal.medium import Grid, Kind
from relax_hpc.data.multimodal.rules import sound_tokens
from relax_hpc.training.models.rules import ANYWHERE, FLAG, LAYERS, NUMBER, SIZE, Section, one_of
from relax_hpc.training.models.towers.tower import Shapes, Tower, TowerSizes, layer_norm, linear

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from relax_hpc.training.models.towers.encoder_input import TowerMedia

# Keys of `audio_config` -> fields of `AudioTower`.
_FIELDS = {
    "num_mel_bins": "bins",
    "encoder_layers": "depth",
    "encoder_attention_heads": "heads",
    "encoder_ffn_dim": "inner",
    "d_model": "width",
    "downsample_hidden_size": "channels",
    "output_dim": "out",
    "n_window": "half",
    "n_window_infer": "window",
    "conv_chunksize": "chunks",
    "max_source_positions": "learned",
}
# Mel frames per token.
_FRAMES = 100 / 13
_KIND = "qwen3_omni_moe_audio_encoder"


@dataclass(frozen=True, kw_only=True)
class AudioTower(Tower):
    """Audio tower that one `audio_config` describes."""

    name = "audio"
    kinds = (Kind.AUDIO,)
    built_by = "qwen3_omni_moe", "Qwen3OmniMoeAudioEncoder"

    bins: int
    """Mel bins of a frame."""
    inner: int
    """Width of a feed-forward layer."""
    channels: int
    """Channels of the convolutions."""
    half: int
    """Half of the frames of a chunk. Convolutions stay within a chunk."""
    window: int
    """Frames of a window. Attention stays within a window."""
    chunks: int
    """Chunks that go through the convolutions together."""
    learned: int
    """Largest number of positions of a chunk."""

    @classmethod
    def section(cls) -> Section:
        """Rules for `audio_config`."""
        rules = {
            **ANYWHERE,
            **dict.fromkeys(_FIELDS, SIZE),
            "encoder_layers": LAYERS,
            **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), one_of(0, 0.0)),
            "model_type": one_of(_KIND),
            "activation_function": one_of("gelu"),
            # transformers 5.12 reads this flag and does not use it.
            "scale_embedding": FLAG,
            "num_hidden_layers": LAYERS,
            "initializer_range": NUMBER,
        }
        return Section(rules, tuple(_FIELDS), _contradictions)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], prefix: str) -> Self:
        """Build from the content of `audio_config`. ``prefix``: see `Tower`."""
        return cls(prefix=prefix, **{name: config[key] for key, name in _FIELDS.items()})

    @property
    def sizes(self) -> TowerSizes:
        """See `Tower.sizes`."""
        # As in the vision tower, but queries and keys are not rotated.
        block = 9 * self.width + 2 * self.inner
        height = convolved = float(self.bins)
        for number in (1, 2, 3):
            # Before and after the activation. Each convolution halves the frames.
            height = (height + 1) // 2
            convolved += 2 * self.channels * height / 2**number
        ends = convolved * _FRAMES + self.channels * height + 4 * self.width
        return TowerSizes(1, self.width, block, ends)

    def multiply_adds(self, grid: Grid) -> int:
        """See `Tower.multiply_adds`. A convolution stays within a chunk, attention within a
        window."""
        chunks, last_chunk = divmod(grid[2], 2 * self.half)
        windows, last_window = divmod(grid[2], self.window)
        pairs = windows * sound_tokens(self.window) ** 2 + sound_tokens(last_window) ** 2
        tokens = sound_tokens(grid[2])
        convolved = chunks * self._convolution_adds(2 * self.half)
        convolved += self._convolution_adds(last_chunk)
        rows = -(-self.bins // 8)
        token = self.channels * rows * self.width + self.width**2 + self.width * self.out
        layers = self.depth * (
            tokens * (4 * self.width**2 + 2 * self.width * self.inner) + 2 * pairs * self.width
        )
        return convolved + tokens * token + layers

    def _convolution_adds(self, frames: int) -> int:
        """Multiplications of the convolutions of a chunk, each of 3 x 3 with stride 2."""
        rows, in_channels, total = self.bins, 1, 0
        for _ in range(3):
            rows, frames = (rows + 1) // 2, (frames + 1) // 2
            total += rows * frames * 9 * in_channels * self.channels
            in_channels = self.channels
        return total

    def shapes(self) -> Shapes:
        """See `Tower.shapes`."""
        rows, in_channels = self.bins, 1
        for number in (1, 2, 3):
            yield f"conv2d{number}.weight", (self.channels, in_channels, 3, 3)
            yield f"conv2d{number}.bias", (self.channels,)
            rows, in_channels = (rows + 1) // 2, self.channels
        yield "conv_out.weight", (self.width, self.channels * rows)
        for layer in range(self.depth):
            yield from self._layer(f"layers.{layer}.")
        yield from layer_norm("ln_post", self.width)
        yield from linear("proj1", self.width, self.width)
        yield from linear("proj2", self.out, self.width)

    def _layer(self, prefix: str) -> Shapes:
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{prefix}self_attn.{name}", self.width, self.width)
        yield from layer_norm(f"{prefix}self_attn_layer_norm", self.width)
        yield from linear(f"{prefix}fc1", self.inner, self.width)
        yield from linear(f"{prefix}fc2", self.width, self.inner)
        yield from layer_norm(f"{prefix}final_layer_norm", self.width)

    def config(self) -> dict[str, Any]:
        """See `Tower.config`."""
        return {key: getattr(self, name) for key, name in _FIELDS.items()}

    def encode(self, module: torch.nn.Module, media: TowerMedia) -> Tensor:
        """See `Tower.encode`."""
        import torch

        lengths = media.grids[:, 2]
        sounds = media.values.to(next(module.parameters()).dtype).split(lengths.tolist())

        def encode_group(numbers: list[int]) -> Tensor:
            frames = torch.cat([sounds[number] for number in numbers])
            return module(**self._module_inputs(frames, lengths[numbers])).last_hidden_state

        return encode_by_length(lengths.tolist(), 2 * self.half, encode_group)[None]

    def _module_inputs(self, frames: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Arguments of the module for sounds ``frames``. ``lengths`` are on the host.

        transformers 5.12 would compute the tensors that depend on lengths only in the forward pass,
        and synchronize with the GPU in every layer. So the host computes them here.
        """
        import torch
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

        from relax_hpc.training.models.upload import upload

        padded, chunks = modeling.chunk_and_pad_features(frames.t(), lengths, self.half)
        # Not transformers' get_valid_indices, whose arguments are others in 5.17.
        tokens = torch.tensor([sound_tokens(length) for length in chunks.tolist()])
        not_padding = torch.arange(int(tokens.max())) < tokens[:, None]
        valid = not_padding.flatten().nonzero().flatten()
        return {
            "padded_feature": padded,
            "chunk_lengths": chunks,
            "valid_indices": upload(valid.numpy(), frames.device),
            # Stays on the host, because only the host reads it.
            "cu_seqlens": modeling.get_audio_cu_seqlens(chunks, lengths, self.window, self.half),
        }


def encode_by_length(
    lengths: Sequence[int], chunk: int, encode: Callable[[list[int]], Tensor]
) -> Tensor:
    """Embeddings [tokens, width] of sounds of these ``lengths`` in mel frames, in their order.

    ``encode``: computes the embeddings of the sounds with the given numbers. Sounds are encoded
    together only if their longest chunks (at most ``chunk`` frames) have the same length. Otherwise
    the shorter ones would be padded, and their last tokens would depend on the other sounds.
    """
    import torch

    embeddings: dict[int, Tensor] = {}
    for width in {min(length, chunk) for length in lengths}:
        group = [number for number, length in enumerate(lengths) if min(length, chunk) == width]
        sizes = [sound_tokens(lengths[number]) for number in group]
        embeddings |= dict(zip(group, encode(group).split(sizes), strict=True))
    return torch.cat([embeddings[number] for number in range(len(lengths))])


def _contradictions(config: Mapping[str, Any]) -> Iterator[str]:
    layers, hidden_layers = config.get("encoder_layers"), config.get("num_hidden_layers")
    if hidden_layers is not None and hidden_layers != layers:
        yield (
            f"num_hidden_layers is {hidden_layers}, supported is the value of encoder_layers, "
            f"{layers}"
        )
    half, window = config.get("n_window"), config.get("n_window_infer")
    if not SIZE.fits(half) or not SIZE.fits(window):
        return
    assert half is not None and window is not None
    if window % (2 * half):
        yield f"n_window_infer is {window}, supported is a multiple of twice n_window, {half}"
