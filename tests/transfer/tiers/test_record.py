from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tests.transfer.layouts import SMALL, released_layout
from headrace.tests.transfer.tiers.stored import DIGEST, key_of, record_of
from headrace.transfer.errors import IntegrityError
from headrace.transfer.tiers.record import (
    HEADER_BYTES,
    Kind,
    Miss,
    find_fault,
    layout_digest,
    parent_of,
    record_name,
)


def fault(header: bytes, payload: bytes, name: bytes) -> Miss | None:
    return find_fault(header, payload, name=name, layout_digest=DIGEST)


def test_a_record_is_what_was_stored() -> None:
    record = record_of(3)
    assert len(record.header) == HEADER_BYTES == 104
    assert fault(record.header, record.payload, record.name) is None
    assert parent_of(record.header) == key_of(2)
    assert record.num_bytes == HEADER_BYTES + SMALL.block_bytes


def test_every_flipped_bit_of_header_and_payload_is_a_miss() -> None:
    record = record_of(3)
    data = record.header + record.payload
    for bit in range(8 * len(data)):
        torn = bytearray(data)
        torn[bit // 8] ^= 1 << bit % 8
        found = fault(bytes(torn[:HEADER_BYTES]), bytes(torn[HEADER_BYTES:]), record.name)
        assert found is not None, f"bit {bit} of {data.hex()}"


def test_every_truncation_is_a_miss() -> None:
    record = record_of(3)
    data = record.header + record.payload
    for length in range(len(data)):
        assert (
            fault(data[:length][:HEADER_BYTES], data[HEADER_BYTES:length], record.name) is not None
        )
    assert fault(record.header, record.payload + b"\0", record.name) is Miss.OTHER_SIZE


@given(st.binary(max_size=400), st.binary(max_size=200))
def test_no_bytes_raise(header: bytes, payload: bytes) -> None:
    assert fault(header, payload, record_of(3).name) is not None


def test_another_key_kind_or_layout_is_a_miss() -> None:
    record = record_of(3)
    assert fault(record.header, record.payload, record_of(4).name) is Miss.OTHER_KEY
    windows = record_name(Kind.WINDOWS, record.key)
    assert fault(record.header, record.payload, windows) is Miss.OTHER_KEY
    other = replace(record, layout_digest=layout_digest(replace(SMALL, model_fingerprint="other")))
    assert fault(other.header, other.payload, record.name) is Miss.OTHER_LAYOUT


def test_a_later_version_is_told_from_damage() -> None:
    header = bytearray(record_of(3).header)
    header[4] += 1
    found = fault(bytes(header), record_of(3).payload, record_of(3).name)
    assert found is Miss.OTHER_VERSION and not found.broken


def test_keys_of_another_length_are_a_bug() -> None:
    with pytest.raises(IntegrityError, match="keys of 15 and 16 bytes"):
        replace(record_of(3), key=bytes(15))


def test_overhead_per_token_of_the_released_layout() -> None:
    layout = released_layout()
    assert HEADER_BYTES / layout.block_tokens == 0.8125
    assert float(layout.bytes_per_token) == 890
