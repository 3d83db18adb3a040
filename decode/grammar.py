"""Where an answer stands in the language it must belong to, and which tokens may come next.

    free, until the trigger is complete  ->  inside the language  ->  over, once EOS ended it
    anything but EOS                         what XGrammar allows     anything: it never counts

A mask row has one bit for every id, 32 to a word, the lowest bit first; a set bit allows the id. Bits behind the last
id mean nothing. EOS is allowed where the language may end, and nowhere else. Special tokens are never part of a
language.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ..transfer.errors import GrammarError
from .grammar_trigger import Trigger

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

Masks = npt.NDArray[np.uint32]

#: Processor time that a mask may take on average, and what may be spent ahead, as some first masks are slow.
MASK_S: Final = 0.05
_MASKS_AHEAD_S: Final = 0.25
#: The same for accepting a token, usually 3 us. It is held much tighter, because its time is also the memory that the
#: history of an ambiguous grammar fills: some 200 MiB until it fails.
_ACCEPT_S: Final = 0.0001
_ACCEPTS_AHEAD_S: Final = 0.1

_ALL: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLanguage:
    """A language over one vocabulary; shared by all requests that ask for it. ``num_bytes`` is roughly its size."""

    compiled: "CompiledGrammar"
    trigger: Trigger | None
    stop_ids: tuple[int, ...]
    vocab_size: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Place:
    """``state`` of the trigger, None once it is complete; tokens of the matcher that belong to the walk."""

    state: int | None
    is_over: bool
    num_matched: int


class GrammarState:
    """The state of one request. It walks ahead over drafts and comes back; only `advance` moves it for good.

    Used by one thread at a time. Every method raises GrammarError when the grammar takes too long.
    """

    def __init__(self, language: CompiledLanguage) -> None:
        from xgrammar import GrammarMatcher

        self._language = language
        self._matcher = GrammarMatcher(language.compiled)
        self._place = self._committed = _Place(None if language.trigger is None else 0, False, 0)
        self._words = -(-language.vocab_size // 32)
        self._masking = _Meter("a mask", MASK_S, _MASKS_AHEAD_S)
        self._accepting = _Meter("a token", _ACCEPT_S, _ACCEPTS_AHEAD_S)

    @classmethod
    def replay(cls, language: CompiledLanguage, ids: Sequence[int]) -> "GrammarState":
        """The state after the answer `ids`, for a request that moves or comes back. Raises GrammarError if refused."""
        state = cls(language)
        state.advance(ids)
        return state

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: only EOS may follow, or it is over."""
        if self._committed.is_over:
            return True
        row = self.mask()
        for token in self._language.stop_ids:
            row[token // 32] &= ~np.uint32(1 << (token % 32))
        return self._can_end() and not row.any()

    def masks(self, drafts: Sequence[int] = ()) -> Masks:
        """Rows [len(drafts) + 1, ceil(V / 32)]: ids allowed after the answer so far and the drafts before the row.

        Rows behind a draft that is refused, or that ends the answer, are all ones: their tokens never count.
        Ends a walk. Raises GrammarError where no token at all can follow the answer.
        """
        self.reset()
        rows = np.full((len(drafts) + 1, self._words), _ALL, np.int32)
        began = time.thread_time()
        self._fill(rows, 0)
        for row, token in enumerate(drafts, start=1):
            if self._place.is_over or not self._accept(token):
                break
            self._fill(rows, row)
        self.reset()
        self._masking.add(time.thread_time() - began, len(rows))
        _check_alive(rows[0])
        return rows.view(np.uint32)

    def mask(self) -> npt.NDArray[np.uint32]:
        """The row [ceil(V / 32)] of the place where the walk is: after the answer so far, unless `extend` went on."""
        row = np.full((1, self._words), _ALL, np.int32)
        began = time.thread_time()
        self._fill(row, 0)
        self._masking.add(time.thread_time() - began, 1)
        if self._place == self._committed:
            _check_alive(row)
        return row.view(np.uint32)[0]

    def extend(self, token: int) -> npt.NDArray[np.uint32]:
        """Walk over a draft that may turn out wrong; return the row after it, all ones behind a refused one."""
        began = time.thread_time()
        if not self._place.is_over and not self._accept(token):
            self._place = _Place(None, True, self._place.num_matched)
        self._masking.add(time.thread_time() - began, 1)
        return self.mask()

    def reset(self) -> None:
        """Come back from a walk to the answer so far."""
        ahead = self._place.num_matched - self._committed.num_matched
        if ahead:
            self._matcher.rollback(ahead)
        self._place = self._committed

    def advance(self, ids: Sequence[int]) -> None:
        """Add ids to the answer. Raises GrammarError if the language refuses one; the state is of no use then."""
        self.reset()
        began = time.thread_time()
        for index, token in enumerate(ids):
            if self._place.is_over:
                break
            if not self._accept(token):
                raise GrammarError(
                    f"grammar: token {token}, number {index} of {len(ids)} to be added, is not allowed there; ids that"
                    " were sampled under another grammar cannot be replayed under this one"
                )
        self._committed = self._place
        self._accepting.add(time.thread_time() - began, len(ids))

    def _can_end(self) -> bool:
        return self._place.state is None and self._matcher.is_completed()

    def _fill(self, rows: npt.NDArray[np.int32], index: int) -> None:
        """Write a row that is all ones so far."""
        if self._place.is_over:
            return
        state, trigger = self._place.state, self._language.trigger
        if state is None or trigger is None:
            self._matcher.fill_next_token_bitmask(rows, index)
            return
        row = rows.view(np.uint32)[index]
        for token in (*trigger.refused[state], *self._language.stop_ids):
            row[token // 32] &= ~np.uint32(1 << (token % 32))

    def _accept(self, token: int) -> bool:
        """Move over a token, unless it is refused."""
        state, trigger, num = self._place.state, self._language.trigger, self._place.num_matched
        if token in self._language.stop_ids:
            allowed = self._can_end()
            if allowed:
                self._place = _Place(None, True, num)
            return allowed
        if state is None or trigger is None:
            allowed = self._matcher.accept_token(token)
            self._place = _Place(None, False, num + allowed)
            return allowed
        state, rest = trigger.step(state, token)
        if rest is None:
            self._place = _Place(state, False, num)
            return True
        allowed = not rest or self._matcher.accept_string(rest)
        if allowed:
            self._place = _Place(None, False, num + bool(rest))
        return allowed


def _check_alive(row: npt.NDArray[np.int32]) -> None:
    if not row.any():
        raise GrammarError(
            "grammar: no token can follow the answer so far, so it can never be complete; give the language an end"
        )


class _Meter:
    """Average processor time of something, which may not exceed what is allowed by more than `ahead_s` in all."""

    def __init__(self, what: str, allowed_s: float, ahead_s: float) -> None:
        self._what, self._allowed_s, self._ahead_s = what, allowed_s, ahead_s
        self._debt_s = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Raise GrammarError when too much was spent."""
        self._debt_s = max(0.0, self._debt_s + seconds - count * self._allowed_s)
        if self._debt_s > self._ahead_s:
            raise GrammarError(
                f"grammar: {self._what} takes longer than {1e3 * self._allowed_s:g} ms of processor time on average,"
                " which holds up other requests; make the grammar less ambiguous"
            )
