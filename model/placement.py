"""Which expert lies in which slot of which rank, layer by layer: one map for loading, routing and statistics.

logical expert   0 .. E-1, as the router numbers them
slot             place for one expert's weights: rank r has slots 0 .. S-1 in every layer, R * S >= E
replica          a slot that holds an expert; an expert has at least one in every layer, at most one on a rank
"""

from dataclasses import dataclass
from itertools import cycle
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ..transfer.errors import ConfigError, MessageError, PlacementError

EMPTY = -1
"""In place of an expert: the slot holds nothing."""
_REMEDY = "offer a placement in which every expert has a slot of its own on at least one rank"
_MAX_BYTES = 1 << 28
_Size = Annotated[int, Meta(ge=1, le=1 << 20)]


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    num_experts: _Size
    layers: _Size
    ranks: _Size
    slots_per_rank: _Size
    slots: Annotated[bytes, Meta(max_length=_MAX_BYTES)]


def slots_per_rank(num_experts: int, ranks: int, redundant: int) -> int:
    """Slots of a rank for ``num_experts`` and ``redundant`` more, rounded up; no rank needs more than all experts."""
    return min(num_experts, max(1, -(-(num_experts + redundant) // ranks)))


def check_layer(slots: NDArray[np.int32], num_experts: int, layer: int) -> None:
    """Raise PlacementError unless ``slots`` [R, S] can serve ``layer``; names the layer, the rank and the expert."""
    _check(slots[None], num_experts, layer)


def _check(slots: NDArray[np.int32], num_experts: int, first: int) -> None:
    """``slots`` [L, R, S] of the layers from number ``first`` on."""
    wrong = np.argwhere((slots < EMPTY) | (slots >= num_experts))
    if len(wrong):
        layer, rank, slot = wrong[0]
        raise PlacementError(
            f"layer {first + layer}, rank {rank}, slot {slot}: expert {slots[layer, rank, slot]} is not one of"
            f" 0 to {num_experts - 1}, nor -1 for an empty slot: {_REMEDY}"
        )
    layers, ranks, _ = slots.shape
    held = np.zeros((layers, ranks, num_experts + 1), np.int32)
    place = np.arange(layers)[:, None, None], np.arange(ranks)[None, :, None], slots
    np.add.at(held, place, 1)
    held = held[:, :, :num_experts]
    twice = np.argwhere(held > 1)
    if len(twice):
        layer, rank, expert = twice[0]
        raise PlacementError(
            f"layer {first + layer}, rank {rank}: expert {expert} lies in {held[layer, rank, expert]} slots of one"
            f" rank: {_REMEDY}, and on no rank twice"
        )
    missing = np.argwhere(held.sum(axis=1) == 0)
    if len(missing):
        layer, expert = missing[0]
        raise PlacementError(
            f"layer {first + layer}: no rank of {ranks} holds expert {expert}: {_REMEDY}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPlacement:
    """``slots`` int32 [layers, ranks, S]: logical expert, or -1 for an empty slot. Raises PlacementError.

    The array is read-only; another placement is another object.
    """

    num_experts: int
    slots: NDArray[np.int32]

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.slots.ndim != 3 or 0 in self.slots.shape:
            raise PlacementError(
                f"slots of shape {list(self.slots.shape)} for {self.num_experts} experts: must be"
                " [layers, ranks, slots of a rank], none of them 0"
            )
        if self.slots.dtype.kind not in "iu":
            raise PlacementError(
                f"slots of type {self.slots.dtype}: must be integers, one expert a slot"
            )
        # Before the type narrows: a number that does not fit is named as it was given.
        _check(self.slots, self.num_experts, 0)
        own = np.array(self.slots, np.int32, order="C")
        own.setflags(write=False)
        object.__setattr__(self, "slots", own)

    @classmethod
    def initial(
        cls, *, layers: int, num_experts: int, ranks: int, slots_per_rank: int
    ) -> "ExpertPlacement":
        """Experts in order and as evenly as can be, then replicas of experts 0, 1, 2 .. on ranks that lack them.

        Raises ConfigError where ``ranks * slots_per_rank`` slots cannot hold ``num_experts``.
        """
        if ranks * slots_per_rank < num_experts:
            raise ConfigError(
                f"an instance of {ranks} ranks with {slots_per_rank} expert slots each cannot hold {num_experts}"
                f" experts: it needs {-(-num_experts // ranks)} slots a rank"
            )
        held: list[list[int]] = [[] for _ in range(ranks)]
        for expert in range(num_experts):
            held[expert * ranks // num_experts].append(expert)
        free = sum(min(slots_per_rank, num_experts) - len(own) for own in held)
        experts = cycle(range(num_experts))
        while free:
            expert = next(experts)
            lacking = [own for own in held if len(own) < slots_per_rank and expert not in own]
            if lacking:
                min(lacking, key=len).append(expert)
                free -= 1
        one = [own + [EMPTY] * (slots_per_rank - len(own)) for own in held]
        return cls(num_experts=num_experts, slots=np.array([one] * layers, np.int32))

    @property
    def layers(self) -> int:
        """L."""
        return self.slots.shape[0]

    @property
    def ranks(self) -> int:
        """R."""
        return self.slots.shape[1]

    @property
    def slots_per_rank(self) -> int:
        """S."""
        return self.slots.shape[2]

    @property
    def copies(self) -> NDArray[np.int64]:
        """Replicas of each expert: [layers, E]."""
        counts = np.zeros((self.layers, self.num_experts + 1), np.int64)
        np.add.at(counts, (np.arange(self.layers)[:, None], self.slots.reshape(self.layers, -1)), 1)
        return counts[:, : self.num_experts]

    def with_layer(self, layer: int, slots: NDArray[np.int32]) -> "ExpertPlacement":
        """This placement with ``slots`` [ranks, S] in ``layer``, the one that is checked. Raises PlacementError."""
        if not 0 <= layer < self.layers:
            raise PlacementError(f"layer {layer}: must be 0 to {self.layers - 1}")
        if slots.shape != self.slots.shape[1:]:
            raise PlacementError(
                f"layer {layer}: slots of shape {list(slots.shape)}: this instance has"
                f" {self.ranks} ranks of {self.slots_per_rank} slots"
            )
        check_layer(slots, self.num_experts, layer)
        changed = self.slots.copy()
        changed[layer] = slots
        return self._sound(changed)

    def _sound(self, slots: NDArray[np.int32]) -> "ExpertPlacement":
        """A placement of our experts in ``slots``, which are known to serve and which nobody else holds."""
        slots.setflags(write=False)
        placement = object.__new__(ExpertPlacement)
        object.__setattr__(placement, "num_experts", self.num_experts)
        object.__setattr__(placement, "slots", slots)
        return placement

    def to_bytes(self) -> bytes:
        """For the wire and the disk."""
        layers, ranks, per_rank = self.slots.shape
        data = self.slots.astype("<i4").tobytes()
        return msgspec.msgpack.encode(_Wire(self.num_experts, layers, ranks, per_rank, data))

    @classmethod
    def from_bytes(cls, data: bytes) -> "ExpertPlacement":
        """What ``to_bytes`` wrote. Raises MessageError for other bytes, PlacementError where experts are missing."""
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except msgspec.MsgspecError as error:
            raise MessageError(f"not an expert placement: {error}") from error
        shape = wire.layers, wire.ranks, wire.slots_per_rank
        if len(wire.slots) != 4 * shape[0] * shape[1] * shape[2]:
            raise MessageError(
                f"an expert placement of {list(shape)} has {len(wire.slots)} bytes of slots"
            )
        slots = np.frombuffer(wire.slots, "<i4").astype(np.int32).reshape(shape)
        return cls(num_experts=wire.num_experts, slots=slots)
