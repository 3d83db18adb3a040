"""Logprobs in the forms of the APIs: OpenAI's for answers, vLLM's for prompts."""

from collections.abc import Sequence

from ...transfer.request import Completion, Request
from .codec import TextCodec


def chat_logprobs(
    completion: Completion, shown: Sequence[int], number: int, codec: TextCodec
) -> list[dict[str, object]]:
    """``content`` of a chat choice's logprobs: tokens at the places ``shown``, each with ``number`` alternatives."""
    return [
        {
            **_entry(completion.ids[at], completion.logprobs[at], codec),
            "top_logprobs": [
                _entry(token, logprob, codec)
                for token, logprob in _likeliest(completion, at, number)
            ],
        }
        for at in shown
    ]


def text_logprobs(
    completion: Completion, num_shown: int, number: int, codec: TextCodec
) -> dict[str, object]:
    """Logprobs of a text choice: the first ``num_shown`` tokens; alternatives are ``number`` and the token itself."""
    tokens = [_text_of(token, codec) for token in completion.ids[:num_shown]]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    alternatives: list[dict[str, float]] = []
    for at in range(num_shown):
        pairs = [*_likeliest(completion, at, number), (completion.ids[at], completion.logprobs[at])]
        found: dict[str, float] = {}
        for token, logprob in pairs:
            found.setdefault(_text_of(token, codec), logprob)
        alternatives.append(found)
    return {
        "tokens": tokens,
        "token_logprobs": list(completion.logprobs[:num_shown]),
        "top_logprobs": alternatives,
        "text_offset": offsets[:-1],
    }


def prompt_logprobs(
    request: Request, completion: Completion, codec: TextCodec
) -> list[dict[str, dict[str, object]] | None]:
    """vLLM's ``prompt_logprobs``: nothing for the first token, then the token itself and the likeliest, by id."""
    found: list[dict[str, dict[str, object]] | None] = [None]
    entries = zip(request.prompt_ids[1:], completion.prompt_logprobs, strict=True)
    for token, entry in entries:
        ranked = [(token, entry.logprob, entry.rank)]
        likeliest = zip(entry.likeliest.ids, entry.likeliest.logprobs, strict=True)
        ranked += [(other, logprob, rank) for rank, (other, logprob) in enumerate(likeliest, 1)]
        place: dict[str, dict[str, object]] = {}
        for other, logprob, rank in ranked:
            value: dict[str, object] = {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": _text_of(other, codec),
            }
            place.setdefault(str(other), value)
        found.append(place)
    return found


def _likeliest(completion: Completion, at: int, number: int) -> list[tuple[int, float]]:
    if not number:
        return []
    top = completion.top_logprobs[at]
    return list(zip(top.ids[:number], top.logprobs[:number], strict=True))


def _entry(token: int, logprob: float, codec: TextCodec) -> dict[str, object]:
    piece = codec.bytes_of(token)
    return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


def _text_of(token: int, codec: TextCodec) -> str:
    return codec.bytes_of(token).decode(errors="replace")
