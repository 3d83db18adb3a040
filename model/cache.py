"""Paged global KV, one state slot per request, and the pools that own their ids.

    blocks uint8 [num_blocks, block_bytes]     one row = block_tokens tokens of every KV source layer
      | layer 2 main | layer 2 index | layer 8 main | ... | layer 20 index |
    slots  uint8 [num_slots, slot_bytes]       one row = everything else a request owns
      | window rings of the encoder layers | pending pairs of layer 2 | ... | rings of decoder layers, drafter blocks |
    tails  uint8 [num_tails, keep * row]       one row = what the decoder layers of a prompt's tail start from
      | residual streams and their weights at position tail_start | tail_start + 1 | ... |        ``split: seam`` only

A token at position p has its window row at ``p % ring_rows`` and, in a layer of ratio 2, its pending pair at
``p % PENDING_ROWS``. Block 0 and slot 0 belong to nobody: rows that only fill up a tile point there. Where prefill
holds the encoder layers only, a slot's second half stays there and never travels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.storage import KvFormat
from ..transfer.backend import Arenas
from ..transfer.errors import IntegrityError
from ..transfer.layout import BlockSection, CacheLayout
from .batch import TailRows
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
    config: ModelConfig,
    fmt: KvFormat,
    block_tokens: int,
    keep: int,
    model_fingerprint: str,
    *,
    seam: bool = False,
) -> CacheLayout:
    """The byte layout of blocks, slots and, with ``seam``, tails.

    ``block_tokens`` is even, so that no pair straddles two blocks.
    """
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
    ring = ring_rows * fmt.window.row_bytes(config.head_dim)
    encoder = _align(config.split_layer * ring)
    decoder = (_num_windows(config) - config.split_layer) * ring
    pending = len(_pair_sources(config)) * PENDING_ROWS * 2 * config.head_dim * 4
    return CacheLayout(
        model_fingerprint=model_fingerprint,
        kv_format=fmt.name,
        block_tokens=block_tokens,
        block_bytes=offset,
        sections=tuple(sections),
        slot_bytes=encoder + _align(pending) + decoder,
        window=config.sliding_window,
        ring_rows=ring_rows,
        keep=keep,
        private_bytes=decoder if seam else 0,
        tail_row_bytes=4 * config.hc_mult * (config.hidden_size + 1) if seam else 0,
    )


class Cache:
    """The byte arenas of a rank, and typed views into them by layer."""

    def __init__(
        self,
        config: ModelConfig,
        fmt: KvFormat,
        layout: CacheLayout,
        num_blocks: int,
        num_slots: int,
        num_tails: int = 0,
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
        ring_bytes = layout.ring_rows * row_bytes
        encoder, pairs = config.split_layer, _pair_sources(config)
        pair_bytes = PENDING_ROWS * 2 * config.head_dim * 4
        after_encoder = _align(encoder * ring_bytes)
        after_pairs = after_encoder + _align(len(pairs) * pair_bytes)
        self.window = [
            self._slot_part(begin, count * ring_bytes).unflatten(
                1, (count, layout.ring_rows, row_bytes)
            )[:, number]
            for begin, count in ((0, encoder), (after_pairs, _num_windows(config) - encoder))
            for number in range(count)
        ]
        """Per layer, drafter blocks last: bytes [num_slots, ring_rows, row bytes]."""
        self.pending = {
            layer: self._slot_part(after_encoder + number * pair_bytes, pair_bytes)
            .view(torch.float32)
            .unflatten(1, (PENDING_ROWS, 2, config.head_dim))
            for number, layer in enumerate(pairs)
        }
        """Per ratio-2 source: float32 [num_slots, PENDING_ROWS, 2 (value, gate), head_dim]."""
        shape = (num_tails, layout.keep, layout.tail_row_bytes // 4)
        self._tail_rows = torch.zeros(shape, dtype=torch.float32)
        self.tails = self._tail_rows.flatten(1).view(torch.uint8)
        self._streams = config.hc_mult, config.hidden_size

    @property
    def arenas(self) -> Arenas:
        """What a transport exposes to the ranks that read from here."""
        return Arenas(layout=self.layout, blocks=self.blocks, slots=self.slots, tails=self.tails)

    def _slot_part(self, begin: int, num_bytes: int) -> Tensor:
        return self.slots[:, begin : begin + num_bytes]

    def put_tails(self, where: TailRows, streams: Tensor, pre: Tensor) -> None:
        """Keep ``streams`` [n, K, H] and ``pre`` [n, K] for the decoder layers of a late span."""
        values = torch.cat((streams.flatten(1), pre), dim=1)
        self._tail_rows.numpy()[where.tails.numpy(), where.rows.numpy()] = values.numpy()

    def take_tails(self, where: TailRows) -> tuple[Tensor, Tensor]:
        """What ``put_tails`` kept."""
        found = self._tail_rows.numpy()[where.tails.numpy(), where.rows.numpy()]
        values = torch.from_numpy(found)
        mult, hidden = self._streams
        return values[:, : mult * hidden].unflatten(1, (mult, hidden)).contiguous(), values[
            :, mult * hidden :
        ].contiguous()

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
