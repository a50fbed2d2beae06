"""Description of a tower: its sizes, the names of its parameters, and its construction."""

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
    """Number of elements that a tower stores for the backward pass, counted tensor by tensor in
    transformers 5.12.1."""

    rows: float
    """Rows of its layers that make one token."""
    width: int
    """Width of a row between layers."""
    block: int
    """Elements that a layer stores for each row."""
    ends: float
    """Elements that the modules before and after the layers store for each token."""


@dataclass(frozen=True, kw_only=True)
class Tower(abc.ABC):
    """Encoder of one or more kinds of media. Every rank of the first pipeline stage has all of
    it."""

    name: ClassVar[str]
    """Name of its module, and of its inputs in `MediaInputs`."""
    kinds: ClassVar[tuple[Kind, ...]]
    """Kinds of media that it encodes."""
    built_by: ClassVar[tuple[str, str]]
    """Model of transformers, and the name of the class there that computes it."""
    prefix: str
    """Beginning of the names of its tensors in Hugging Face files."""
    out: int
    """Width of its results: the decoder's hidden size."""
    depth: int
    """Layers of attention."""
    width: int
    heads: int

    @property
    def head_size(self) -> int:
        """Elements of an attention head."""
        return self.width // self.heads

    @property
    def levels(self) -> int:
        """Number of first decoder layers to whose results it adds values, besides the embeddings
        (DeepStack, arXiv 2406.04334)."""
        return 0

    @property
    @abc.abstractmethod
    def sizes(self) -> TowerSizes:
        """Sizes of the tensors that it stores for the backward pass."""

    @abc.abstractmethod
    def multiply_adds(self, grid: Grid) -> int:
        """Multiplications and additions of one forward pass of a medium of that ``grid``: those of
        matrices, convolutions and both products of attention."""

    @abc.abstractmethod
    def shapes(self) -> Shapes:
        """Names and shapes of the parameters of its module."""

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """Content of the mapping of config.json that describes it."""

    def build(self) -> torch.nn.Module:
        """Build its module, with random weights in float32."""
        from relax_hpc.base.transformers_hook import install_transformers_hook

        install_transformers_hook()
        model, name = self.built_by
        modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        module_class = getattr(modeling, name)
        config = module_class.config_class(**self.config(), attn_implementation="sdpa")
        return module_class(config)

    @abc.abstractmethod
    def encode(self, module: torch.nn.Module, media: TowerMedia) -> Tensor:
        """Embeddings of ``media``, and the values to add to the result of each of the first decoder
        layers: [1 + levels, n, out]."""

    def entries(self) -> Iterator[FusedParameter]:
        """Parameters of the tower, which tensor parallelism does not split."""
        for name, shape in self.shapes():
            piece = Piece(f"{self.prefix}{name}", shape)
            yield FusedParameter(f"towers.{self.name}.{name}", (piece,))


def linear(name: str, rows: int, columns: int) -> Shapes:
    """Parameters of a linear layer with a bias."""
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def layer_norm(name: str, width: int) -> Shapes:
    """Parameters of a layer norm."""
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
