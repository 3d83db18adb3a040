"""Input lines -> what the runner does with each: an id claimed, a prompt encoded, room for the answer counted."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ...transfer.errors import InvalidRequestError
from ...transfer.request import MAX_SEED, Request
from .bookkeeping import LineSet, SeenIds
from .codec import TextCodec
from .fields import ChatPrompt
from .lines import BadLine, BatchRequest, Endpoint, parse_line, parse_row
from .records import DUPLICATE
from .source import InputLine, RawLine, Row, Source

TOO_LONG = "context_length_exceeded"
# Answers of lines that name no max_tokens: the OpenAI default for completions, the model's advice for chats.
COMPLETION_TOKENS = 16
CHAT_TOKENS = 8192
THINKING_TOKENS = 65536
MAX_EFFORT_TOKENS = 131072


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A line that is ready for the cluster: a request for each choice, whose ids are unique over jobs."""

    line: BatchRequest
    requests: tuple[Request, ...]


def prepare(
    source: Source,
    done: LineSet,
    seen: SeenIds,
    codec: TextCodec,
    *,
    job_id: str,
    context_tokens: int,
) -> Iterator[Prepared | BadLine]:
    """Every line that is not done yet, in the order of the input; of lines with one custom_id the first counts."""
    for line in source.lines():
        if line.number in done:
            continue
        parsed = _parse(line)
        if parsed.custom_id is not None and not seen.claim(parsed.custom_id):
            reason = f"custom_id {parsed.custom_id!r} was used by an earlier line"
            yield BadLine(
                line=line.number, custom_id=parsed.custom_id, code=DUPLICATE, reason=reason
            )
        elif isinstance(parsed, BadLine):
            yield parsed
        else:
            yield _encode(parsed, codec, job_id, context_tokens)


def _parse(line: InputLine) -> BatchRequest | BadLine:
    match line:
        case RawLine(number, data):
            return parse_line(number, data)
        case Row(number, value):
            return parse_row(number, value)
        case _:
            return BadLine(line=line.number, custom_id=None, code=line.code, reason=line.reason)


def _encode(
    line: BatchRequest, codec: TextCodec, job_id: str, context_tokens: int
) -> Prepared | BadLine:
    try:
        ids = codec.encode(line.prompt)
        if max(ids) >= codec.vocab_size:
            raise InvalidRequestError(
                f"prompt holds token id {max(ids)}, and the vocabulary ends at {codec.vocab_size}"
            )
        line.sampling.params.check_vocabulary(codec.vocab_size)
    except InvalidRequestError as error:
        return BadLine(
            line=line.line, custom_id=line.custom_id, code="invalid_request", reason=str(error)
        )
    room = context_tokens - len(ids)
    params = line.sampling.params
    wanted = params.max_tokens
    if not line.sampling.has_max_tokens:
        wanted = max(min(_default_max_tokens(line), room), params.min_tokens, 1)
    if wanted > room:
        reason = f"a prompt of {len(ids)} tokens and max_tokens {wanted} exceed the context of {context_tokens} tokens"
        return BadLine(line=line.line, custom_id=line.custom_id, code=TOO_LONG, reason=reason)
    number = line.sampling.num_choices
    requests = tuple(
        Request(
            request_id=f"{job_id}-{line.line}" + (f".{choice}" if number > 1 else ""),
            prompt_ids=ids,
            sampling=replace(
                params, max_tokens=wanted, seed=(params.seed + choice) % (MAX_SEED + 1)
            ),
            **asdict(line.handling),
        )
        for choice in range(number)
    )
    return Prepared(line=line, requests=requests)


def _default_max_tokens(line: BatchRequest) -> int:
    if line.endpoint is Endpoint.COMPLETIONS:
        return COMPLETION_TOKENS
    if not (isinstance(line.prompt, ChatPrompt) and line.prompt.thinking):
        return CHAT_TOKENS
    return MAX_EFFORT_TOKENS if line.prompt.effort == "max" else THINKING_TOKENS
