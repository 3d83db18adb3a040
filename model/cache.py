"""Paged global KV, one state slot per request, and the pools that own their ids.

    blocks uint8 [num_blocks, block_bytes]     one row = block_tokens tokens of every KV source layer
      | layer 2 main | layer 2 index | layer 8 main | ... | layer 20 index |
    slots  uint8 [num_slots, slot_bytes]       one row = everything else a request owns
      | window ring of layer 0 | ... | window ring of the last drafter block | pending pairs of layer 2 | ...

A token at position p has its window row at ``p % ring_rows`` and, in a layer of ratio 2, its pending pair at
``p % PENDING_ROWS``. Block 0 and slot 0 belong to nobody: rows that only fill up a tile point there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.storage import KvFormat
from ..transfer.errors import IntegrityError
from ..transfer.layout import BlockSection, CacheLayout
from .config import ModelConfig

BACKTRACK_TOKENS = 12
"""Tokens by which a request may be rolled back while every window stays whole."""
PENDING_ROWS = 7
"""Rows of a pending ring: the open pair, and one for each of five drafts that may be rejected."""
_ALIGN_BYTES = 64


def default_keep(config: ModelConfig) -> int:
    """Prompt rows that run the decoder layers when nothing else is asked: a window plus back-tracking."""
    return config.sliding_window + BACKTRACK_TOKENS


def _align(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def _pair_sources(config: ModelConfig) -> list[int]:
    return [layer for layer in config.kv_source_layer_ids if config.ratio(layer) == 2]


def _num_windows(config: ModelConfig) -> int:
    return config.num_hidden_layers + config.num_nextn_predict_layers


def cache_layout(
    config: ModelConfig, fmt: KvFormat, block_tokens: int, keep: int, model_fingerprint: str
) -> CacheLayout:
    """The byte layout of blocks and slots. ``block_tokens`` is even, so that no pair straddles two blocks."""
    sections: list[BlockSection] = []
    offset = 0
    for layer in config.kv_source_layer_ids:
        ratio = config.ratio(layer)
        for part, row_bytes in (
            ("main", fmt.main.row_bytes(config.head_dim)),
            ("index", fmt.index.row_bytes(config.index_head_dim)),
        ):
            sections.append(
                BlockSection(
                    name=f"layer{layer}.{part}",
                    offset=offset,
                    entry_bytes=row_bytes,
                    tokens_per_entry=ratio,
                )
            )
            offset += block_tokens // ratio * row_bytes
    ring_rows = config.sliding_window + BACKTRACK_TOKENS
    windows = _num_windows(config) * ring_rows * fmt.window.row_bytes(config.head_dim)
    pending = len(_pair_sources(config)) * PENDING_ROWS * 2 * config.head_dim * 4
    return CacheLayout(
        model_fingerprint=model_fingerprint,
        kv_format=fmt.name,
        block_tokens=block_tokens,
        block_bytes=offset,
        sections=tuple(sections),
        slot_bytes=_align(windows) + pending,
        window=config.sliding_window,
        ring_rows=ring_rows,
        keep=keep,
    )


class Cache:
    """The two byte arenas of a rank, and typed views into them by layer."""

    def __init__(
        self,
        config: ModelConfig,
        fmt: KvFormat,
        layout: CacheLayout,
        num_blocks: int,
        num_slots: int,
    ) -> None:
        self.format = fmt
        self.layout = layout
        self.blocks = torch.zeros((num_blocks, layout.block_bytes), dtype=torch.uint8)
        self.slots = torch.zeros((num_slots, layout.slot_bytes), dtype=torch.uint8)
        self.main: dict[int, Tensor] = {}
        """Per source layer: bytes [num_blocks, entries per block, row bytes]."""
        self.index: dict[int, Tensor] = {}
        for section in layout.sections:
            layer, part = section.name.removeprefix("layer").split(".")
            entries = layout.block_tokens // section.tokens_per_entry
            data = self.blocks[:, section.offset : section.offset + entries * section.entry_bytes]
            views = self.main if part == "main" else self.index
            views[int(layer)] = data.unflatten(1, (entries, section.entry_bytes))
        row_bytes = fmt.window.row_bytes(config.head_dim)
        num_windows = _num_windows(config)
        ring_bytes = layout.ring_rows * row_bytes
        windows = self.slots[:, : num_windows * ring_bytes]
        self.window = windows.unflatten(1, (num_windows, layout.ring_rows, row_bytes)).unbind(1)
        """Per layer, drafter blocks last: bytes [num_slots, ring_rows, row bytes]."""
        self.pending: dict[int, Tensor] = {}
        """Per ratio-2 source: float32 [num_slots, PENDING_ROWS, 2 (value, gate), head_dim]."""
        offset = _align(num_windows * ring_bytes)
        length = PENDING_ROWS * 2 * config.head_dim * 4
        for layer in _pair_sources(config):
            pairs = self.slots[:, offset : offset + length].view(torch.float32)
            self.pending[layer] = pairs.unflatten(1, (PENDING_ROWS, 2, config.head_dim))
            offset += length

    def clear_slot(self, slot: int) -> None:
        """Zero a slot before another request moves in."""
        self.slots[slot].zero_()


class IdPool:
    """Ids ``reserved .. count - 1``, each either free or in use; the lowest that was given back last is taken first."""

    def __init__(self, count: int, name: str, reserved: int = 1) -> None:
        self._name = name
        self._reserved = reserved
        self._count = count
        self._free = list(range(count - 1, reserved - 1, -1))
        self._in_use: set[int] = set()

    @property
    def capacity(self) -> int:
        """Ids that can be handed out."""
        return self._count - self._reserved

    @property
    def free(self) -> int:
        """Ids that are not in use."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Ids that are in use."""
        return len(self._in_use)

    def try_take(self, count: int) -> list[int] | None:
        """``count`` free ids, or None (and no change) when there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._in_use.update(taken)
        return taken

    def give(self, ids: Sequence[int]) -> None:
        """Give ids back. Raises IntegrityError, changing nothing, for an id that is not in use or comes twice."""
        returned = set(ids)
        foreign = sorted(returned - self._in_use)
        if foreign or len(returned) != len(ids):
            raise IntegrityError(
                f"{self._name} ids {foreign or sorted(ids)} were given back but are not in use"
            )
        self._in_use -= returned
        self._free.extend(reversed(ids))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every id is exactly once free or in use."""
        ids = sorted(self._free) + sorted(self._in_use)
        if sorted(ids) != list(range(self._reserved, self._count)):
            raise IntegrityError(
                f"{self._name} pool: {len(self._free)} free and {len(self._in_use)} in use of {self.capacity}"
            )

    def check_owned(self, ids: Sequence[int]) -> None:
        """Raise IntegrityError unless ``ids`` are exactly those in use, each once, and the books balance."""
        self.check_integrity()
        if sorted(ids) != sorted(self._in_use):
            raise IntegrityError(
                f"{self._name} pool: in use are {sorted(self._in_use)}, but owned are {sorted(ids)}"
            )
