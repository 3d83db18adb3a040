"""A published plan of where experts shall lie, and what a rank has to fetch for it. Pure.

EPLB actor -- ExpertPlan(epoch 8) --> every rank of the instance: moves_of(present, wanted, our rank), layer by layer
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ..transfer.errors import MessageError, PlacementError
from .placement import EMPTY, ExpertPlacement

UNKNOWN = -1
"""In place of a checksum: nobody has told it yet."""
_MAX_EPOCH = 2**48
_DIGEST_BYTES = 6  # exact in a float64
_MAX_BYTES = 1 << 28


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    epoch: Annotated[int, Meta(ge=1, le=_MAX_EPOCH)]
    placement: Annotated[bytes, Meta(max_length=_MAX_BYTES)]
    checksums: Annotated[bytes, Meta(max_length=_MAX_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPlan:
    """``placement`` is to come into force under the number ``epoch`` >= 1.

    ``checksums`` int64 [layers, experts]: the sum of every expert's bytes, or -1 for one that need not travel.
    Raises PlacementError where shapes or numbers do not fit each other.
    """

    epoch: int
    placement: ExpertPlacement
    checksums: NDArray[np.int64]

    def __post_init__(self) -> None:
        if not 1 <= self.epoch <= _MAX_EPOCH:
            raise PlacementError(f"epoch = {self.epoch} is not allowed: from 1 to {_MAX_EPOCH}")
        wanted = self.placement.layers, self.placement.num_experts
        if self.checksums.shape != wanted:
            raise PlacementError(
                f"checksums of shape {list(self.checksums.shape)}: {list(wanted)}, one a layer and expert, are needed"
            )

    def digest(self) -> int:
        """48 bits that differ between different plans."""
        return int.from_bytes(blake2b(self.to_bytes(), digest_size=_DIGEST_BYTES).digest(), "big")

    def to_bytes(self) -> bytes:
        """For the wire."""
        sums = self.checksums.astype("<i8").tobytes()
        return msgspec.msgpack.encode(_Wire(self.epoch, self.placement.to_bytes(), sums))

    @classmethod
    def from_bytes(cls, data: bytes) -> "ExpertPlan":
        """What ``to_bytes`` wrote. Raises MessageError for other bytes, PlacementError for a plan that is wrong."""
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except msgspec.MsgspecError as error:
            raise MessageError(f"not a plan for experts: {error}") from error
        placement = ExpertPlacement.from_bytes(wire.placement)
        shape = placement.layers, placement.num_experts
        if len(wire.checksums) != 8 * shape[0] * shape[1]:
            raise MessageError(
                f"a plan for {list(shape)} has {len(wire.checksums)} bytes of checksums"
            )
        sums = np.frombuffer(wire.checksums, "<i8").astype(np.int64).reshape(shape)
        return cls(epoch=wire.epoch, placement=placement, checksums=sums)


@dataclass(frozen=True, slots=True)
class Move:
    """Slot ``slot`` of ours is to hold ``expert``, whose weights lie in ``source_slot`` of rank ``source_rank``."""

    slot: int
    expert: int
    source_rank: int
    source_slot: int


@dataclass(frozen=True, slots=True)
class LayerMoves:
    """Layer ``layer`` changes to ``slots`` int32 [ranks, S]; ``moves`` are what our rank reads from others for it."""

    layer: int
    slots: NDArray[np.int32]
    moves: tuple[Move, ...]


def moves_of(
    present: NDArray[np.int32], wanted: NDArray[np.int32], rank: int
) -> tuple[LayerMoves, ...]:
    """Layers in which ``wanted`` [layers, ranks, S] differs from ``present``, in order: alike on every rank.

    The readers of an expert share its holders evenly, by a rule that every rank computes: the n-th reader, in rank
    order, takes holder (n + expert) modulo their number.
    """
    changed = np.flatnonzero((present != wanted).any(axis=(1, 2)))
    return tuple(
        LayerMoves(int(layer), wanted[layer], _moves(present[layer], wanted[layer], rank))
        for layer in changed
    )


def _moves(present: NDArray[np.int32], wanted: NDArray[np.int32], rank: int) -> tuple[Move, ...]:
    held = set(present[rank].tolist())
    moves: list[Move] = []
    for slot, expert in enumerate(wanted[rank].tolist()):
        if expert == EMPTY or expert in held:
            continue
        had = present == expert
        holders = np.argwhere(had)
        gains = (wanted == expert).any(axis=1) & ~had.any(axis=1)
        number = int(gains[:rank].sum())
        source_rank, source_slot = holders[(number + expert) % len(holders)].tolist()
        moves.append(Move(slot, expert, source_rank, source_slot))
    return tuple(moves)
