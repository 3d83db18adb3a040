"""Memory of one decode rank by the request: blocks that grow in number with its tokens, and a slot."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..model.cache import Cache, IdPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Reserved memory: blocks in token order, and a slot."""

    blocks: tuple[int, ...]
    slot: int


class Rooms:
    """Gives rooms out and takes them back, whole; every block and slot is free or in exactly one room."""

    def __init__(self, cache: Cache) -> None:
        self._blocks = IdPool(cache.blocks.shape[0], "decode block")
        self._slots = IdPool(cache.slots.shape[0], "decode slot")

    @property
    def num_blocks(self) -> int:
        """Blocks of an idle rank."""
        return self._blocks.capacity

    @property
    def free_blocks(self) -> int:
        """Blocks in no room."""
        return self._blocks.free

    @property
    def free_slots(self) -> int:
        """Slots in no room."""
        return self._slots.free

    def try_take(self, num_blocks: int) -> Room | None:
        """A room of ``num_blocks`` blocks, or None (and no change) when there is too little memory."""
        if not self._slots.free:
            return None
        blocks = self._blocks.try_take(num_blocks)
        slot = self._slots.try_take(1) if blocks is not None else None
        if blocks is None or slot is None:
            return None
        return Room(blocks=tuple(blocks), slot=slot[0])

    def grow(self, room: Room, num_blocks: int) -> Room | None:
        """``room`` with ``num_blocks`` more blocks behind its own, or None (and no change) when too few are free.

        The old value is spent: the larger room owns its blocks and its slot.
        """
        blocks = self._blocks.try_take(num_blocks)
        return None if blocks is None else Room(blocks=(*room.blocks, *blocks), slot=room.slot)

    def give(self, room: Room) -> None:
        """Take a room back. Raises IntegrityError for one that is back already."""
        self._blocks.give(room.blocks)
        self._slots.give([room.slot])

    def check_integrity(self, rooms: Sequence[Room]) -> None:
        """Raise IntegrityError unless ``rooms`` are exactly what is given out."""
        self._blocks.check_owned([block for room in rooms for block in room.blocks])
        self._slots.check_owned([room.slot for room in rooms])
