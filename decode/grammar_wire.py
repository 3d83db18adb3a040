"""What a rank and its grammar worker say to each other: frames of MessagePack, each after its length in four bytes."""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

T = TypeVar("T")

_LENGTH_BYTES = 4


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame to a worker: the tokenizer, and what a compile may take."""

    pieces: list[bytes]
    stop_ids: list[int]
    compile_timeout_s: float
    queue_timeout_s: float
    memory_bytes: int
    mask_s: float
    workers: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A grammar to try out."""

    number: int
    kind: str
    text: str


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What came of a job; ``reason`` says why the grammar is refused. A timeout may pass on an idler machine."""

    number: int
    reason: str | None = None
    timed_out: bool = False


class Frames:
    """Frames out of a stream of bytes that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> None:
        """Take the next bytes."""
        self._buffer += data

    def take(self, kind: type[T]) -> T | None:
        """The next frame, or None while it is not whole. Raises msgspec.MsgspecError for one of another kind."""
        end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if len(self._buffer) < max(end, _LENGTH_BYTES):
            return None
        body = bytes(self._buffer[_LENGTH_BYTES:end])
        del self._buffer[:end]
        return msgspec.msgpack.decode(body, type=kind)

    def take_all(self, kind: type[T]) -> Iterator[T]:
        """All frames that are whole."""
        while (frame := self.take(kind)) is not None:
            yield frame


def frame(message: Hello | Job | Verdict) -> bytes:
    """The bytes of a message."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body
