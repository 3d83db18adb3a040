from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tests.transfer.layouts import SMALL, released_layout
from headrace.transfer.errors import LayoutMismatchError, TransferError


def test_released_checkpoint_costs_890_bytes_per_token_and_120_mb_per_long_prompt():
    layout = released_layout()
    assert layout.bytes_per_token == 890
    assert layout.block_bytes == 113_920
    assert layout.slot_bytes == 3_264_576
    assert layout.handoff_bytes(131_072) == 119_918_656


def test_small_layout_by_hand():
    assert SMALL.bytes_per_token == Fraction(10)
    assert SMALL.handoff_bytes(0) == 37
    assert SMALL.handoff_bytes(1) == 37 + 3 + 0 + 2
    assert SMALL.handoff_bytes(2) == 37 + 6 + 10 + 4
    assert SMALL.handoff_bytes(11) == 37 + 33 + 50 + 22
    assert [SMALL.num_blocks(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert SMALL.valid_ranges(8) == ((0, 80),)
    assert SMALL.valid_ranges(3) == ((0, 9), (24, 10), (64, 6))
    assert SMALL.valid_ranges(1) == ((0, 3), (64, 2))
    assert [SMALL.tokens_in_block(i, 11) for i in (0, 1, 2)] == [8, 3, 0]


@given(st.integers(0, 2_000_000))
def test_even_token_counts_cost_exactly_the_bytes_per_token(half):
    layout = released_layout()
    assert layout.handoff_bytes(2 * half) == 2 * half * 890 + layout.slot_bytes


@given(st.integers(0, 100))
def test_handoff_is_the_sum_of_its_blocks(num_tokens):
    blocks = range(SMALL.num_blocks(num_tokens))
    ranges = [SMALL.valid_ranges(SMALL.tokens_in_block(i, num_tokens)) for i in blocks]
    assert SMALL.handoff_bytes(num_tokens) == SMALL.slot_bytes + sum(
        num_bytes for of_block in ranges for _, num_bytes in of_block
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_bytes": 81}, "block_bytes = 81, but the sections take 80"),
        ({"block_tokens": 0}, "block_tokens = 0"),
        ({"slot_bytes": -1}, "slot_bytes = -1"),
        ({"block_tokens": 9, "block_bytes": 90}, "must be a multiple"),
        ({"sections": SMALL.sections[1:]}, "offset 24 must be 0"),
        ({"sections": (replace(SMALL.sections[0], entry_bytes=0),)}, "at least 1"),
    ],
)
def test_sections_must_tile_the_block(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_equal_layouts_have_equal_fingerprints_and_agree():
    again = replace(SMALL)
    again.require_same(SMALL, "p0")
    assert again.fingerprint() == SMALL.fingerprint()
    assert len(SMALL.fingerprint()) == 64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_fingerprint", "other"),
        ("kv_format", "released"),
        ("slot_bytes", 38),
        ("window", 5),
        ("ring_rows", 7),
        ("keep", 7),
        ("sections", (replace(SMALL.sections[0], name="layer9"), *SMALL.sections[1:])),
    ],
)
def test_every_differing_field_is_named_with_both_values(name, value):
    other = replace(SMALL, **{name: value})
    assert other.fingerprint() != SMALL.fingerprint()
    with pytest.raises(LayoutMismatchError) as caught:
        SMALL.require_same(other, "p0")
    assert "p0" in str(caught.value)
    assert f"{name}: ours {getattr(SMALL, name)!r}, theirs {value!r}" in str(caught.value)
    assert isinstance(caught.value, TransferError)


def test_two_differences_are_both_named():
    other = replace(SMALL, window=5, keep=9)
    with pytest.raises(LayoutMismatchError, match=r"window: .*; keep: "):
        SMALL.require_same(other, "p0")
