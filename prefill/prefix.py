"""Blocks of one prefill rank, and which prefixes they hold. Pure.

           take                      publish(key)
    free ------> owned by requests ------------> owned, and found by its key
     ^  ^            | give, last owner              | give, last owner
     |  `------------'                               v
     `---- evicted, when memory is wanted -------- cached: found by its key, owned by nobody

A key names everything that a block's content depends on (``keys``), so equal keys mean equal bytes. Several requests
may own one block. Cached blocks are evicted from the one that was longest unused, of one prompt the last block first:
a prefix without its head is of no use.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..transfer.errors import IntegrityError


@dataclass(slots=True)
class _Block:
    """``owners`` is a count; ``key`` None for a block that nobody can find."""

    owners: int = 0
    key: bytes | None = None


class PrefixPool:
    """Ids 1 .. ``count`` - 1; block 0 belongs to nobody."""

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._blocks = [_Block() for _ in range(count)]
        self._free = list(range(count - 1, 0, -1))
        self._by_key: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Owned by nobody, the next to be evicted first."""
        self.num_evicted = 0

    @property
    def capacity(self) -> int:
        """Ids that can be handed out."""
        return len(self._blocks) - 1

    @property
    def free(self) -> int:
        """Ids that ``try_take`` can give: those that nobody owns."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns and that a prompt may find."""
        return len(self._cached)

    def found(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the leading ``keys`` that are here, owned or cached; changes nothing."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody owns."""
        return sum(not self._blocks[block].owners for block in blocks)

    def shared(self, blocks: Iterable[int]) -> set[int]:
        """Those of ``blocks`` that several requests own."""
        return {block for block in blocks if self._blocks[block].owners > 1}

    def own(self, blocks: Iterable[int]) -> None:
        """One more owner for each, which were just ``found``."""
        for block in blocks:
            self._cached.pop(block, None)
            self._blocks[block].owners += 1

    def try_take(self, count: int) -> list[int] | None:
        """``count`` ids for a new owner, or None (and no change) when there are fewer."""
        if count > self.free:
            return None
        taken: list[int] = []
        for _ in range(count):
            if not self._free:
                self._evict()
            taken.append(self._free.pop())
            self._blocks[taken[-1]].owners = 1
        return taken

    def publish(self, block: int, key: bytes) -> None:
        """The content of an owned ``block`` is that of ``key``. Where another block is found by it, nothing happens."""
        held = self._blocks[block]
        if not held.owners:
            raise IntegrityError(f"{self._name} {block} was published but belongs to nobody")
        if key not in self._by_key and held.key is None:
            self._by_key[key] = block
            held.key = key

    def give(self, blocks: Sequence[int]) -> None:
        """One owner less for each of ``blocks``, in token order. Raises IntegrityError, with nothing changed."""
        wrong = [block for block in blocks if not self._blocks[block].owners]
        if wrong or len(set(blocks)) != len(blocks):
            raise IntegrityError(
                f"{self._name} ids {wrong or sorted(blocks)} were given back but are not in use"
            )
        for block in reversed(blocks):
            held = self._blocks[block]
            held.owners -= 1
            if held.owners:
                continue
            if held.key is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def forget(self) -> None:
        """Nothing that was computed is found any more."""
        for block in self._cached:
            self._free.append(block)
        self._cached.clear()
        self._by_key.clear()
        for held in self._blocks:
            held.key = None

    def check_owned(self, blocks: Iterable[int]) -> None:
        """Raise IntegrityError unless ``blocks``, one entry an owner, are all owners and the books balance."""
        owners = [0] * len(self._blocks)
        for block in blocks:
            owners[block] += 1
        wrong = [n for n, held in enumerate(self._blocks) if held.owners != owners[n]]
        if wrong:
            raise IntegrityError(
                f"{self._name} {wrong[0]} has {self._blocks[wrong[0]].owners} owners, {owners[wrong[0]]} are known"
            )
        idle = sorted([*self._free, *self._cached])
        if idle != [n for n, held in enumerate(self._blocks) if n and not held.owners]:
            raise IntegrityError(f"{self._name} pool: free and cached are not those without owner")
        by_key = {held.key: n for n, held in enumerate(self._blocks) if held.key is not None}
        if by_key != self._by_key or any(self._blocks[n].key is None for n in self._cached):
            raise IntegrityError(f"{self._name} pool: keys and blocks differ")

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        key = self._blocks[block].key
        assert key is not None
        del self._by_key[key]
        self._blocks[block].key = None
        self._free.append(block)
        self.num_evicted += 1
