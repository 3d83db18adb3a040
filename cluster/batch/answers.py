"""A finished completion -> the response body of the API its line spoke."""

import time
from collections.abc import Sequence

from ...transfer.request import Completion, TopLogprobs
from .codec import TextCodec
from .fields import ChatPrompt
from .lines import BatchRequest, Endpoint
from .records import line_id

# What the OpenAI API reports for a token that is not among the likeliest ones.
UNLIKELY = -9999.0


def response_body(
    request: BatchRequest, completion: Completion, codec: TextCodec, *, job_id: str, model: str
) -> dict[str, object]:
    """The body of a ``chat.completion`` or a ``text_completion``, all but its usage."""
    chat = request.endpoint is Endpoint.CHAT
    choice = (
        _chat_choice(request, completion, codec)
        if chat
        else _text_choice(request, completion, codec)
    )
    return {
        "id": line_id("chatcmpl-" if chat else "cmpl-", job_id, request.line),
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **choice, "finish_reason": completion.finish_reason}],
    }


def _chat_choice(
    request: BatchRequest, completion: Completion, codec: TextCodec
) -> dict[str, object]:
    ids, start = completion.ids, 0
    message: dict[str, object] = {"role": "assistant"}
    if isinstance(request.prompt, ChatPrompt) and request.prompt.thinking:
        ended = codec.thinking_end in ids
        start = (
            ids.index(codec.thinking_end) + 1
            if ended and codec.thinking_end is not None
            else len(ids)
        )
        message["reasoning_content"] = codec.decode(ids[: start - 1] if ended else ids)
    message["content"] = codec.decode(ids[start:])
    logprobs = None
    if request.num_logprobs is not None:
        shown = range(start, _num_shown(completion))
        logprobs = {
            "content": [_chat_logprob(completion, at, request.num_logprobs, codec) for at in shown],
            "refusal": None,
        }
    return {"message": message, "logprobs": logprobs}


def _text_choice(
    request: BatchRequest, completion: Completion, codec: TextCodec
) -> dict[str, object]:
    choice: dict[str, object] = {"text": codec.decode(completion.ids), "logprobs": None}
    if request.num_logprobs is not None:
        shown = range(_num_shown(completion))
        tokens = [_text_of(completion.ids[at], codec) for at in shown]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        choice["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": [
                _logprob_of(completion.ids[at], completion.top_logprobs[at]) for at in shown
            ],
            "top_logprobs": [
                _alternatives(completion.top_logprobs[at], request.num_logprobs, codec)
                for at in shown
            ],
            "text_offset": offsets[:-1],
        }
    return choice


def _num_shown(completion: Completion) -> int:
    """Tokens that are part of the text: the EOS of an answer that stopped is not."""
    return len(completion.ids) - (completion.finish_reason == "stop")


def _text_of(token: int, codec: TextCodec) -> str:
    return codec.bytes_of(token).decode(errors="replace")


def _logprob_of(token: int, likeliest: TopLogprobs) -> float:
    return likeliest.logprobs[likeliest.ids.index(token)] if token in likeliest.ids else UNLIKELY


def _alternatives(likeliest: TopLogprobs, number: int, codec: TextCodec) -> dict[str, float]:
    pairs = zip(likeliest.ids[:number], likeliest.logprobs[:number], strict=True)
    return {_text_of(token, codec): logprob for token, logprob in pairs}


def _chat_logprob(
    completion: Completion, at: int, number: int, codec: TextCodec
) -> dict[str, object]:
    likeliest = completion.top_logprobs[at]
    token = completion.ids[at]
    return {
        **_entry(token, _logprob_of(token, likeliest), codec),
        "top_logprobs": _entries(likeliest.ids[:number], likeliest.logprobs[:number], codec),
    }


def _entries(
    ids: Sequence[int], logprobs: Sequence[float], codec: TextCodec
) -> list[dict[str, object]]:
    return [_entry(token, logprob, codec) for token, logprob in zip(ids, logprobs, strict=True)]


def _entry(token: int, logprob: float, codec: TextCodec) -> dict[str, object]:
    piece = codec.bytes_of(token)
    return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}
