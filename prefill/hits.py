"""What a prompt may take from the cache, and where its rows begin then. Pure.

A hit of N tokens gives global KV; the windows before token N are rebuilt by running rows again (``Span.floor``):

    replay: window   from N - W on. Rows near there see a shorter window, so answers differ a little from those
                     without a hit: the model's own bounded replay (spec/model.md 10.1)
    replay: exact    each layer widens what a row depends on by W - 1, so from L (W - 1) rows earlier every window
                     that is read later is right to the bit. L is the number of encoder layers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..model.config import ModelConfig
from ..transfer.layout import CacheLayout
from ..transfer.request import Request
from ..transfer.tiers.keys import block_keys, root_key

PrefixMode = Literal["off", "window", "exact"]


class Found(Protocol):
    """What is asked of the pool."""

    def found(self, keys: Sequence[bytes]) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """``blocks`` hold the first ``num_tokens`` tokens; rows run from ``floor`` on."""

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    floor: int = 0


class Prefixes:
    """Keys and hits of the prompts of one rank."""

    def __init__(self, mode: PrefixMode, config: ModelConfig, layout: CacheLayout) -> None:
        self._mode = mode
        self._layout = layout
        self._window = config.sliding_window
        self._reach = config.split_layer * (config.sliding_window - 1)

    def keys(self, request: Request) -> tuple[bytes, ...]:
        """Keys of the whole blocks that prefill computes of a prompt; none for one that must not use the cache."""
        if self._mode == "off" or (request.is_exact and self._mode == "window"):
            return ()
        root = root_key(self._layout, replay=self._mode, salt=request.cache_salt)
        ids = request.prompt_ids[: len(request.prompt_ids) - 1]
        return tuple(block_keys(root, ids, self._layout.block_tokens))

    def hit(self, request: Request, keys: Sequence[bytes], pool: Found) -> Hit:
        """What the cache has of a prompt now."""
        blocks = pool.found(keys)
        tokens = len(blocks) * self._layout.block_tokens
        if self._mode == "exact":
            first = min(tokens, request.tail_start(self._layout.keep)) - self._reach
        else:
            first = tokens - self._window
        floor = max(0, first) // 2 * 2  # whole pairs, where two tokens make an entry
        return Hit(blocks=tuple(blocks), num_tokens=tokens, floor=floor)
