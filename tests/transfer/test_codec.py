from contextlib import suppress
from dataclasses import fields, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tests.transfer.layouts import SMALL
from headrace.transfer.codec import MAX_MESSAGE_BYTES, TAGS, WIRE_VERSION, decode, encode
from headrace.transfer.errors import MessageError
from headrace.transfer.messages import (
    MAX_BLOCKS,
    ConfirmLease,
    Handoff,
    LeaseAlive,
    LeaseGone,
    Pairing,
    ReleaseLease,
)

HANDOFF = Handoff(
    request_id="r1",
    generation=2,
    holder="prefill-0",
    incarnation="abc",
    lease_id="abc/7",
    lease_s=30.0,
    layout_fingerprint=SMALL.fingerprint(),
    num_tokens=19,
    blocks=(7, 8, 3),
    slot=2,
    block_checksums=(1, 2**63 - 1, 0),
    slot_checksum=5,
)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
counts = st.integers(0, 2**48 - 1)
id_lists = st.lists(counts, max_size=20).map(tuple)
sum_lists = st.lists(st.integers(0, 2**63 - 1), max_size=20).map(tuple)
messages = st.one_of(
    st.builds(
        Handoff,
        request_id=names,
        generation=counts,
        holder=names,
        incarnation=names,
        lease_id=names,
        lease_s=st.floats(0, 86_400, exclude_min=True),
        layout_fingerprint=names,
        num_tokens=counts,
        blocks=id_lists,
        slot=counts,
        block_checksums=sum_lists,
        slot_checksum=st.integers(0, 2**63 - 1),
    ),
    st.builds(
        ConfirmLease,
        lease_id=names,
        incarnation=names,
        request_id=names,
        generation=counts,
        nonce=counts,
    ),
    st.builds(LeaseAlive, lease_id=names, nonce=counts),
    st.builds(LeaseGone, lease_id=names, nonce=counts, reason=names),
    st.builds(ReleaseLease, lease_id=names, incarnation=names, request_id=names, generation=counts),
    st.builds(
        Pairing,
        name=names,
        incarnation=names,
        transport=names,
        layout=st.just(SMALL),
        arena_bytes=st.tuples(counts, counts, counts),
        address=st.binary(max_size=200),
    ),
)


def packed(version, tag, values) -> bytes:
    return msgspec.msgpack.encode([version, tag, values])


def values_of(message) -> list[object]:
    return [getattr(message, field.name) for field in fields(message)]


@given(messages)
def test_every_message_comes_back(message):
    data = encode(message)
    assert decode(data) == message
    assert type(decode(data)) is type(message)


def test_tags_are_for_ever():
    assert {
        1: Handoff,
        2: ConfirmLease,
        3: LeaseAlive,
        4: LeaseGone,
        5: ReleaseLease,
        6: Pairing,
    } == TAGS
    assert encode(LeaseAlive(lease_id="a", nonce=1)) == b"\x93\x02\x03\x92\xa1a\x01"


def test_a_handoff_of_a_million_tokens_is_a_small_message():
    blocks = tuple(range(8192))
    handoff = replace(HANDOFF, blocks=blocks, block_checksums=tuple(2**62 + b for b in blocks))
    assert len(encode(handoff)) < 110_000


@given(st.binary(max_size=300))
def test_random_bytes_are_a_message_error(data):
    with pytest.raises(MessageError):
        decode(data)


@given(messages, st.data())
def test_truncated_messages_are_a_message_error(message, data):
    encoded = encode(message)
    with pytest.raises(MessageError):
        decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@given(messages, st.binary(min_size=1, max_size=5))
def test_trailing_bytes_are_a_message_error(message, more):
    with pytest.raises(MessageError):
        decode(encode(message) + more)


@given(messages, st.data())
def test_a_changed_byte_gives_another_message_or_a_message_error(message, data):
    encoded = bytearray(encode(message))
    where = data.draw(st.integers(0, len(encoded) - 1))
    encoded[where] ^= data.draw(st.integers(1, 255))
    with suppress(MessageError):
        assert encode(decode(bytes(encoded))) == bytes(encoded)


@pytest.mark.parametrize("version", [0, WIRE_VERSION + 1, -1, 2**64 - 1, "1", None])
def test_another_version_is_refused(version):
    data = packed(version, 3, ["a", 1])
    with pytest.raises(MessageError):
        decode(data)


@pytest.mark.parametrize("tag", [0, 7, -1, "Handoff", None])
def test_an_unknown_tag_is_refused(tag):
    with pytest.raises(MessageError):
        decode(packed(WIRE_VERSION, tag, ["a", 1]))


def test_the_body_of_another_message_is_refused():
    with pytest.raises(MessageError):
        decode(packed(WIRE_VERSION, 4, values_of(LeaseAlive(lease_id="a", nonce=1))))


@pytest.mark.parametrize("change", [lambda v: [*v, 1], lambda v: v[:-1], lambda v: {"a": v}])
def test_extra_and_missing_fields_are_refused(change):
    values = values_of(HANDOFF)
    assert decode(packed(WIRE_VERSION, 1, values)) == HANDOFF
    with pytest.raises(MessageError):
        decode(packed(WIRE_VERSION, 1, change(values)))


def test_extra_fields_inside_a_layout_are_refused():
    pairing = Pairing(
        name="p",
        incarnation="i",
        transport="nixl",
        layout=SMALL,
        arena_bytes=(1, 1, 0),
        address=b"",
    )
    values = values_of(pairing)
    layout = msgspec.to_builtins(SMALL)
    assert decode(packed(WIRE_VERSION, 6, values)) == pairing
    values[3] = {**layout, "colour": 1}
    with pytest.raises(MessageError, match="extra fields"):
        decode(packed(WIRE_VERSION, 6, values))
    values[3] = {**layout, "block_bytes": 81}
    with pytest.raises(MessageError, match="sections take 80"):
        decode(packed(WIRE_VERSION, 6, values))


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": tuple(range(MAX_BLOCKS + 1))},
        {"slot": -1},
        {"slot": 2**48},
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"request_id": "\ud800"},
        {"lease_s": 0.0},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
        {"slot_checksum": 2**63},
        {"num_tokens": "3"},
    ],
)
def test_values_out_of_bounds_neither_leave_nor_enter(change):
    bad = replace(HANDOFF, **change)
    with pytest.raises(MessageError):
        encode(bad)
    if change.get("request_id") != "\ud800":
        with pytest.raises(MessageError):
            decode(packed(WIRE_VERSION, 1, values_of(bad)))


def test_size_depth_and_promised_lengths_are_bounded():
    for data in (
        b"\x00" * (MAX_MESSAGE_BYTES + 1),
        b"\x93\x02\x01" + b"\x91" * 1_000_000,
        b"\x93\x02\x01\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        packed(WIRE_VERSION, 1, [[[]]] * 12),
    ):
        with pytest.raises(MessageError):
            decode(data)


def test_a_lease_length_given_as_an_integer_is_sent_as_a_float():
    assert decode(encode(replace(HANDOFF, lease_s=30))) == HANDOFF
