"""The audio tower of Qwen3-Omni (AuT): three convolutions, then attention within windows. arXiv
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

_SIZES = {
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
"""Keys of `audio_config` -> fields."""
_FRAMES = 100 / 13
"""Mel frames of a token."""
_KIND = "qwen3_omni_moe_audio_encoder"


@dataclass(frozen=True, kw_only=True)
class AudioTower(Tower):
    """Audio tower, as one `audio_config` describes it."""

    name = "audio"
    kinds = (Kind.AUDIO,)
    built_by = "qwen3_omni_moe", "Qwen3OmniMoeAudioEncoder"

    bins: int
    """Mel bins of a frame."""
    heads: int
    inner: int
    """Width of a feed-forward layer."""
    width: int
    channels: int
    """Channels of the convolutions."""
    half: int
    """Half of the frames of a chunk, which convolutions do not look beyond."""
    window: int
    """Frames of a window, which attention does not look beyond."""
    chunks: int
    """Chunks that go through the convolutions together."""
    learned: int
    """Most positions of a chunk."""

    @classmethod
    def section(cls) -> Section:
        """Rules for `audio_config`."""
        rules = {
            **ANYWHERE,
            **dict.fromkeys(_SIZES, SIZE),
            "encoder_layers": LAYERS,
            **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), one_of(0, 0.0)),
            "model_type": one_of(_KIND),
            "activation_function": one_of("gelu"),
            # A scale that transformers reads, and multiplies nothing by.
            "scale_embedding": FLAG,
            "num_hidden_layers": LAYERS,
            "initializer_range": NUMBER,
        }
        return Section(rules, tuple(_SIZES), _contradictions)

    @classmethod
    def from_config(cls, known: Mapping[str, Any], place: str) -> Self:
        """Build from the content of `audio_config`."""
        return cls(place=place, **{name: known[key] for key, name in _SIZES.items()})

    @property
    def sizes(self) -> TowerSizes:
        """See `Tower.sizes`."""
        # As of the vision tower, without rotated queries and keys.
        block, height, convolved = (
            9 * self.width + 2 * self.inner,
            float(self.bins),
            float(self.bins),
        )
        for number in (1, 2, 3):
            # Before and after the activation, of half as many frames each time.
            height = (height + 1) // 2
            convolved += 2 * self.channels * height / 2**number
        ends = convolved * _FRAMES + self.channels * height + 4 * self.width
        return TowerSizes(1, self.width, block, ends)

    def multiply_adds(self, grid: Grid) -> int:
        """See `Tower.multiply_adds`. A convolution stays within a chunk, attention within a
        window."""
        chunks, rest = divmod(grid[2], 2 * self.half)
        windows, last = divmod(grid[2], self.window)
        pairs = windows * sound_tokens(self.window) ** 2 + sound_tokens(last) ** 2
        tokens = sound_tokens(grid[2])
        convolved = chunks * self._convolved(2 * self.half) + self._convolved(rest)
        rows = -(-self.bins // 8)
        token = self.channels * rows * self.width + self.width**2 + self.width * self.out
        layers = self.depth * (
            tokens * (4 * self.width**2 + 2 * self.width * self.inner) + 2 * pairs * self.width
        )
        return convolved + tokens * token + layers

    def _convolved(self, frames: int) -> int:
        """Multiplications of the convolutions of a chunk, each of 3 x 3 with stride 2."""
        rows, given, found = self.bins, 1, 0
        for _ in range(3):
            rows, frames = (rows + 1) // 2, (frames + 1) // 2
            found += rows * frames * 9 * given * self.channels
            given = self.channels
        return found

    def shapes(self) -> Shapes:
        """See `Tower.shapes`."""
        rows, given = self.bins, 1
        for number in (1, 2, 3):
            yield f"conv2d{number}.weight", (self.channels, given, 3, 3)
            yield f"conv2d{number}.bias", (self.channels,)
            rows, given = (rows + 1) // 2, self.channels
        yield "conv_out.weight", (self.width, self.channels * rows)
        for layer in range(self.depth):
            yield from self._layer(f"layers.{layer}.")
        yield from layer_norm("ln_post", self.width)
        yield from linear("proj1", self.width, self.width)
        yield from linear("proj2", self.out, self.width)

    def _layer(self, place: str) -> Shapes:
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{place}self_attn.{name}", self.width, self.width)
        yield from layer_norm(f"{place}self_attn_layer_norm", self.width)
        yield from linear(f"{place}fc1", self.inner, self.width)
        yield from linear(f"{place}fc2", self.width, self.inner)
        yield from layer_norm(f"{place}final_layer_norm", self.width)

    def config(self) -> dict[str, Any]:
        """See `Tower.config`."""
        return {key: getattr(self, name) for key, name in _SIZES.items()}

    def encode(self, module: torch.nn.Module, media: TowerMedia) -> Tensor:
        """See `Tower.encode`."""
        import torch

        lengths = media.grids[:, 2]
        sounds = media.values.to(next(module.parameters()).dtype).split(lengths.tolist())

        def encode(some: list[int]) -> Tensor:
            frames = torch.cat([sounds[number] for number in some])
            return module(**self._placed(frames, lengths[some])).last_hidden_state

        return encoded(lengths.tolist(), 2 * self.half, encode)[None]

    def _placed(self, frames: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Chunks of sounds, and tensors that follow from their lengths, which are on the host,
        alone. Worked out there: transformers' way would wait for a GPU in every layer."""
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as theirs

        from relax_hpc.training.models.upload import upload

        padded, chunks = theirs.chunk_and_pad_features(frames.t(), lengths, self.half)
        return {
            "padded_feature": padded,
            "chunk_lengths": chunks,
            "valid_indices": upload(theirs.get_valid_indices(chunks).numpy(), frames.device),
            # Of which the host alone makes use.
            "cu_seqlens": theirs.get_audio_cu_seqlens(chunks, lengths, self.window, self.half),
        }


def encoded(lengths: Sequence[int], chunk: int, encode: Callable[[list[int]], Tensor]) -> Tensor:
    """Embeddings [tokens, width] of sounds of these ``lengths`` in mel frames, in their order.

    ``encode``: gives those of some sounds, by their numbers. Sounds go together whose longest
    chunks, of ``chunk`` frames at most, are as long: shorter ones are padded, and their last tokens
    would depend on their neighbours.
    """
    import torch

    found: dict[int, Tensor] = {}
    for width in {min(length, chunk) for length in lengths}:
        some = [number for number, length in enumerate(lengths) if min(length, chunk) == width]
        parts = encode(some).split([sound_tokens(lengths[number]) for number in some])
        found |= dict(zip(some, parts, strict=True))
    return torch.cat([found[number] for number in range(len(lengths))])


def _contradictions(known: Mapping[str, Any]) -> Iterator[str]:
    layers, again = known.get("encoder_layers"), known.get("num_hidden_layers")
    if again is not None and again != layers:
        yield f"num_hidden_layers is {again} beside encoder_layers {layers}, supported is the same"
    half, window = known.get("n_window"), known.get("n_window_infer")
    if SIZE.fits(half) and SIZE.fits(window) and window % (2 * half):
        yield f"n_window_infer is {window}, supported is a multiple of twice n_window, {half}"
