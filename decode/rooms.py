"""Memory of one decode rank by the request: blocks that grow in number with its tokens, and a slot.

Where the network is cut between the pools a newcomer also has a tail, until its rows have run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..model.cache import Cache, IdPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Reserved memory: blocks in token order, a slot, and a tail or None."""

    blocks: tuple[int, ...]
    slot: int
    tail: int | None = None


class Rooms:
    """Gives rooms out and takes them back, whole; every block and slot is free or in exactly one room."""

    def __init__(self, cache: Cache) -> None:
        self._blocks = IdPool(cache.blocks.shape[0], "decode block")
        self._slots = IdPool(cache.slots.shape[0], "decode slot")
        self._tails = IdPool(cache.tails.shape[0], "decode tail", reserved=0)

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

    @property
    def free_arrivals(self) -> int:
        """How many arrivals there are slots for, and tails where they need one."""
        return min(self.free_slots, self._tails.free) if self._tails.capacity else self.free_slots

    def try_take(self, num_blocks: int, *, with_tail: bool = False) -> Room | None:
        """A room of ``num_blocks`` blocks, or None (and no change) when there is too little memory.

        ``with_tail`` also takes a tail, on a rank that has tails.
        """
        with_tail = with_tail and self._tails.capacity > 0
        if not self._slots.free or (with_tail and not self._tails.free):
            return None
        blocks = self._blocks.try_take(num_blocks)
        if blocks is None:
            return None
        slots = self._slots.try_take(1)
        tails = self._tails.try_take(1) if with_tail else None
        assert slots is not None
        return Room(blocks=tuple(blocks), slot=slots[0], tail=tails[0] if tails else None)

    def grow(self, room: Room, num_blocks: int) -> Room | None:
        """``room`` with ``num_blocks`` more blocks behind its own, or None (and no change) when too few are free.

        The old value is spent: the larger room owns its blocks and its slot.
        """
        blocks = self._blocks.try_take(num_blocks)
        return None if blocks is None else replace(room, blocks=(*room.blocks, *blocks))

    def give_tail(self, room: Room) -> Room:
        """``room`` without its tail, if it has one; the old value is spent."""
        if room.tail is not None:
            self._tails.give([room.tail])
        return replace(room, tail=None)

    def give(self, room: Room) -> None:
        """Take a room back. Raises IntegrityError for one that is back already."""
        self._blocks.give(room.blocks)
        self._slots.give([room.slot])
        self.give_tail(room)

    def check_integrity(self, rooms: Sequence[Room]) -> None:
        """Raise IntegrityError unless ``rooms`` are exactly what is given out."""
        self._blocks.check_owned([block for room in rooms for block in room.blocks])
        self._slots.check_owned([room.slot for room in rooms])
        self._tails.check_owned([room.tail for room in rooms if room.tail is not None])
