"""How a layer finds its tensors, and the settings that all layers share."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.reference.storage import FLOAT32
from ...kernels.storage import KvFormat
from ..checkpoint import Checkpoint
from ..config import ModelConfig
from .linear import Linear


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What every layer of a network knows."""

    config: ModelConfig
    fmt: KvFormat


class Weights:
    """Tensors of a checkpoint below one name prefix, dequantised to float32."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, settings: LayerSettings) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._settings = settings

    @property
    def directory(self) -> Path:
        """The checkpoint's."""
        return self._checkpoint.directory

    def below(self, name: str) -> "Weights":
        """The same checkpoint, one name further down."""
        return Weights(self._checkpoint, f"{self._prefix}{name}.", self._settings)

    def tensor(self, name: str) -> Tensor:
        """Float32 values of one tensor."""
        return self._checkpoint.tensor(self._prefix + name)

    def stored(self, name: str) -> tuple[Tensor, Tensor]:
        """(values, scales) of a quantised tensor as stored."""
        return self._checkpoint.raw(self._prefix + name), self._checkpoint.scale(
            self._prefix + name
        )

    def linear(self, name: str, *, quantized: bool) -> Linear:
        """The product with ``name.weight``."""
        return self.linear_of(f"{name}.weight", quantized=quantized)

    def linear_of(self, *tensors: str, quantized: bool) -> Linear:
        """One product for tensors that share their input, outputs in the order of ``tensors``."""
        weight = torch.cat([self.tensor(name) for name in tensors])
        return Linear(weight, self._settings.fmt.activation_kind if quantized else FLOAT32)
