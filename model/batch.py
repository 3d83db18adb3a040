"""Rows: what a forward pass computes, and where each row's past lies.

span of a request     start            start + n
positions   ... |------|===== rows =====|            history: ids just before start (Engram looks back 3)
                       ^                             slot, blocks: where its caches are
decoder layers run     |   tail_start ->|==|         only rows at or after tail_start

After a prefix hit of N tokens the span begins with rows that are replayed for their windows (spec/model.md 10.1):

positions   ---- global KV is there ----|
            floor |== replayed rows ===|==== new rows ====|        floor = N - W at the earliest
                  windows reach no further back           known = N: entries before it are not written again

Where the network is cut between prefill and decode (``split: seam``), prefill leaves the residual streams of the tail
rows at the entry of the decoder layers in row ``tail`` of the cache's tails. A ``late`` span goes on from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from ..kernels.norm import rotation


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
    reach before it; no window reaches before ``floor``. Global KV of the tokens before ``known`` is there already and
    stays as it is. The rows of a ``late`` span run the decoder layers only, from what ``tail`` holds for them, and
    have no logits.
    """

    token_ids: tuple[int, ...]
    start: int
    history: tuple[int, ...]
    slot: int
    blocks: tuple[int, ...]
    tail_start: int = 0
    floor: int = 0
    known: int = 0
    tail: int = 0
    late: bool = False
    logits: Logits = Logits.NONE


class Turns:
    """Rotations of ``positions`` int64 [n], computed once for all layers that share their frequencies."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions
        self._known: list[tuple[Tensor, Tensor]] = []

    def at(self, frequencies: Tensor) -> Tensor:
        """Complex64 [n, rotary_dim / 2]."""
        for known, turn in self._known:
            if known is frequencies:
                return turn
        turn = rotation(self._positions, frequencies)
        self._known.append((frequencies, turn))
        return turn


@dataclass(frozen=True, kw_only=True)
class Closing:
    """Compressed entries that rows complete: int64 [n] each.

    ``rows`` ends entry ``entries`` of block ``blocks``; ``turns`` are for the position of the entry's first token.
    """

    rows: Tensor
    blocks: Tensor
    entries: Tensor
    turns: Turns


class Rows:
    """Index tensors of the rows that run through the same layers. Shapes: T rows, S spans, W window."""

    def __init__(
        self,
        *,
        starts: np.ndarray,
        counts: np.ndarray,
        floors: np.ndarray,
        known: np.ndarray,
        slots: np.ndarray,
        tables: np.ndarray,
        window: int,
        ring_rows: int,
    ) -> None:
        self._known = known
        self.num_rows = int(counts.sum())
        self.starts, self.counts = torch.from_numpy(starts), torch.from_numpy(counts)
        first_row = np.concatenate(([0], np.cumsum(counts)))
        span_of = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(self.num_rows) - first_row[span_of]
        positions = starts[span_of] + offset
        self.first_row = torch.from_numpy(first_row)
        self.positions = torch.from_numpy(positions)
        self.turns = Turns(self.positions)
        self.span_of = torch.from_numpy(span_of)
        self.tables = torch.from_numpy(tables)
        self.slots = torch.from_numpy(slots)
        self._window_plan(span_of, offset, floors, window, ring_rows)
        from_end = counts[span_of] - offset
        kept = np.nonzero(from_end <= ring_rows)[0]
        self.ring_source = torch.from_numpy(kept) if len(kept) < self.num_rows else None
        """Rows that the window rings keep: the last ``ring_rows`` of every span; None for all."""
        self.ring_slot = torch.from_numpy(slots[span_of[kept]])
        self.ring_row = torch.from_numpy(positions[kept] % ring_rows)
        self._closing: dict[int, Closing] = {}

    def _window_plan(
        self,
        span_of: np.ndarray,
        offset: np.ndarray,
        floors: np.ndarray,
        window: int,
        ring_rows: int,
    ) -> None:
        """Window keys come from a buffer: W - 1 ring rows before each span's start, then the rows of this pass."""
        back = window - 1
        starts, spans = self.starts.numpy(), len(floors)
        prior = starts[:, None] + np.arange(-back, 0)
        self.prior_row = torch.from_numpy((np.maximum(prior, 0) % ring_rows).reshape(-1))
        self.prior_slot = torch.from_numpy(np.repeat(self.slots.numpy(), back))
        steps = offset[:, None] + np.arange(-back, 1)
        before = (span_of * back + back)[:, None]
        own = (spans * back + self.first_row.numpy()[span_of])[:, None]
        index = np.where(steps >= 0, own, before) + steps
        index[steps < (floors - starts)[span_of][:, None]] = -1
        self.window_index = torch.from_numpy(index)
        """Per row its window's places in that buffer, oldest first, -1 where the window is shorter: int64 [T, W]."""

    def visible(self, ratio: int) -> Tensor:
        """Whole compressed entries that every row sees: int64 [T]."""
        return (self.positions + 1) // ratio if ratio > 1 else self.positions + 1

    def closing(self, ratio: int, block_tokens: int) -> "Closing":
        """The compressed entries that these rows complete; those of known tokens go where nobody reads."""
        if ratio not in self._closing:
            positions, per_block = self.positions.numpy(), block_tokens // ratio
            rows = (
                np.nonzero(positions % ratio == ratio - 1)[0]
                if ratio > 1
                else np.arange(self.num_rows)
            )
            entries = positions[rows] // ratio
            span_of = self.span_of.numpy()[rows]
            blocks = self.tables.numpy()[span_of, entries // per_block]
            blocks[positions[rows] < self._known[span_of]] = 0  # which belongs to nobody
            self._closing[ratio] = Closing(
                rows=torch.from_numpy(rows),
                blocks=torch.from_numpy(blocks),
                entries=torch.from_numpy(entries % per_block),
                turns=Turns(torch.from_numpy(entries * ratio)),
            )
        return self._closing[ratio]


@dataclass(frozen=True, kw_only=True)
class TailRows:
    """Where rows of the decoder layers lie in the cache's tails: rows ``rows`` of ``tails``, int64 [n] each."""

    tails: Tensor
    rows: Tensor


class Batch:
    """All rows of a pass, those that go on into the decoder layers, and those whose logits are wanted.

    Late spans come last among the rows of the decoder layers, and have no part in anything before.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        *,
        window: int,
        ring_rows: int,
        pad_token_id: int,
        max_history: int,
    ) -> None:
        early = [span for span in spans if not span.late]
        late = [span for span in spans if span.late]
        shape = {"window": window, "ring_rows": ring_rows}
        starts, counts, floors, tails = _ranges(early)
        self.rows = _rows(early, starts, counts, floors, **shape)
        skipped = np.clip(tails - starts, 0, counts)
        self.tail_of: Tensor | None = None
        """Rows of the decoder layers as indices into all rows; None when all of them go on."""
        sees_all = np.all(np.maximum(starts - window + 1, 0) >= tails)
        if skipped.any():
            kept = self.rows.positions.numpy() >= np.repeat(tails, counts)
            self.tail_of = torch.from_numpy(np.nonzero(kept)[0])
        self.tail = self.rows
        if skipped.any() or not sees_all or late:
            late_starts, late_counts, _, late_tails = _ranges(late)
            self.tail = _rows(
                [*early, *late],
                np.concatenate((starts + skipped, late_starts)),
                np.concatenate((counts - skipped, late_counts)),
                np.concatenate((tails, late_tails)),
                **shape,
            )
        self.late_ids = torch.tensor([t for s in late for t in s.token_ids], dtype=torch.int64)
        self._late = late
        self.logit_rows = self._logit_rows([*early, *late])
        self.token_ids, self.grams = self._token_ids(early, pad_token_id, max_history)
        self._early = early

    def outgoing(self) -> TailRows:
        """Where the rows of the decoder layers that end here are left for a late span."""
        tail = self.tail
        numbers = np.array([span.tail for span in self._early], dtype=np.int64)
        first = np.array([max(span.tail_start, span.floor) for span in self._early], dtype=np.int64)
        span_of = tail.span_of.numpy()
        return TailRows(
            tails=torch.from_numpy(numbers[span_of]),
            rows=torch.from_numpy(tail.positions.numpy() - first[span_of]),
        )

    def incoming(self) -> TailRows | None:
        """Where late rows come from; None without any."""
        if not self._late:
            return None
        counts = [len(span.token_ids) for span in self._late]
        first = [span.start - max(span.tail_start, span.floor) for span in self._late]
        return TailRows(
            tails=torch.from_numpy(np.repeat([span.tail for span in self._late], counts)),
            rows=torch.from_numpy(
                np.concatenate(
                    [np.arange(at, at + count) for at, count in zip(first, counts, strict=True)]
                )
            ),
        )

    def _logit_rows(self, spans: Sequence[Span]) -> Tensor:
        wanted = np.array([span.logits.value for span in spans], dtype=np.int64)
        first = self.tail.first_row.numpy()
        span_of = self.tail.span_of.numpy()
        kind = wanted[span_of]
        is_last = np.arange(len(span_of)) == first[1:][span_of] - 1
        chosen = (kind == Logits.ALL.value) | ((kind == Logits.LAST.value) & is_last)
        return torch.from_numpy(np.nonzero(chosen)[0])

    def _token_ids(
        self, spans: Sequence[Span], pad: int, max_history: int
    ) -> tuple[Tensor, Tensor]:
        """Token ids [T] and, per row, the token and its predecessors, nearest first: [T, max_history + 1]."""
        known: list[int] = []
        for span in spans:
            past = span.history[-max_history:] if max_history else ()
            known.extend((pad,) * (max_history - len(past)))
            known.extend(past)
            known.extend(span.token_ids)
        span_of = self.rows.span_of.numpy()
        place = np.arange(len(span_of)) + (span_of + 1) * max_history
        grams = np.array(known, dtype=np.int64)[place[:, None] - np.arange(max_history + 1)]
        return torch.from_numpy(grams[:, 0].copy()), torch.from_numpy(grams)


def _ranges(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(first position, rows, floor of the windows, first row of the decoder layers) of every span, int64."""
    numbers = [
        (span.start, len(span.token_ids), span.floor, max(span.tail_start, span.floor))
        for span in spans
    ]
    starts, counts, floors, tails = np.array(numbers, dtype=np.int64).reshape(-1, 4).T.copy()
    return starts, counts, floors, tails


def _rows(
    spans: Sequence[Span],
    starts: np.ndarray,
    counts: np.ndarray,
    floors: np.ndarray,
    *,
    window: int,
    ring_rows: int,
) -> Rows:
    """Rows ``starts`` .. of ``spans``, whose windows do not reach before ``floors``."""
    longest = max((len(span.blocks) for span in spans), default=1) or 1
    tables = np.zeros((len(spans), longest), dtype=np.int64)
    for row, span in enumerate(spans):
        tables[row, : len(span.blocks)] = span.blocks
    return Rows(
        starts=starts,
        counts=counts,
        floors=floors,
        known=np.array([span.known for span in spans], dtype=np.int64),
        slots=np.array([span.slot for span in spans], dtype=np.int64),
        tables=tables,
        window=window,
        ring_rows=ring_rows,
    )
