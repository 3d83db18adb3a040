"""Changing one layer's experts between two passes.

loop     told --> gather --> heed --> launch flips and pass         on every rank in the same turn
stream   ... sampling | flip, flip, pass ...                        so before the same pass
"""

import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .expert_plan import LayerMoves
from .expert_store import ExpertStore
from .placement import ExpertPlacement


class ExpertNetwork(Protocol):
    """What moving experts needs of a network."""

    @property
    def placement(self) -> ExpertPlacement: ...
    @property
    def expert_store(self) -> ExpertStore: ...
    @property
    def step(self) -> int: ...
    def set_layer_placement(
        self, layer: int, slots: NDArray[np.int32], staged: Mapping[int, int]
    ) -> None: ...


class Flip:
    """Puts one layer's new placement into force; to be launched between two passes.

    Once ``is_done``, ``step`` is the number of the pass after it, and ``seconds`` how long that pass waited for it.
    """

    def __init__(
        self, network: ExpertNetwork, change: LayerMoves, staged: Mapping[int, int]
    ) -> None:
        self._network = network
        self.change = change
        self.staged = staged
        self.is_done = False
        self.step = 0
        self.seconds = 0.0

    def __call__(self) -> None:
        """Raises whatever makes it fail; this rank must not run another pass then."""
        began = time.perf_counter()
        self._network.set_layer_placement(self.change.layer, self.change.slots, self.staged)
        self.step = self._network.step
        self.seconds = time.perf_counter() - began
        self.is_done = True
