"""The bytes of a stored block: a fixed header, then what the cache arena held.

    0     4    6    7    8              16   32      48      80             96            104
    | magic | version | kind | 0 | payload bytes | key | parent | layout | payload sum | header sum | payload ...

``key`` says which tokens these are, ``layout`` how they are laid out (fingerprint of the CacheLayout), both sums are
XXH3 (128 bits over the payload, 64 over the 96 bytes before). What does not agree in every field is no record: whoever
reads gets the reason, as a Miss, and recomputes. The sums guard against accidents, not against an attacker.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from ..errors import IntegrityError
from ..layout import CacheLayout

MAGIC = b"HRKV"
VERSION = 1
KEY_BYTES = 16
NAME_BYTES = 1 + KEY_BYTES
NO_PARENT = bytes(KEY_BYTES)
Bytes = bytes | bytearray | memoryview
_FIELDS = struct.Struct("<4sHBxQ16s16s32s16s")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size


class Kind(IntEnum):
    """What a record holds."""

    BLOCK = 1
    """Global KV of one full block."""
    WINDOWS = 2
    """State of the encoder's windows behind the last token of a block, at the end of a turn."""


class Miss(StrEnum):
    """Why a record is not there, or not used."""

    ABSENT = "absent"
    TRUNCATED = "truncated"
    NOT_A_RECORD = "not a record"
    OTHER_VERSION = "other version"
    DAMAGED_HEADER = "damaged header"
    OTHER_KEY = "other key"
    OTHER_LAYOUT = "other layout"
    OTHER_SIZE = "other size"
    """A sound record, perhaps, of another length than the row it was asked into."""
    DAMAGED_PAYLOAD = "damaged payload"
    UNREADABLE = "unreadable"
    """The store failed, and says so in its log."""
    LATE = "late"
    """Not there at the deadline."""
    BUSY = "busy"
    """Too many loads wait already."""

    @property
    def broken(self) -> bool:
        """Whether the bytes themselves are at fault: such a record is removed."""
        return self in _BROKEN


_BROKEN = frozenset(
    {
        Miss.TRUNCATED,
        Miss.NOT_A_RECORD,
        Miss.DAMAGED_HEADER,
        Miss.OTHER_KEY,
        Miss.DAMAGED_PAYLOAD,
    }
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record to store; ``payload`` is a copy that nobody changes. ``cost`` is for the eviction policy."""

    kind: Kind
    key: bytes
    parent: bytes
    layout_digest: bytes
    payload: bytes
    cost: float = 1.0

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.parent) != KEY_BYTES:
            raise IntegrityError(
                f"keys of {len(self.key)} and {len(self.parent)} bytes; keys have {KEY_BYTES}"
            )

    @cached_property
    def name(self) -> bytes:
        """See ``record_name``."""
        return record_name(self.kind, self.key)

    @cached_property
    def header(self) -> bytes:
        """The first HEADER_BYTES bytes of the record."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.kind,
            len(self.payload),
            self.key,
            self.parent,
            self.layout_digest,
            xxh3_128_digest(self.payload),
        )
        return fields + _SUM.pack(xxh3_64_intdigest(fields))

    @property
    def num_bytes(self) -> int:
        """Header and payload."""
        return HEADER_BYTES + len(self.payload)


def record_name(kind: Kind, key: bytes) -> bytes:
    """What tiers know a record by: NAME_BYTES bytes, kind and key."""
    return bytes((kind,)) + key


def layout_digest(layout: CacheLayout) -> bytes:
    """What a header holds of a layout: 32 bytes."""
    return bytes.fromhex(layout.fingerprint())


def parent_of(header: Bytes) -> bytes:
    """Key of the block before; ``header`` is one that ``find_fault`` has passed."""
    parent: bytes = _FIELDS.unpack_from(header)[5]
    return parent


def payload_bytes_of(header: Bytes) -> int:
    """Bytes that should follow; ``header`` is one that ``find_fault`` has passed, or found of OTHER_SIZE."""
    num_bytes: int = _FIELDS.unpack_from(header)[3]
    return num_bytes


def find_fault(header: Bytes, payload: Bytes, *, name: bytes, layout_digest: bytes) -> Miss | None:
    """Why these bytes are not the record ``name`` of this layout; None when they are. Never raises."""
    head, body = memoryview(header).cast("B"), memoryview(payload).cast("B")
    if len(head) < HEADER_BYTES:
        return Miss.TRUNCATED
    magic, version, kind, num_bytes, key, _, layout, payload_sum = _FIELDS.unpack_from(head)
    if magic != MAGIC:
        return Miss.NOT_A_RECORD
    if version != VERSION:
        return Miss.OTHER_VERSION
    if _SUM.unpack_from(head, _FIELDS.size) != (xxh3_64_intdigest(head[: _FIELDS.size]),):
        return Miss.DAMAGED_HEADER
    if bytes((kind,)) + key != name:
        return Miss.OTHER_KEY
    if layout != layout_digest:
        return Miss.OTHER_LAYOUT
    if num_bytes != len(body):
        return Miss.OTHER_SIZE
    return None if payload_sum == xxh3_128_digest(body) else Miss.DAMAGED_PAYLOAD
