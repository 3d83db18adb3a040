"""When an answer ends, and which part of its text may be shown.

text      ... the end is nigh STO|P here
stop                          STOP
unfinished: shown up to       ^ nothing that may begin a stop string is shown
finished:   cut at            ^ the earliest completed stop
"""

from collections.abc import Sequence

from ..model.detokenizer import IncrementalDecoder
from ..transfer.request import SamplingParams


def ending_ids(params: SamplingParams, eos_id: int) -> frozenset[int]:
    """Ids that end an answer."""
    return frozenset(
        params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, eos_id)
    )


class StopChecker:
    """Finds the end of one answer, token by token.

    ``limit`` is ``admission.output_limit``: max_tokens, or less where the context ends. ``pieces`` are the bytes of
    every id, none for those that yield no text; they are needed for stop strings only.
    """

    def __init__(
        self, params: SamplingParams, eos_id: int, limit: int, pieces: Sequence[bytes] = ()
    ) -> None:
        self._params = params
        self._ending = ending_ids(params, eos_id)
        self._limit = limit
        self._decoder = IncrementalDecoder(pieces, frozenset()) if params.stop else None
        self._overlap = max((len(stop) for stop in params.stop), default=1) - 1
        self._text = ""
        self.num_tokens = 0

    def push(self, ids: Sequence[int]) -> tuple[int, str | None]:
        """Take the next ids up to the one that ends the answer: how many, and why it ends or None to go on."""
        for count, token in enumerate(ids, 1):
            reason = self._push(token)
            if reason is not None:
                return count, reason
        return len(ids), None

    def _push(self, token: int) -> str | None:
        self.num_tokens += 1
        completes = self._completes_stop(token)
        if self.num_tokens > self._params.min_tokens and (completes or token in self._ending):
            return "stop"
        return "length" if self.num_tokens >= self._limit else None

    def _completes_stop(self, token: int) -> bool:
        """Whether a stop string ends in the text that ``token`` adds; keeps as much text as the next may need."""
        if self._decoder is None:
            return False
        known = len(self._text)
        text = self._text + self._decoder.push([token])
        self._text = text[max(0, len(text) - self._overlap) :]
        return earliest_stop(text, self._params.stop, known) is not None


def text_ids(
    ids: Sequence[int], finish_reason: str | None, params: SamplingParams, eos_id: int
) -> Sequence[int]:
    """``ids`` of an answer without the EOS or stop id that ended it."""
    ended = finish_reason == "stop" and len(ids) > 0 and ids[-1] in ending_ids(params, eos_id)
    return ids[:-1] if ended else ids


def earliest_stop(text: str, stops: Sequence[str], begin: int = 0) -> tuple[int, int] | None:
    """Start and end of the stop string in ``text`` that is complete first, after ``begin`` characters.

    Of several that end together the longest, which starts first, counts.
    """
    found = [
        (at + len(stop), at)
        for stop in stops
        if (at := text.find(stop, max(0, begin - len(stop) + 1))) >= 0
    ]
    if not found:
        return None
    end, start = min(found)
    return start, end


def visible_text(
    text: str,
    stops: Sequence[str],
    finished: bool,
    include_stop: bool = False,
    begin: int = 0,
) -> str:
    """The part of ``text`` that a user may see: none of a stop string, or with ``include_stop`` up to its end.

    A stop string counts if it is complete after more than ``begin`` characters, those of the first min_tokens tokens.
    While an answer is not ``finished``, whatever may begin a stop string is held back, so what was shown is never taken
    back.
    """
    stop = earliest_stop(text, stops, begin)
    if stop is not None:
        return text[: stop[1] if include_stop else stop[0]]
    if finished or include_stop:
        return text
    return text[: len(text) - max((_begun(text, stop) for stop in stops), default=0)]


def _begun(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that begin ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
