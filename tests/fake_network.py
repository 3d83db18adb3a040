"""A network without arithmetic, for tests of the ranks: everything it computes depends on every byte it cached.

A row writes its token into the real cache (blocks and slot); the logits are random numbers seeded by a hash of all
that the request cached so far, read back from the cache. A lost, foreign or stale byte therefore changes every token
that follows, and a row that does not continue what its slot holds is refused.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.kernels.reference.storage import KV_FORMATS
from headrace.model.batch import Logits, Span
from headrace.model.cache import Cache, cache_layout, default_keep
from headrace.model.config import load_config
from headrace.transfer.layout import BlockSection

CHECKPOINT = Path(__file__).parent / "data" / "golden" / "v41-spec-micro" / "checkpoint"


class FakeNetwork:
    """Stands in for a Network of one rank; ``spans`` of the last pass are kept for assertions."""

    def __init__(
        self,
        *,
        num_blocks: int = 13,
        num_slots: int = 5,
        block_tokens: int = 4,
        context: int | None = None,
        model_fingerprint: str = "fake",
    ) -> None:
        self.config = load_config(CHECKPOINT)
        if context is not None:
            object.__setattr__(self.config, "max_position_embeddings", context)
        fmt = KV_FORMATS["plain"]
        keep = default_keep(self.config)
        layout = cache_layout(self.config, fmt, block_tokens, keep, model_fingerprint)
        self.cache = Cache(self.config, fmt, layout, num_blocks, num_slots)
        self._blocks = self.cache.blocks.numpy()
        self._slots = self.cache.slots.numpy()
        self.spans: list[Span] = []
        self.poisoned: set[int] = set()
        """Positions whose logits are not numbers."""

    def forward(self, spans: Sequence[Span]) -> Tensor:
        self.spans = list(spans)
        for span in spans:
            self._cache(span)
        wanted = [self._logits(span) for span in spans if span.logits is Logits.LAST]
        return torch.stack(wanted) if wanted else torch.zeros(0, self.config.vocab_size)

    def _cache(self, span: Span) -> None:
        assert 0 not in (span.slot, *span.blocks), "block 0 and slot 0 belong to nobody"
        state = self._slots[span.slot, :16].view(np.int64)
        for position, token in enumerate(span.token_ids, span.start):
            assert state[0] == position, f"the slot holds {state[0]} rows, not {position}"
            state[0] += 1
            state[1] = (int(state[1]) * 31 + token) % 2**61
            for section in self.cache.layout.sections:
                index, rest = divmod(position + 1, section.tokens_per_entry)
                if rest == 0:
                    entry = self._entry(span, section, index - 1)
                    entry[:8], entry[8:] = state[1:].view(np.uint8), 0

    def _logits(self, span: Span) -> Tensor:
        num_tokens = span.start + len(span.token_ids)
        if num_tokens - 1 in self.poisoned:
            return torch.full((self.config.vocab_size,), float("nan"))
        seed = blake2b(repr((span.history, span.tail_start)).encode(), digest_size=7)
        seed.update(self._slots[span.slot].tobytes())
        for section in self.cache.layout.sections:
            for index in range(num_tokens // section.tokens_per_entry):
                seed.update(self._entry(span, section, index).tobytes())
        generator = torch.Generator().manual_seed(int.from_bytes(seed.digest(), "little"))
        return torch.randn(self.config.vocab_size, generator=generator) * 3

    def _entry(self, span: Span, section: BlockSection, index: int) -> npt.NDArray[np.uint8]:
        column, row = divmod(index, self.cache.layout.block_tokens // section.tokens_per_entry)
        start = section.offset + row * section.entry_bytes
        return self._blocks[span.blocks[column], start : start + section.entry_bytes]
