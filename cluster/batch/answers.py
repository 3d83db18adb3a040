"""Finished completions -> the response body of the API their line spoke."""

import time
from collections.abc import Sequence

from ...decode.stops import text_ids, visible_text
from ...model.answer import parse_answer
from ...transfer.request import Completion, Request
from .codec import TextCodec
from .fields import ChatPrompt
from .lines import BatchRequest, Endpoint
from .logprobs import chat_logprobs, prompt_logprobs, text_logprobs
from .preparation import Prepared
from .records import line_id


def response_body(
    prepared: Prepared,
    completions: Sequence[Completion],
    codec: TextCodec,
    *,
    job_id: str,
    model: str,
) -> dict[str, object]:
    """The body of a ``chat.completion`` or a ``text_completion``, all but its usage: a choice for each completion."""
    line, first = prepared.line, prepared.requests[0]
    chat = line.endpoint is Endpoint.CHAT
    choice = _chat_choice if chat else _text_choice
    answers = zip(prepared.requests, completions, strict=True)
    body: dict[str, object] = {
        "id": line_id("chatcmpl-" if chat else "cmpl-", job_id, line.line),
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {"index": at, "finish_reason": answer[1].finish_reason, **choice(line, *answer, codec)}
            for at, answer in enumerate(answers)
        ],
    }
    if chat and first.sampling.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(first, completions[0], codec)
    return body


def _chat_choice(
    line: BatchRequest, request: Request, completion: Completion, codec: TextCodec
) -> dict[str, object]:
    ids = text_ids(completion.ids, completion.finish_reason, request.sampling, codec.eos)
    text = _visible(line, request, completion, codec)
    start, whole = 0, text
    message: dict[str, object] = {"role": "assistant"}
    if isinstance(line.prompt, ChatPrompt) and line.prompt.thinking:
        ended = codec.thinking_end in ids
        start = (
            ids.index(codec.thinking_end) + 1
            if ended and codec.thinking_end is not None
            else len(ids)
        )
        reasoning = codec.decode(ids[: start - 1] if ended else ids)
        message["reasoning_content"] = text[: len(reasoning)]
        text = text[len(codec.decode(ids[:start])) :]
    message["content"] = text
    logprobs = None
    if (number := line.sampling.num_logprobs) is not None:
        content = chat_logprobs(completion, range(start, len(ids)), number, codec)
        logprobs = {"content": content, "refusal": None}
    if isinstance(line.prompt, ChatPrompt) and line.prompt.tools:
        message, is_call = parse_answer(
            whole,
            thinking=line.prompt.thinking,
            in_calls=line.prompt.tool_choice == "required",
            is_whole=completion.finish_reason == "stop",
            call_prefix=f"call-{request.request_id}-",
        )
        if is_call:
            return {"message": message, "logprobs": logprobs, "finish_reason": "tool_calls"}
    return {"message": message, "logprobs": logprobs}


def _text_choice(
    line: BatchRequest, request: Request, completion: Completion, codec: TextCodec
) -> dict[str, object]:
    ids = text_ids(completion.ids, completion.finish_reason, request.sampling, codec.eos)
    choice: dict[str, object] = {
        "text": _visible(line, request, completion, codec),
        "logprobs": None,
    }
    if (number := line.sampling.num_logprobs) is not None:
        choice["logprobs"] = text_logprobs(completion, len(ids), number, codec)
    if request.sampling.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(request, completion, codec)
    return choice


def _visible(line: BatchRequest, request: Request, completion: Completion, codec: TextCodec) -> str:
    """The answer's text, cut at the stop string that ended it."""
    params, include_stop = request.sampling, line.sampling.include_stop
    ids = completion.ids
    if not include_stop:
        ids = text_ids(ids, completion.finish_reason, params, codec.eos)
    text, begin = codec.decode(ids), 0
    if params.stop and params.min_tokens:
        before = codec.decode(ids[: params.min_tokens])
        begin = len(before)
        while not text.startswith(before[:begin]):  # the last character was not whole yet
            begin -= 1
    return visible_text(text, params.stop, True, include_stop, begin)
