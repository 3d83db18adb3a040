"""A network without arithmetic, for tests of the ranks: everything it computes depends on every byte it cached.

A row writes its token into the real cache (blocks and slot); the logits are random numbers seeded by a hash of all
that the request cached so far, read back from the cache. A lost, foreign or stale byte therefore changes every token
that follows, and a row that does not continue what its slot holds is refused. A slot keeps what its last RING rows
were, so that rows may be rolled back, as a real one does. After a prefix hit a request goes on from the entry before
its first row, and writes no known one.
"""

from collections.abc import Callable, Sequence
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
from headrace.model.drafter import Drafts, DraftSpan
from headrace.transfer.layout import BlockSection

RING = 16
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
        self.drafter: FakeDrafter | None = None
        self.spans: list[Span] = []
        self.poisoned: set[int] = set()
        """Positions whose logits are not numbers."""

    def forward(self, spans: Sequence[Span]) -> Tensor:
        self.spans = list(spans)
        wanted: list[Tensor] = []
        for span in spans:
            for row in range(len(span.token_ids)):
                self._cache(span, row)
                last = row == len(span.token_ids) - 1
                if span.logits is Logits.ALL or (span.logits is Logits.LAST and last):
                    wanted.append(self._logits(span, row))
        return torch.stack(wanted) if wanted else torch.zeros(0, self.config.vocab_size)

    def _cache(self, span: Span, row: int) -> None:
        assert 0 not in (span.slot, *span.blocks), "block 0 and slot 0 belong to nobody"
        position, token = span.start + row, span.token_ids[row]
        ring = self._slots[span.slot, : 16 * RING].view(np.int64).reshape(RING, 2)
        before = 0
        if position and position == span.floor:
            (section, *_) = (s for s in self.cache.layout.sections if s.tokens_per_entry == 1)
            before = int(self._entry(span, section, position - 1)[:8].view(np.int64)[0])
        elif position:
            found, before = ring[(position - 1) % RING].tolist()
            assert found == position, f"the slot holds {found} rows there, not {position}"
        ring[position % RING] = position + 1, (before * 31 + token) % 2**61
        for section in self.cache.layout.sections:
            index, rest = divmod(position + 1, section.tokens_per_entry)
            if rest == 0 and position >= span.known:
                entry = self._entry(span, section, index - 1)
                entry[:8], entry[8:] = ring[position % RING, 1:].view(np.uint8), 0

    def _logits(self, span: Span, row: int) -> Tensor:
        num_tokens = span.start + row + 1
        if num_tokens - 1 in self.poisoned:
            return torch.full((self.config.vocab_size,), float("nan"))
        history = (span.history + span.token_ids[:row])[-3:]
        seed = blake2b(repr((history, span.tail_start)).encode(), digest_size=7)
        first = 16 * ((num_tokens - 1) % RING)
        seed.update(self._slots[span.slot, first : first + 16].tobytes())
        for section in self.cache.layout.sections:
            for index in range(num_tokens // section.tokens_per_entry):
                seed.update(self._entry(span, section, index).tobytes())
        generator = torch.Generator().manual_seed(int.from_bytes(seed.digest(), "little"))
        return torch.randn(self.config.vocab_size, generator=generator) * 3

    def _entry(self, span: Span, section: BlockSection, index: int) -> npt.NDArray[np.uint8]:
        column, row = divmod(index, self.cache.layout.block_tokens // section.tokens_per_entry)
        start = section.offset + row * section.entry_bytes
        return self._blocks[span.blocks[column], start : start + section.entry_bytes]


class FakeDrafter:
    """Knows answers: ``answers`` are (position of the first id, ids). Every third guess, by its position, is wrong."""

    block_size = 5

    def __init__(self, vocab_size: int, answers: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._vocab_size = vocab_size
        self._next = {
            (first + at, ids[at]): ids[at + 1]
            for first, ids in answers
            for at in range(len(ids) - 1)
        }

    def draft(
        self,
        anchors: Sequence[DraftSpan],
        choose: Callable[[int, Tensor], Sequence[int]],
        num_drafts: int,
    ) -> Drafts:
        last = [anchor.token_id for anchor in anchors]
        ids: list[Sequence[int]] = []
        for place in range(num_drafts):
            logits = torch.zeros(len(anchors), self._vocab_size)
            for row, anchor in enumerate(anchors):
                position = anchor.position + place
                guess = self._next.get((position, last[row]), 3)
                logits[row, guess + (position % 3 == 0)] = 1e4
            ids.append(choose(place, logits))
            last = list(ids[-1])
        confidences = torch.full((len(anchors), num_drafts), 0.7)
        return Drafts(ids=torch.tensor(ids).T, confidences=confidences)
