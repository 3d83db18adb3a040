"""The text of one answer, written as its tokens come."""

from typing import TextIO

from ..decode.stops import ending_ids, visible_text
from ..model.tokenizer import Tokenizer
from ..transfer.request import SamplingParams


class AnswerWriter:
    """Never shows a part of a stop string. ``shown`` is the text so far, which ``out`` gets, if there is one."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, out: TextIO | None) -> None:
        self._params = params
        self._decoder = tokenizer.incremental()
        self._ending = ending_ids(params, tokenizer.eos_token_id)
        self._out = out
        self._text = self.shown = ""
        self._num_tokens = self._begin = 0

    def push(self, token: int, finish_reason: str | None) -> None:
        """Take the next token; the last one has a reason."""
        finished = finish_reason is not None
        ended = finish_reason == "stop" and token in self._ending
        self._text += "" if ended else self._decoder.push([token])
        self._num_tokens += 1
        if self._num_tokens <= self._params.min_tokens:
            self._begin = len(self._text)
        if finished:
            self._text += self._decoder.finish()
        visible = visible_text(self._text, self._params.stop, finished, begin=self._begin)
        if self._out is not None:
            self._out.write(visible[len(self.shown) :] + "\n" * finished)
            self._out.flush()
        self.shown = visible
