"""Stand-ins for the tokenizer and the cluster, for tests and for trying out a driver: no model, no Ray."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...transfer.request import Completion, PromptLogprob, Request, TopLogprobs
from ...transfer.timeline import Timeline
from .fields import ChatPrompt, IdsPrompt, Prompt, TextPrompt

THINKING_END = 256
EOS = 257


@dataclass(frozen=True, slots=True)
class ByteCodec:
    """A token is a byte; 256 ends thinking, 257 is EOS."""

    vocab_size: int = 258
    eos: int = EOS
    thinking_end: int | None = THINKING_END

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """See TextCodec."""
        match prompt:
            case TextPrompt(text=text):
                return tuple(text.encode())
            case IdsPrompt(ids=ids):
                return ids
            case ChatPrompt(messages=messages):
                return tuple(
                    "".join(f"{turn.role}: {turn.content}\n" for turn in messages).encode()
                )

    def decode(self, ids: Sequence[int]) -> str:
        """See TextCodec."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """See TextCodec."""
        return bytes([token]) if token < 256 else b""


@dataclass(slots=True)
class EchoGenerator:
    """Answers with the last tokens of the prompt after ``delay_s`` seconds.

    ``failure`` is asked before every answer and returns what to raise, or None. ``requests`` keeps what was asked,
    ``most_in_flight`` the highest number of requests at one time.
    """

    delay_s: float = 0.0
    failure: Callable[[Request], Exception | None] = lambda _: None
    requests: list[Request] = field(default_factory=list[Request])
    most_in_flight: int = 0
    _in_flight: int = 0

    async def generate(self, request: Request) -> Completion:
        """See Generator."""
        arrived = time.time()
        self.requests.append(request)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self._in_flight -= 1
        error = self.failure(request)
        if error is not None:
            raise error
        ids = request.prompt_ids[-request.sampling.max_tokens :]
        params = request.sampling
        return Completion(
            request_id=request.request_id,
            ids=ids,
            finish_reason="length",
            timeline=Timeline(arrived=arrived, first_token=time.time(), last_token=time.time()),
            logprobs=(-1.0,) * len(ids) if params.logprobs else (),
            top_logprobs=tuple(_likeliest(token, params.top_logprobs) for token in ids)
            if params.top_logprobs
            else (),
            prompt_logprobs=()
            if params.prompt_logprobs is None
            else tuple(
                PromptLogprob(
                    logprob=-1.0, rank=1, likeliest=_likeliest(token, params.prompt_logprobs)
                )
                for token in request.prompt_ids[1:]
            ),
        )


def _likeliest(token: int, number: int) -> TopLogprobs:
    ids = (token, *(other for other in range(number) if other != token))[:number]
    return TopLogprobs(ids=ids, logprobs=tuple(-1.0 - rank for rank in range(number)))
