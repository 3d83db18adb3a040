"""A pass cut into parts that run on threads of their own.

Rows are independent but for the caches: where the cut goes through a request, the later part enters a layer when the
earlier one has left it, so it finds the keys that it would have found in the next pass. A row's bits do not depend on
the rows beside it, so cutting changes none.

    thread 1   rows 0 .. n     layer 0 | layer 1 | layer 2 | ...
    thread 2   rows n .. T               layer 0 | layer 1 | ...
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from .batch import Logits, Span

_LEAST_ROWS = 64
"""Rows of a part below which passing the GIL from thread to thread costs more than a second core saves."""
_LAYER_TIMEOUT_S = 600.0


class Order:
    """What an earlier part of a pass has finished, for the part that follows it."""

    def __init__(self, num_steps: int) -> None:
        self._done = [threading.Event() for _ in range(num_steps)]
        self._failed = False

    def finish(self, step: int) -> None:
        """Step ``step`` of the earlier part is done."""
        self._done[step].set()

    def end(self, failed: bool) -> None:
        """The earlier part is over: nothing more to wait for."""
        self._failed = failed
        for event in self._done:
            event.set()

    def wait(self, step: int) -> None:
        """Wait until ``step`` is done; RuntimeError where the earlier part failed or is stuck."""
        if not self._done[step].wait(_LAYER_TIMEOUT_S):
            raise RuntimeError(
                f"an earlier part of this pass has not left step {step} for {_LAYER_TIMEOUT_S} s"
            )
        if self._failed:
            raise RuntimeError("an earlier part of this pass failed: see its error")


def cut_spans(spans: Sequence[Span], num_parts: int) -> list[list[Span]]:
    """``spans`` in order, as up to ``num_parts`` parts of about as many rows, none of very few.

    A span is cut where that is needed for halves to be near; short spans stay whole.
    """
    total = sum(len(span.token_ids) for span in spans)
    num_parts = max(1, min(num_parts, total // _LEAST_ROWS))
    parts: list[list[Span]] = [[]]
    taken = 0
    for span in spans:
        rest: Span | None = span
        while rest is not None:
            room = -(-total * len(parts) // num_parts) - taken
            head, rest = _cut(rest, room)
            parts[-1].append(head)
            taken += len(head.token_ids)
            if taken >= total * len(parts) // num_parts and len(parts) < num_parts:
                parts.append([])
    return [part for part in parts if part] or [[]]


def _cut(span: Span, rows: int) -> tuple[Span, Span | None]:
    """The first ``rows`` of ``span`` and the rest; the whole where either would be short."""
    if rows < _LEAST_ROWS or len(span.token_ids) - rows < _LEAST_ROWS:
        return span, None
    past = span.history + span.token_ids[:rows]
    head = replace(
        span,
        token_ids=span.token_ids[:rows],
        logits=Logits.ALL if span.logits is Logits.ALL else Logits.NONE,
    )
    tail = replace(
        span,
        token_ids=span.token_ids[rows:],
        start=span.start + rows,
        history=past[-max(len(span.history), _LEAST_ROWS) :],
    )
    return head, tail


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]`` on the calling thread alone: torch would wake threads of its own, and those spin."""
    return torch.from_numpy(x.numpy()[rows.numpy()])


class Crew:
    """Threads that compute the parts of a pass beside the caller's."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def run(self, parts: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Results of ``parts``, the first computed by the caller; the first error after all have ended."""
        if len(parts) == 1:
            return [parts[0]()]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(thread_name_prefix="pass")
        futures: list[Future[Tensor]] = [self._pool.submit(part) for part in parts[1:]]
        try:
            first = parts[0]()
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [first, *(future.result() for future in futures)]
