"""Layouts and arenas for the tests of transfer."""

import torch

from headrace.transfer.backend import Arenas
from headrace.transfer.layout import BlockSection, CacheLayout

SMALL = CacheLayout(
    model_fingerprint="small",
    kv_format="plain",
    block_tokens=8,
    block_bytes=8 * 3 + 4 * 10 + 8 * 2,
    sections=(
        BlockSection(name="layer0.main", offset=0, entry_bytes=3, tokens_per_entry=1),
        BlockSection(name="layer1.main", offset=24, entry_bytes=10, tokens_per_entry=2),
        BlockSection(name="layer1.index", offset=64, entry_bytes=2, tokens_per_entry=1),
    ),
    slot_bytes=37,
    window=4,
    ring_rows=6,
    keep=6,
)


def released_layout() -> CacheLayout:
    """The released checkpoint: layers 2, 8, 14 keep an entry per two tokens, layer 20 one per token."""
    sections: list[BlockSection] = []
    offset = 0
    for layer, tokens_per_entry in ((2, 2), (8, 2), (14, 2), (20, 1)):
        for kind, entry_bytes in (("main", 288), ("index", 68)):
            section = BlockSection(
                name=f"layer{layer}.{kind}",
                offset=offset,
                entry_bytes=entry_bytes,
                tokens_per_entry=tokens_per_entry,
            )
            sections.append(section)
            offset += section.bytes_for(128)
    windows_bytes = 43 * 140 * 528
    pending_groups_bytes = 3 * 7 * 2 * 512 * 4
    return CacheLayout(
        model_fingerprint="released",
        kv_format="released",
        block_tokens=128,
        block_bytes=offset,
        sections=tuple(sections),
        slot_bytes=windows_bytes + pending_groups_bytes,
        window=128,
        ring_rows=140,
        keep=140,
    )


def make_arenas(layout: CacheLayout, num_blocks: int, num_slots: int, seed: int | None) -> Arenas:
    """Arenas full of random bytes, or of zeros when ``seed`` is None."""

    def fill(rows: int, columns: int) -> torch.Tensor:
        if seed is None:
            return torch.zeros((rows, columns), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed + columns)
        return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)

    return Arenas(
        layout=layout,
        blocks=fill(num_blocks, layout.block_bytes),
        slots=fill(num_slots, layout.slot_bytes),
    )
