"""One raw input line -> a request, or the reason why it is none. Pure: no files, no tokenizer, no cluster.

Two shapes of line are understood:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}   OpenAI batch
    {"id": "a", "prompt": "text", "max_tokens": 32, ...}                                                   plain

A field that would change the answer and is not supported makes the line a bad one; nothing is dropped silently.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import msgspec

from ...transfer.errors import InvalidRequestError
from ...transfer.request import MAX_SEED
from .fields import Fields, Prompt, read_chat_prompt, read_text_prompt
from .handling import ORDINARY, Handling, read_handling
from .sampling import Sampling, read_sampling
from .structured import read_structured

MAX_CUSTOM_ID_CHARACTERS = 512
_PLAIN_KEYS = ("id", "prompt")


class Endpoint(StrEnum):
    """The API a line speaks; it decides the shape of the answer."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A line that asks for an answer. ``line`` is its number in the input, from 1.

    Where ``sampling`` has no max_tokens they are filled from the context left.
    """

    line: int
    custom_id: str
    endpoint: Endpoint
    prompt: Prompt
    sampling: Sampling
    handling: Handling = ORDINARY


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be answered, and why."""

    line: int
    custom_id: str | None
    code: str
    reason: str


def parse_line(line: int, raw: bytes) -> BatchRequest | BadLine:
    """Reads one line of JSON (UTF-8, without its line end). Never raises for its content."""
    try:
        value: object = msgspec.json.decode(raw)
    except RecursionError:
        return BadLine(
            line=line, custom_id=None, code="invalid_json", reason="JSON nested too deep"
        )
    except msgspec.MsgspecError as error:
        return BadLine(
            line=line, custom_id=None, code="invalid_json", reason=_json_reason(raw, error)
        )
    return parse_row(line, value)


def parse_row(line: int, value: object) -> BatchRequest | BadLine:
    """Reads one line that is already a Python value (a Parquet row). Never raises for its content."""
    custom_id: str | None = None
    try:
        if not isinstance(value, dict):
            raise InvalidRequestError("the line is not a JSON object")
        row = cast("dict[str, object]", value)
        plain = "body" not in row and all(key in row for key in _PLAIN_KEYS)
        custom_id = _read_id(row, "id" if plain else "custom_id")
        return _plain(line, custom_id, row) if plain else _openai(line, custom_id, row)
    except InvalidRequestError as error:
        return BadLine(line=line, custom_id=custom_id, code="invalid_request", reason=str(error))


def seed_of(custom_id: str) -> int:
    """The random stream of a line that names no seed: the same on every run."""
    digest = hashlib.blake2b(custom_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED


def _json_reason(raw: bytes, error: msgspec.MsgspecError) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as decoding:
        return f"not UTF-8: byte {raw[decoding.start]:#04x} at offset {decoding.start} of the line"
    return f"not valid JSON: {error}"


def _read_id(row: Mapping[str, object], key: str) -> str:
    value = row.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and key == "id":
        value = str(value)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID_CHARACTERS:
        raise InvalidRequestError(
            f"{key} = {_short(value)} is not allowed: a string of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters"
            + (
                ""
                if key in row
                else f" (a line has custom_id, url and body, or {' and '.join(_PLAIN_KEYS)})"
            )
        )
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(line: int, custom_id: str, row: Mapping[str, object]) -> BatchRequest:
    fields = Fields({key: value for key, value in row.items() if key != "id"}, "")
    return _request(line, custom_id, Endpoint.COMPLETIONS, fields)


def _openai(line: int, custom_id: str, row: Mapping[str, object]) -> BatchRequest:
    for key in row:
        if key not in ("custom_id", "method", "url", "body"):
            raise InvalidRequestError(
                f"{key} is not a field of a batch line: custom_id, method, url, body"
            )
    method = row.get("method", "POST")
    if method != "POST":
        raise InvalidRequestError(f"method = {_short(method)} is not allowed: POST")
    url = row.get("url")
    if url not in tuple(Endpoint):
        raise InvalidRequestError(f"url = {_short(url)} is not allowed: {' or '.join(Endpoint)}")
    body = row.get("body")
    if isinstance(body, str):  # Parquet files often hold the body as JSON text
        try:
            body = cast("object", msgspec.json.decode(body))
        except (RecursionError, msgspec.MsgspecError) as error:
            raise InvalidRequestError(f"body is text but not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequestError(f"body = {_short(body)} is not allowed: a JSON object")
    return _request(
        line,
        custom_id,
        Endpoint(cast("str", url)),
        Fields(cast("dict[str, object]", body), "body."),
    )


def _request(line: int, custom_id: str, endpoint: Endpoint, fields: Fields) -> BatchRequest:
    chat = endpoint is Endpoint.CHAT
    prompt = read_chat_prompt(fields) if chat else read_text_prompt(fields)
    prompt, grammar = read_structured(fields, prompt)
    sampling = read_sampling(fields, chat=chat, default_seed=seed_of(custom_id), grammar=grammar)
    handling = read_handling(fields)
    fields.finish()
    return BatchRequest(
        line=line,
        custom_id=custom_id,
        endpoint=endpoint,
        prompt=prompt,
        sampling=sampling,
        handling=handling,
    )
