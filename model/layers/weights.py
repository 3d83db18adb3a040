"""How a layer finds its tensors, and the settings that all layers share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.reference.storage import KvFormat
from ..checkpoint import Checkpoint
from ..config import ModelConfig
from .linear import Linear


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What every layer of a network knows. ``tiled`` makes products independent of a row's neighbours."""

    config: ModelConfig
    fmt: KvFormat
    tiled: bool


class Weights:
    """Tensors of a checkpoint below one name prefix, dequantised to float32."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, settings: LayerSettings) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._settings = settings

    def below(self, name: str) -> "Weights":
        """The same checkpoint, one name further down."""
        return Weights(self._checkpoint, f"{self._prefix}{name}.", self._settings)

    def tensor(self, name: str) -> Tensor:
        """Float32 values of one tensor."""
        return self._checkpoint.tensor(self._prefix + name)

    def stored(self, name: str) -> tuple[Tensor, Tensor]:
        """(values, scales) of a quantised tensor as stored."""
        return self._checkpoint.raw(self._prefix + name), self._checkpoint.scale(self._prefix + name)

    def linear(self, *names: str, quantized: bool) -> Linear:
        """One product for tensors that share their input, outputs in the order of ``names``."""
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names])
        activation: Callable[[Tensor], Tensor] | None = self._settings.fmt.activation if quantized else None
        return Linear(weight, activation, self._settings.tiled)
