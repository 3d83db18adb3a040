"""Keeps what answers added to the cache, so that the next turn of a chat finds it.

prompt  | block | block | blo            prefill kept the whole blocks of the prompt
answer                  |  ck | block | bl    and we keep those that the answer filled, when it is over
"""

from collections.abc import Sequence

from ..model.cache import Cache
from ..transfer.request import Request
from ..transfer.tiers.keys import block_keys, root_key
from ..transfer.tiers.record import NO_PARENT
from ..transfer.tiers.stack import TierStack
from .rooms import Room


class Keeper:
    """``replay`` is how prefill rebuilds windows after a hit: part of every key. ``tiers`` None keeps nothing."""

    def __init__(self, tiers: TierStack | None, cache: Cache, replay: str) -> None:
        self._tiers = tiers
        self._cache = cache
        self._replay = replay
        self.num_kept = 0

    def keep(self, request: Request, output_ids: Sequence[int], room: Room | None) -> None:
        """Store the whole blocks that end in the answer ``output_ids``, whose last token has no KV, behind our back.

        ``room`` None is that of a paused request: nothing is kept.
        """
        if self._tiers is None or self._replay == "off" or room is None:
            return
        layout = self._cache.layout
        prompt = request.prompt_ids
        first = (len(prompt) - 1) // layout.block_tokens
        ids = (*prompt, *output_ids[:-1])
        if len(ids) // layout.block_tokens == first or (
            request.is_exact and self._replay == "window"
        ):
            return
        root = root_key(layout, replay=self._replay, salt=request.cache_salt)
        keys = block_keys(root, ids, layout.block_tokens)
        for index in reversed(range(first, len(keys))):
            parent = keys[index - 1] if index else NO_PARENT
            self._tiers.store(keys[index], self._cache.blocks[room.blocks[index]], parent=parent)
            self.num_kept += 1

    def close(self) -> None:
        """Write what is queued, and close the tiers."""
        if self._tiers is not None:
            self._tiers.close()
