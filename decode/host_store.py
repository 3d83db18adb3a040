"""Host memory for the caches of paused requests, within a budget.

    open (budget is charged) --> save (blocks and slot go out) --> load (into another room) --> drop (budget is free)

Opening and dropping belong to the rank's thread; ``Parcel.save`` and ``Parcel.load`` touch nothing but the parcel and
the cache, so they run where the steps run, between two of them. Whole blocks are copied: which of their bytes are
valid need not be known while a step is in flight.
"""

import torch
from torch import Tensor

from ..model.cache import Cache
from ..transfer.checksum import block_checksums, slot_checksum, verify
from ..transfer.errors import IntegrityError
from ..transfer.layout import CacheLayout
from .rooms import Room


class Parcel:
    """The blocks and the slot of one request, outside of the cache."""

    def __init__(self, request_id: str, num_blocks: int, layout: CacheLayout) -> None:
        self.request_id = request_id
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * layout.block_bytes + layout.slot_bytes
        self._layout = layout
        self._num_tokens = num_blocks * layout.block_tokens
        self._saved: tuple[Tensor, Tensor, list[int], int] | None = None

    def save(self, cache: Cache, room: Room) -> None:
        """Copy ``room`` out. Raises IntegrityError if it has another number of blocks than was opened for."""
        if len(room.blocks) != self.num_blocks:
            raise IntegrityError(
                f"parcel of {self.request_id!r} is for {self.num_blocks} blocks, its room has {len(room.blocks)}"
            )
        blocks = cache.blocks[list(room.blocks)]
        slot = cache.slots[room.slot : room.slot + 1].clone()
        sums = block_checksums(self._layout, blocks, range(self.num_blocks), self._num_tokens)
        self._saved = blocks, slot, sums, slot_checksum(self._layout, slot, 0)

    def load(self, cache: Cache, room: Room) -> None:
        """Copy into the first blocks of ``room``, which may have more. Can be done again.

        Raises CorruptBlockError if other bytes arrive than were saved, IntegrityError if nothing was saved or the room
        is too small.
        """
        if self._saved is None or len(room.blocks) < self.num_blocks:
            raise IntegrityError(
                f"parcel of {self.request_id!r}: {self.num_blocks} blocks, saved: {self._saved is not None}, cannot go "
                f"into {len(room.blocks)} blocks"
            )
        blocks, slot, block_sums, slot_sum = self._saved
        target = torch.tensor(room.blocks[: self.num_blocks], dtype=torch.int64)
        cache.blocks.index_copy_(0, target, blocks)
        cache.slots[room.slot] = slot[0]
        verify(
            self._layout,
            cache.blocks,
            room.blocks,
            cache.slots,
            room.slot,
            self._num_tokens,
            block_sums,
            slot_sum,
        )


class HostStore:
    """The parcels of one rank: never more than ``budget_bytes`` of them."""

    def __init__(self, layout: CacheLayout, budget_bytes: int) -> None:
        self._layout = layout
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._parcels: dict[str, Parcel] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that no parcel has."""
        return self.budget_bytes - self.used_bytes

    def open(self, request_id: str, num_blocks: int) -> Parcel:
        """Charge the budget for a room of ``num_blocks``. Raises IntegrityError beyond it, or for an id it knows."""
        parcel = Parcel(request_id, num_blocks, self._layout)
        if request_id in self._parcels or parcel.num_bytes > self.free_bytes:
            raise IntegrityError(
                f"no parcel of {parcel.num_bytes} bytes for {request_id!r}: {self.free_bytes} bytes are free, and it "
                f"{'has' if request_id in self._parcels else 'does not have'} one already"
            )
        self._parcels[request_id] = parcel
        self.used_bytes += parcel.num_bytes
        return parcel

    def drop(self, request_id: str) -> None:
        """Free what a request has here: after its ``load`` has run, or when it is cancelled. Unknown ids are fine."""
        parcel = self._parcels.pop(request_id, None)
        if parcel is not None:
            self.used_bytes -= parcel.num_bytes

    def check_integrity(self, request_ids: set[str]) -> None:
        """Raise IntegrityError unless exactly ``request_ids`` have parcels and the budget adds up."""
        held = sum(parcel.num_bytes for parcel in self._parcels.values())
        if self._parcels.keys() != request_ids or held != self.used_bytes:
            raise IntegrityError(
                f"host store: parcels of {sorted(self._parcels)} with {held} bytes, charged {self.used_bytes}; paused "
                f"with a parcel are {sorted(request_ids)}"
            )
        if self.used_bytes > self.budget_bytes:
            raise IntegrityError(
                f"host store: {self.used_bytes} bytes of {self.budget_bytes} are charged"
            )
