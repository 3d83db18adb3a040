"""Messages to bytes and back: msgpack, ``[version, tag, [field, field, ...]]``, fields in the order of the class.

A message has exactly one encoding. Decoding is bounded (size, list lengths, number ranges come from ``messages``),
makes no class but those of the table, and raises MessageError for everything else.
"""

from dataclasses import fields
from typing import Any, get_type_hints

import msgspec

from .errors import MessageError
from .messages import (
    ConfirmLease,
    Handoff,
    LeaseAlive,
    LeaseGone,
    Message,
    Pairing,
    ReleaseLease,
)

WIRE_VERSION = 2
MAX_MESSAGE_BYTES = 2 << 20

TAGS: dict[int, type[Message]] = {
    1: Handoff,
    2: ConfirmLease,
    3: LeaseAlive,
    4: LeaseGone,
    5: ReleaseLease,
    6: Pairing,
}


class _Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: int
    tag: int
    body: msgspec.Raw


class _Format:
    """How the fields of one message class look on the wire."""

    def __init__(self, cls: type[Message]) -> None:
        hints = get_type_hints(cls, include_extras=True)
        self.cls: type[Any] = cls
        self.names = [field.name for field in fields(cls)]
        self.row: Any = tuple.__class_getitem__(tuple(hints[name] for name in self.names))
        self.decoder = msgspec.msgpack.Decoder(self.row)

    def encode(self, message: Message) -> bytes:
        values = tuple(getattr(message, name) for name in self.names)
        return _ENCODER.encode(msgspec.convert(values, self.row))

    def decode(self, body: bytes | msgspec.Raw) -> Message:
        return self.cls(**dict(zip(self.names, self.decoder.decode(body), strict=True)))


_ENCODER = msgspec.msgpack.Encoder()
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_FORMATS = {tag: _Format(cls) for tag, cls in TAGS.items()}
_TAG_OF: dict[type, int] = {cls: tag for tag, cls in TAGS.items()}
_BAD_INPUT = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError)


def encode(message: Message) -> bytes:
    """Bytes of a message. Raises MessageError when a field lies outside its bounds."""
    tag = _TAG_OF[type(message)]
    try:
        body = _FORMATS[tag].encode(message)
    except _BAD_INPUT as error:
        raise MessageError(f"{type(message).__name__} cannot be sent: {error}") from error
    data = _ENCODER.encode((WIRE_VERSION, tag, msgspec.Raw(body)))
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"{type(message).__name__} takes {len(data)} bytes; at most {MAX_MESSAGE_BYTES} may be sent"
        )
    return data


def decode(data: bytes) -> Message:
    """The message that ``encode`` made these bytes from. Raises MessageError for all other bytes."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        envelope = _ENVELOPE.decode(data)
    except _BAD_INPUT as error:
        raise MessageError(f"not a headrace message: {error}") from error
    if envelope.version != WIRE_VERSION:
        raise MessageError(
            f"message of wire version {envelope.version}; this is version {WIRE_VERSION}: "
            "run the same release of headrace on every rank"
        )
    if envelope.tag not in _FORMATS:
        raise MessageError(f"message tag {envelope.tag} is unknown; known are {sorted(_FORMATS)}")
    form = _FORMATS[envelope.tag]
    try:
        message = form.decode(envelope.body)
    except _BAD_INPUT as error:
        raise MessageError(f"malformed {form.cls.__name__}: {error}") from error
    if encode(message) != data:
        raise MessageError(f"{form.cls.__name__} is not in its one encoding (extra fields?)")
    return message
