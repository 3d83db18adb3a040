"""Blocks that come back from memory, disk or an object store before their prompt runs, and those that go there.

    a prompt waits in the queue --> tiers have more of its prefix than the device, and reading is worth it
        --> free blocks are taken, a load begins, the prompt is passed over
        --> the load is over: what came is published and given to the cache, where the prompt finds it

A prompt is looked up once. Whatever does not come, does not come in time or is wrong is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..model.cache import Cache
from ..transfer.tiers.record import NO_PARENT
from ..transfer.tiers.stack import StackLoad, TierStack
from .prefix import PrefixPool

MAX_LOADS = 8
"""Prompts that load at a time."""


@dataclass(slots=True)
class _Loading:
    """``blocks`` are ours until nobody writes into them; ``keys`` are theirs."""

    load: StackLoad
    blocks: list[int]
    keys: Sequence[bytes]
    wanted: bool = True


class TierLoads:
    """Loads into blocks of ``pool``. ``tiers`` None keeps nothing and finds nothing."""

    def __init__(self, tiers: TierStack | None, cache: Cache, pool: PrefixPool) -> None:
        self._tiers = tiers
        self._cache = cache
        self._pool = pool
        self._loading: dict[str, _Loading] = {}
        self._looked_up: set[str] = set()
        self.num_loaded = 0
        """Blocks that came."""

    @property
    def blocks(self) -> list[int]:
        """Those that loads own."""
        return [block for loading in self._loading.values() for block in loading.blocks]

    @property
    def keys(self) -> set[bytes]:
        """Of blocks that are on their way."""
        wanted = (loading for loading in self._loading.values() if loading.wanted)
        return {key for loading in wanted for key in loading.keys}

    def is_loading(self, request_id: str) -> bool:
        """Whether a queued prompt waits for blocks."""
        loading = self._loading.get(request_id)
        return loading is not None and loading.wanted

    def look_up(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Begin to load what tiers have of a queued prompt beyond what the device has, once."""
        if self._tiers is None or request_id in self._looked_up or len(self._loading) == MAX_LOADS:
            return
        missing = keys[len(self._pool.found(keys)) :]
        if not missing or missing[0] in self.keys:
            return
        self._looked_up.add(request_id)
        spans = self._tiers.find(missing)
        count = sum(span.num_blocks for span in spans)
        blocks = self._pool.try_take(count) if count else None
        if blocks is not None:
            rows = [self._cache.blocks[block] for block in blocks]
            load = self._tiers.load(spans, missing[:count], rows)
            self._loading[request_id] = _Loading(load, blocks, missing[:count])

    def poll(self) -> None:
        """Take in what has come."""
        for request_id, loading in list(self._loading.items()):
            if loading.wanted and loading.load.poll():
                loading.wanted = False
                count = loading.load.num_leading
                self.num_loaded += count
                for block, key in zip(loading.blocks[:count], loading.keys, strict=False):
                    self._pool.publish(block, key)
            if not loading.wanted and loading.load.quiet():
                del self._loading[request_id]
                self._pool.give(loading.blocks)

    def forget(self, request_id: str) -> None:
        """The prompt runs, or comes no more."""
        self._looked_up.discard(request_id)
        loading = self._loading.get(request_id)
        if loading is not None and loading.wanted:
            loading.wanted = False
            loading.load.abandon()

    def keep(self, blocks: Sequence[int], keys: Sequence[bytes], first: int) -> None:
        """Store the blocks of ``keys`` from number ``first`` on behind our back, the head of the prompt last."""
        if self._tiers is None:
            return
        for index in reversed(range(first, len(keys))):
            parent = keys[index - 1] if index else NO_PARENT
            self._tiers.store(keys[index], self._cache.blocks[blocks[index]], parent=parent)

    def computed(self, num_rows: int, seconds: float) -> None:
        """A step ran so many prompt rows: what reading is weighed against."""
        if self._tiers is not None:
            self._tiers.rates.note_prefill(num_rows, seconds)

    def close(self) -> None:
        """Write what is queued, and close the tiers."""
        if self._tiers is not None:
            self._tiers.close()
