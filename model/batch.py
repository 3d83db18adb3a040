"""Rows: what a forward pass computes, and where each row's past lies.

span of a request     start            start + n
positions   ... |------|===== rows =====|            history: ids just before start (Engram looks back 3)
                       ^                             slot, blocks: where its caches are
decoder layers run     |   tail_start ->|==|         only rows at or after tail_start
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..kernels.reference.linear import padded_rows


class Logits(Enum):
    """Which rows of a span want logits."""

    NONE = 0
    LAST = 1
    ALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive rows of one request in one forward pass.

    ``history`` holds the ids just before ``start``, oldest first, at least min(3, start) of them. ``blocks`` covers
    all tokens up to the last row. Rows at positions >= ``tail_start`` run the decoder layers, whose windows do not
    reach before it.
    """

    token_ids: tuple[int, ...]
    start: int
    history: tuple[int, ...]
    slot: int
    blocks: tuple[int, ...]
    tail_start: int = 0
    logits: Logits = Logits.NONE


class Rows:
    """Index tensors of the rows that run through the same layers. Padding rows have ``valid`` False.

    Shapes: T rows (whole tiles when ``tiled``), S spans, W window.
    """

    def __init__(
        self,
        *,
        starts: np.ndarray,
        counts: np.ndarray,
        floors: np.ndarray,
        slots: np.ndarray,
        tables: np.ndarray,
        window: int,
        ring_rows: int,
        tiled: bool,
    ) -> None:
        self.num_rows = int(counts.sum())
        total = padded_rows(self.num_rows) if tiled else self.num_rows
        self.starts, self.counts = starts, counts
        self.ends = starts + counts
        self.first_row = np.concatenate(([0], np.cumsum(counts)))
        span_of = np.zeros(total, dtype=np.int64)
        span_of[: self.num_rows] = np.repeat(np.arange(len(counts)), counts)
        offset = (
            np.arange(total) - self.first_row[:-1][span_of]
            if len(counts)
            else np.zeros(total, np.int64)
        )
        positions = np.zeros(total, dtype=np.int64)
        positions[: self.num_rows] = (
            (starts[span_of] + offset)[: self.num_rows] if len(counts) else 0
        )
        self.valid = torch.arange(total) < self.num_rows
        self.positions = torch.from_numpy(positions)
        self.span_of = torch.from_numpy(span_of)
        self.tables = torch.from_numpy(tables)
        self.slots = torch.from_numpy(slots)
        self._window_plan(positions, span_of, offset, floors, slots, window, ring_rows)
        self._ring_writes(positions, span_of, offset, slots, ring_rows)

    def _window_plan(
        self,
        positions: np.ndarray,
        span_of: np.ndarray,
        offset: np.ndarray,
        floors: np.ndarray,
        slots: np.ndarray,
        window: int,
        ring_rows: int,
    ) -> None:
        """Window keys come from a buffer: W - 1 ring rows before each span's start, then the rows of this pass."""
        back = window - 1
        spans = len(self.counts)
        prior = self.starts[:, None] - back + np.arange(back)
        self.prior_row = torch.from_numpy((np.maximum(prior, 0) % ring_rows).reshape(-1))
        self.prior_slot = torch.from_numpy(np.repeat(slots, back))
        steps = np.arange(window)
        total = len(positions)
        if not spans:
            self.window_index = torch.zeros((total, window), dtype=torch.int64)
            self.window_valid = torch.zeros((total, window), dtype=torch.bool)
            return
        relative = offset[:, None] - back + steps
        own = spans * back + self.first_row[:-1][span_of][:, None] + relative
        before = span_of[:, None] * back + back + relative
        index = np.where(relative >= 0, own, before)
        allowed = positions[:, None] - back + steps >= floors[span_of][:, None]
        index[self.num_rows :] = 0
        allowed[self.num_rows :] = False
        self.window_index = torch.from_numpy(index)
        self.window_valid = torch.from_numpy(allowed)

    def _ring_writes(
        self,
        positions: np.ndarray,
        span_of: np.ndarray,
        offset: np.ndarray,
        slots: np.ndarray,
        ring_rows: int,
    ) -> None:
        """The last ``ring_rows`` rows of every span go into its ring."""
        real = slice(0, self.num_rows)
        from_end = self.counts[span_of[real]] - offset[real]
        kept = np.nonzero(from_end <= ring_rows)[0]
        self.from_end = torch.from_numpy(from_end)
        self.ring_source = torch.from_numpy(kept)
        self.ring_slot = torch.from_numpy(slots[span_of[kept]])
        self.ring_row = torch.from_numpy(positions[kept] % ring_rows)

    @property
    def total(self) -> int:
        """Rows with padding."""
        return self.positions.shape[0]

    @cached_property
    def longest_span(self) -> int:
        """Rows of the longest span."""
        return int(self.counts.max(initial=0))

    def locate_entries(
        self, span_of: Tensor, entries: Tensor, ratio: int, block_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """(block id, entry in block) of compressed ``entries`` of spans ``span_of``, both int64 and broadcast."""
        per_block = block_tokens // ratio
        column = (entries // per_block).clamp_(max=self.tables.shape[1] - 1)
        return self.tables[span_of, column], entries % per_block


class Batch:
    """All rows of a pass, those that go on into the decoder layers, and those whose logits are wanted."""

    def __init__(
        self,
        spans: Sequence[Span],
        *,
        window: int,
        ring_rows: int,
        pad_token_id: int,
        max_history: int,
        tiled: bool,
    ) -> None:
        counts = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
        starts = np.array([span.start for span in spans], dtype=np.int64)
        slots = np.array([span.slot for span in spans], dtype=np.int64)
        tails = np.array([span.tail_start for span in spans], dtype=np.int64)
        tables = np.zeros(
            (len(spans), max((len(span.blocks) for span in spans), default=1) or 1), dtype=np.int64
        )
        for row, span in enumerate(spans):
            tables[row, : len(span.blocks)] = span.blocks

        def make_rows(first: np.ndarray, number: np.ndarray, floors: np.ndarray) -> Rows:
            return Rows(
                starts=first,
                counts=number,
                floors=floors,
                slots=slots,
                tables=tables,
                window=window,
                ring_rows=ring_rows,
                tiled=tiled,
            )

        self.rows = make_rows(starts, counts, np.zeros_like(starts))
        skipped = np.clip(tails - starts, 0, counts)
        if not skipped.any() and np.all(np.maximum(starts - window + 1, 0) >= tails):
            self.tail, self.tail_of = self.rows, None
        else:
            self.tail = make_rows(starts + skipped, counts - skipped, tails)
            offsets = np.arange(self.rows.num_rows) - np.repeat(self.rows.first_row[:-1], counts)
            kept = np.nonzero(offsets >= np.repeat(skipped, counts))[0]
            padded = np.zeros(self.tail.total, dtype=np.int64)
            padded[: len(kept)] = kept
            self.tail_of = torch.from_numpy(padded)
        """Rows of the decoder layers as indices into all rows; None when they are the same."""
        self.logit_rows = self._logit_rows(spans)
        self.token_ids, self.grams = self._token_ids(spans, pad_token_id, max_history)

    def _logit_rows(self, spans: Sequence[Span]) -> Tensor:
        wanted: list[int] = []
        first = self.tail.first_row
        for number, span in enumerate(spans):
            begin, end = int(first[number]), int(first[number + 1])
            if span.logits is Logits.ALL:
                wanted.extend(range(begin, end))
            elif span.logits is Logits.LAST and end > begin:
                wanted.append(end - 1)
        return torch.tensor(wanted, dtype=torch.int64)

    def _token_ids(
        self, spans: Sequence[Span], pad: int, max_history: int
    ) -> tuple[Tensor, Tensor]:
        """Token ids [T] and, per row, the token and its predecessors, nearest first: [T, max_history + 1]."""
        total = self.rows.total
        grams = np.full((total, max_history + 1), pad, dtype=np.int64)
        row = 0
        for span in spans:
            count = len(span.token_ids)
            past = span.history[-max_history:] if max_history else ()
            known = np.array(
                (pad,) * (max_history - len(past)) + past + span.token_ids, dtype=np.int64
            )
            for back in range(max_history + 1):
                grams[row : row + count, back] = known[
                    max_history - back : max_history - back + count
                ]
            row += count
        return torch.from_numpy(grams[:, 0].copy()), torch.from_numpy(grams)
