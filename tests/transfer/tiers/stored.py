"""Records and stores for the tests of tiers."""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.tests.transfer.layouts import SMALL
from headrace.transfer.layout import CacheLayout
from headrace.transfer.tiers.record import NO_PARENT, Kind, Miss, Record, layout_digest
from headrace.transfer.tiers.store import Store

DIGEST = layout_digest(SMALL)


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little", signed=True), digest_size=16).digest()


def payload_of(number: int, num_bytes: int = SMALL.block_bytes) -> bytes:
    """What a test expects under ``key_of(number)``."""
    return hashlib.shake_128(number.to_bytes(8, "little")).digest(num_bytes)


def record_of(
    number: int,
    *,
    layout: CacheLayout = SMALL,
    kind: Kind = Kind.BLOCK,
    num_bytes: int | None = None,
) -> Record:
    return Record(
        kind=kind,
        key=key_of(number),
        parent=key_of(number - 1) if number else NO_PARENT,
        layout_digest=layout_digest(layout),
        payload=payload_of(number, layout.block_bytes if num_bytes is None else num_bytes),
    )


def read(
    store: Store, numbers: Sequence[int], num_bytes: int = SMALL.block_bytes
) -> list[bytes | Miss]:
    """Payloads out of a store, or why not."""
    rows = [bytearray(num_bytes) for _ in numbers]
    names = [record_of(number).name for number in numbers]
    headers = store.read(names, [memoryview(row) for row in rows])
    return [
        header if isinstance(header, Miss) else bytes(row)
        for header, row in zip(headers, rows, strict=True)
    ]


def rows_of(numbers: int, layout: CacheLayout = SMALL) -> torch.Tensor:
    return torch.zeros((numbers, layout.block_bytes), dtype=torch.uint8)


def until(question: Callable[[], Any], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.001)
