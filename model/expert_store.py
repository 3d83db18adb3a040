"""Weights of this rank's routed experts: one arena, one row an expert, all its tensors side by side.

    row 0 .. S-1          layer 0, slots 0 .. S-1        a row: gate_up panels | down panels | filling
    row S .. 2S-1         layer 1
    ..
    row L*S .. L*S+S-1    staging: replicas that arrive for one layer, until that layer flips

A row is what moves between ranks, and what kernels read in place. An empty slot's bytes are whatever they were.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.moe import ExpertShape
from ..transfer.checksum import row_checksum
from ..transfer.errors import PlacementError

_ALIGN_BYTES = 64


class ExpertStore:
    """arena: uint8 [layers * S + S, expert_bytes] on the CPU; pages that nobody writes cost nothing."""

    def __init__(self, *, layers: int, slots_per_rank: int, shape: ExpertShape) -> None:
        self.layers = layers
        self.slots_per_rank = slots_per_rank
        self.shape = shape
        self.expert_bytes = -(-2 * shape.size // _ALIGN_BYTES) * _ALIGN_BYTES
        rows = (layers + 1) * slots_per_rank
        self.arena = torch.empty((rows, self.expert_bytes), dtype=torch.uint8)

    def row_of(self, layer: int, slot: int) -> int:
        """Row of ``slot`` in ``layer``."""
        return layer * self.slots_per_rank + slot

    def staging_row(self, index: int) -> int:
        """Row ``index`` of the staging area, 0 .. S - 1."""
        return self.row_of(self.layers, index)

    def copy(self, from_row: int, to_row: int) -> None:
        """Overwrite ``to_row``."""
        self.arena[to_row] = self.arena[from_row]

    def checksum(self, row: int) -> int:
        """Sum over all bytes of a row, 63 bits."""
        return row_checksum(self.arena, row)

    def panels(self, layer: int) -> NDArray[np.int16]:
        """The rows of ``layer`` as kernels read them: bfloat16 bits [S, expert_bytes / 2]; a view."""
        first = self.row_of(layer, 0)
        rows = self.arena[first : first + self.slots_per_rank]
        return rows.view(torch.int16).numpy()

    def load(self, layer: int, slot: int, gate_up: Tensor, down: Tensor) -> None:
        """Pack one expert, ``gate_up`` [2 I, H] and ``down`` [H, I], into its row.

        Raises ValueError unless bfloat16 holds every value.
        """
        packed = self.shape.pack(gate_up, down)
        if packed.dtype != torch.bfloat16:
            raise ValueError(f"layer {layer}, slot {slot}: bfloat16 does not hold every value")
        row = self.arena[self.row_of(layer, slot)].view(torch.bfloat16)
        row[: self.shape.size] = packed
        row[self.shape.size :] = 0

    def flip(
        self,
        layer: int,
        before: NDArray[np.int32],
        after: NDArray[np.int32],
        staged: Mapping[int, int],
    ) -> None:
        """Make the slots of ``layer``, which hold experts ``before`` [S], hold ``after`` [S].

        ``staged`` names the staging row of every slot whose expert came from another rank; an expert that was here
        already is copied. Raises PlacementError, with nothing changed, for an expert that is neither.
        """
        held = {int(expert): slot for slot, expert in enumerate(before) if expert >= 0}
        sources: dict[int, int] = {}
        for slot, expert in enumerate(after.tolist()):
            if expert < 0 or expert == before[slot]:
                continue
            if slot in staged:
                sources[slot] = self.staging_row(staged[slot])
            elif expert in held:
                sources[slot] = self.row_of(layer, held[expert])
            else:
                raise PlacementError(
                    f"layer {layer}, slot {slot}: expert {expert} is neither on this rank nor staged:"
                    " fetch its weights before the layer flips"
                )
        # All rows that are read and written are read first: experts of one rank may change places.
        written = {self.row_of(layer, slot) for slot in sources}
        kept = {row: self.arena[row].clone() for row in set(sources.values()) & written}
        for slot, row in sources.items():
            self.arena[self.row_of(layer, slot)] = kept.get(row, self.arena[row])
