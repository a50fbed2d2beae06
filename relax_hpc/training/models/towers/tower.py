"""A tower as a model has it: its sizes, the names of its parameters, and how it is built."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from relax_hpc.data.multimodal.medium import Grid, Kind
from relax_hpc.training.models.pieces import FusedParameter, Piece

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from relax_hpc.training.models.towers.encoder_input import TowerMedia

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names of parameters and their shapes."""


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Number of elements that a tower keeps for the backward pass, counted tensor by tensor in
    transformers 5.12.1."""

    rows: float
    """Rows of its layers that make one token."""
    width: int
    """Width of a row between layers."""
    block: int
    """Elements of a row that a layer keeps."""
    ends: float
    """Elements of a token that what is before and behind the layers keeps."""


@dataclass(frozen=True, kw_only=True)
class Tower(abc.ABC):
    """Tower of one kind. Every rank of the first pipeline stage has all of it."""

    name: ClassVar[str]
    """Name of its module, and of what it takes in `MediaInputs`."""
    kinds: ClassVar[tuple[Kind, ...]]
    """Kinds of media that it encodes."""
    built_by: ClassVar[tuple[str, str]]
    """Model of transformers, and the name of the class there that computes it."""
    place: str
    """Beginning of the names of its tensors in Hugging Face files."""
    out: int
    """Width of what it gives: the decoder's."""
    depth: int
    """Layers of attention."""

    @property
    def levels(self) -> int:
        """Layers of the decoder, from the first on, that get something of it beside the embeddings
        (DeepStack, arXiv 2406.04334)."""
        return 0

    @property
    @abc.abstractmethod
    def sizes(self) -> TowerSizes:
        """Sizes of what it keeps for the backward pass."""

    @abc.abstractmethod
    def multiply_adds(self, grid: Grid) -> int:
        """Multiplications and additions of one forward pass of a medium of that ``grid``: those of
        matrices, convolutions and both products of attention."""

    @abc.abstractmethod
    def shapes(self) -> Shapes:
        """Names and shapes of its parameters, as its module has them."""

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """Content of the mapping of config.json that describes it."""

    def build(self) -> torch.nn.Module:
        """Build its module, with random weights in float32."""
        from relax_hpc.base.transformers_hook import install_transformers_hook

        install_transformers_hook()
        model, name = self.built_by
        kind = getattr(
            importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name
        )
        return kind(kind.config_class(**self.config(), attn_implementation="sdpa"))

    @abc.abstractmethod
    def encode(self, module: torch.nn.Module, media: TowerMedia) -> Tensor:
        """Embeddings of ``media`` and what is added to each of the first layers' results, [1 +
        levels, n, out]."""

    def entries(self) -> Iterator[FusedParameter]:
        """Parameters of it, which no rank cuts."""
        for name, shape in self.shapes():
            yield FusedParameter(
                f"towers.{self.name}.{name}", (Piece(f"{self.place}{name}", shape),)
            )


def linear(name: str, rows: int, columns: int) -> Shapes:
    """Parameters of a linear layer with a bias."""
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def layer_norm(name: str, width: int) -> Shapes:
    """Parameters of a layer norm."""
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
