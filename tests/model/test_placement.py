"""Placements: the initial one, what is refused, and the wire."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.placement import ExpertPlacement, slots_per_rank
from headrace.transfer.errors import ConfigError, MessageError, PlacementError


@given(st.integers(1, 40), st.integers(1, 64), st.integers(0, 70))
def test_the_initial_placement_is_even_and_uses_every_slot(
    experts: int, ranks: int, redundant: int
) -> None:
    per_rank = slots_per_rank(experts, ranks, redundant)
    placement = ExpertPlacement.initial(
        layers=2, num_experts=experts, ranks=ranks, slots_per_rank=per_rank
    )
    assert (placement.slots[0] == placement.slots[1]).all()
    assert (placement.slots >= 0).all()
    assert placement.copies.sum() == 2 * ranks * per_rank
    assert ranks * per_rank >= min(experts + redundant, ranks * experts)
    copies = placement.copies[0]
    assert (np.diff(copies) <= 1).all()
    for expert in range(experts):
        assert expert in placement.slots[0, expert * ranks // experts]


def test_redundant_slots_hold_the_first_experts() -> None:
    placement = ExpertPlacement.initial(layers=1, num_experts=4, ranks=2, slots_per_rank=3)
    # Expert 0 lies on rank 0 already, and so does 1; 2 and 3 on rank 1.
    assert placement.slots[0].tolist() == [[0, 1, 2], [2, 3, 0]]
    assert ExpertPlacement.initial(
        layers=1, num_experts=2, ranks=1, slots_per_rank=3
    ).slots.tolist() == [[[0, 1, -1]]]


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 ranks with 3 expert slots each cannot hold 7"):
        ExpertPlacement.initial(layers=1, num_experts=7, ranks=2, slots_per_rank=3)


GOOD = [[[0, 1], [2, -1]], [[1, 0], [2, 0]]]


@pytest.mark.parametrize(
    ("place", "expert", "message"),
    [
        ((1, 1, 0), 1, "layer 1: no rank of 2 holds expert 2"),
        ((0, 0, 1), 0, "layer 0, rank 0: expert 0 lies in 2 slots of one rank"),
        ((1, 0, 1), 3, "layer 1, rank 0, slot 1: expert 3 is not one of 0 to 2"),
        ((1, 0, 1), -2, "layer 1, rank 0, slot 1: expert -2 is not one of 0 to 2"),
    ],
)
def test_a_broken_placement_is_named(
    place: tuple[int, int, int], expert: int, message: str
) -> None:
    slots = np.array(GOOD, np.int32)
    good = ExpertPlacement(num_experts=3, slots=slots)
    slots[place] = expert
    assert good.slots.tolist() == GOOD
    with pytest.raises(PlacementError, match=message):
        ExpertPlacement(num_experts=3, slots=slots)
    with pytest.raises(PlacementError, match=message):
        good.with_layer(place[0], slots[place[0]])


def test_numbers_that_do_not_fit_and_fractions_are_refused() -> None:
    wide = np.array(GOOD, np.int64)
    wide[0, 0, 0] = 2**32
    with pytest.raises(PlacementError, match="expert 4294967296 is not one of"):
        ExpertPlacement(num_experts=3, slots=wide)
    with pytest.raises(PlacementError, match="float64"):
        ExpertPlacement(num_experts=3, slots=np.array(GOOD, float))
    with pytest.raises(PlacementError, match="none of them 0"):
        ExpertPlacement(num_experts=3, slots=np.zeros((1, 0, 2), np.int32))


def test_bytes_come_back_and_others_are_refused() -> None:
    placement = ExpertPlacement(num_experts=3, slots=np.array(GOOD, np.int32))
    data = placement.to_bytes()
    back = ExpertPlacement.from_bytes(data)
    assert back.num_experts == 3
    assert (back.slots == placement.slots).all()
    for wrong in (b"", data[:-1], b"\x93\x01\x02\x03", data + b"x"):
        with pytest.raises(MessageError):
            ExpertPlacement.from_bytes(wrong)
    fields = msgspec.msgpack.decode(data)
    with pytest.raises(MessageError, match="bytes of slots"):
        ExpertPlacement.from_bytes(msgspec.msgpack.encode([*fields[:4], fields[4][:-4]]))
    with pytest.raises(PlacementError, match="expert 3"):
        ExpertPlacement.from_bytes(msgspec.msgpack.encode([4, *fields[1:]]))


def test_slots_per_rank_rounds_up_and_never_exceeds_the_experts() -> None:
    assert slots_per_rank(384, 64, 0) == 6
    assert slots_per_rank(384, 64, 1) == 7
    assert slots_per_rank(8, 64, 0) == 1
    assert slots_per_rank(8, 1, 4) == 8
