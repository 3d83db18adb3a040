"""Drafts without a model: what followed the last time that the text ended like this.

... the cat sat on [the mat] ... the cat sat on            the longest earlier match of the text's end,
    |--- match ---| drafts                |- end -|        the latest one of equally long ones
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MIN_MATCH = 2
MAX_MATCH = 12
MAX_CANDIDATES = 16
MAX_TOKENS = 32768
"""Text that an index looks at: at most twice this before it drops the older part."""


@dataclass(frozen=True, slots=True)
class NgramDrafts:
    """Draft ids, and the chance of each that it is right if those before it are."""

    ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


class MatchCounts:
    """How often a token that followed a match of some length was right; begins with ``prior``, or with a guess."""

    _WEIGHT = 8.0
    _LIMIT = 512.0

    def __init__(self, prior: "MatchCounts | None" = None) -> None:
        self._prior = prior
        self._tries = [0.0] * (MAX_MATCH + 1)
        self._hits = [0.0] * (MAX_MATCH + 1)

    def rate(self, length: int) -> float:
        """Chance for a match of ``length`` tokens; longer ones than MAX_MATCH count as that."""
        length = min(length, MAX_MATCH)
        guess = (
            1.0 - 1.0 / (1.0 + length / 2.0) if self._prior is None else self._prior.rate(length)
        )
        return (self._hits[length] + self._WEIGHT * guess) / (self._tries[length] + self._WEIGHT)

    def count(self, length: int, hit: bool) -> None:
        """One more case. Old cases fade."""
        length = min(length, MAX_MATCH)
        if self._prior is not None:
            self._prior.count(length, hit)
        if self._tries[length] >= self._LIMIT:
            self._tries[length] *= 0.5
            self._hits[length] *= 0.5
        self._tries[length] += 1.0
        self._hits[length] += hit


class NgramIndex:
    """The text of one request, searchable by its end. It follows from the tokens alone.

    A token costs the same however long the text is. ``counts`` of other requests are where confidences start from;
    they never change which tokens are proposed.
    """

    def __init__(self, prompt_ids: Sequence[int], counts: MatchCounts | None = None) -> None:
        self._counts = MatchCounts(counts)
        self._dropped = 0
        self._proposed: tuple[int, int, tuple[int, ...]] = (0, 0, ())
        self._ids: list[int] = []
        self._before: list[int] = []
        self._last: dict[int, int] = {}
        self._rebuild(prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the text so far."""
        return self._dropped + len(self._ids)

    def push(self, ids: Iterable[int]) -> None:
        """The text goes on with ``ids``. What was proposed last is compared with them."""
        ids = list(ids)
        self._learn(ids)
        for token in ids:
            if self._ids:
                self._ids.append(token)
                key = self._ids[-2] << 32 | token
                self._before.append(self._last.get(key, -1))
                self._last[key] = len(self._ids) - 1
            else:
                self._ids, self._before = [token], [-1]
        if len(self._ids) > 2 * MAX_TOKENS:
            self._rebuild(self._ids)

    def propose(self, num: int) -> NgramDrafts:
        """Up to ``num`` tokens that may come next; none when the text's last two tokens are new together."""
        end, length = self._best_match()
        if length == 0 or num < 1:
            self._proposed = (0, 0, ())
            return NgramDrafts()
        ids = self._ids[end + 1 : end + 1 + num]
        period = len(self._ids) - 1 - end
        while len(ids) < num:
            ids.append(ids[-period])
        self._proposed = (self.num_tokens, length, tuple(ids))
        return NgramDrafts(
            tuple(ids), tuple(self._counts.rate(length + place) for place in range(num))
        )

    def _best_match(self) -> tuple[int, int]:
        """(place of its last token, length) of the longest earlier match of the end, (0, 0) without one."""
        ids, last = self._ids, len(self._ids) - 1
        best = (0, 0)
        place = self._before[last] if ids else -1
        for _ in range(MAX_CANDIDATES):
            if place < 1:
                break
            length = MIN_MATCH
            while (
                length < MAX_MATCH and length <= place and ids[place - length] == ids[last - length]
            ):
                length += 1
            if length > best[1]:
                best = (place, length)
            if length == MAX_MATCH:
                break
            place = self._before[place]
        return best

    def _learn(self, ids: Sequence[int]) -> None:
        start, length, drafts = self._proposed
        self._proposed = (0, 0, ())
        if start != self.num_tokens:
            return
        for place, (draft, token) in enumerate(zip(drafts, ids, strict=False)):
            self._counts.count(length + place, draft == token)
            if draft != token:
                return

    def _rebuild(self, ids: Sequence[int]) -> None:
        """Index the last MAX_TOKENS of ``ids``."""
        self._dropped += max(0, len(ids) - MAX_TOKENS)
        self._ids = list(ids[-MAX_TOKENS:])
        self._before = [-1] * len(self._ids)
        self._last = {}
        if len(self._ids) < MIN_MATCH:
            return
        text = np.array(self._ids, dtype=np.int64)
        keys = text[:-1] << 32 | text[1:]
        order = keys.argsort(kind="stable")
        same = keys[order[1:]] == keys[order[:-1]]
        before = np.full(len(text), -1)
        before[order[1:][same] + 1] = order[:-1][same] + 1
        self._before = before.tolist()
        self._last = dict(zip(keys.tolist(), range(1, len(text)), strict=True))
