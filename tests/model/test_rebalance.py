"""Moving experts between ranks: every rank changes the same layers at the same place, or nobody does."""

import random
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.expert_plan import ExpertPlan, moves_of
from headrace.model.expert_reads import TRIES, TokenBucket
from headrace.model.flip_agreement import NOT_READY, NUM_TOLD, Agreed, Told, agree
from headrace.model.placement import EMPTY, ExpertPlacement
from headrace.tests.model import moving_rank
from headrace.tests.model.moving import Instance, random_placement, weights_of
from headrace.transfer.checksum import row_checksum
from headrace.transfer.errors import MessageError, PlacementError, StalePlanError

LAYERS, EXPERTS = 5, 6
MAX_TURNS = 1000


def placement(seed: int, ranks: int = 3, slots: int = 3) -> ExpertPlacement:
    rng = random.Random(seed)
    return random_placement(rng, layers=LAYERS, num_experts=EXPERTS, ranks=ranks, slots=slots)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ([Told(), Told()], Agreed(0, NOT_READY, 0)),
        ([Told(8, 1, 3), Told(8, 1, 5)], Agreed(8, 3, 0)),
        ([Told(8, 1, 0), Told(8, 1, 5)], Agreed(8, 0, 0)),
        ([Told(8, 1, 3), Told(7, 1, 5)], Agreed(0, NOT_READY, 0)),
        ([Told(8, 1, 3), Told(8, 2, 3)], Agreed(0, NOT_READY, 0)),
        ([Told(8, 2**48 - 1, 3), Told(8, 2**48 - 2, 3)], Agreed(0, NOT_READY, 0)),
        ([Told(8, 1, 3), Told()], Agreed(0, NOT_READY, 0)),
        ([Told(8, 1, 3), Told(8, 1, NOT_READY)], Agreed(0, NOT_READY, 0)),
        ([Told(8, 1, 3), Told(8, 1, 5, gives_up=8)], Agreed(0, NOT_READY, 8)),
        ([Told(8, 1, 3), Told(8, 1, 5, gives_up=7)], Agreed(8, 3, 7)),
        ([Told(8, 1, 3)], Agreed(8, 3, 0)),
    ],
)
def test_what_the_ranks_told_decides_alone(told: list[Told], wanted: Agreed) -> None:
    assert agree([each.numbers() for each in told]) == wanted
    assert agree([each.numbers() for each in reversed(told)]) == wanted


def test_ranks_that_move_nothing_tell_zeros() -> None:
    instance = Instance(placement(1))
    for rank in instance.ranks:
        assert list(rank.mover.told) == [0.0] * NUM_TOLD
        assert rank.mover.heed([[0.0] * NUM_TOLD] * 3) == ()


def test_a_plan_crosses_as_bytes_and_foreign_bytes_do_not() -> None:
    sums = np.arange(LAYERS * EXPERTS, dtype=np.int64).reshape(LAYERS, EXPERTS)
    plan = ExpertPlan(epoch=7, placement=placement(1), checksums=sums)
    again = ExpertPlan.from_bytes(plan.to_bytes())
    assert again.epoch == 7
    assert (again.placement.slots == plan.placement.slots).all()
    assert (again.checksums == sums).all()
    for cut in (0, 1, 40, len(plan.to_bytes()) - 1):
        with pytest.raises(MessageError):
            ExpertPlan.from_bytes(plan.to_bytes()[:cut])
    with pytest.raises(PlacementError, match="epoch = 0 is not allowed"):
        replace(plan, epoch=0)
    with pytest.raises(PlacementError, match=r"checksums of shape \[5, 5\]"):
        replace(plan, checksums=sums[:, 1:])


@given(st.integers(0, 10**9), st.integers(1, 8))
def test_moves_name_holders_and_spread_over_them(seed: int, ranks: int) -> None:
    rng = random.Random(seed)
    slots = -(-EXPERTS // ranks) + rng.randrange(3)
    before, after = (
        random_placement(rng, layers=LAYERS, num_experts=EXPERTS, ranks=ranks, slots=slots).slots
        for _ in range(2)
    )
    plans = [moves_of(before, after, rank) for rank in range(ranks)]
    assert len({tuple(change.layer for change in plan) for plan in plans}) == 1
    for number, change in enumerate(plans[0]):
        readers = np.zeros((ranks, slots), int)
        for rank, plan in enumerate(plans):
            gained = {move.slot: move.expert for move in plan[number].moves}
            for slot, expert in enumerate(after[change.layer, rank].tolist()):
                fetched = expert != EMPTY and expert not in before[change.layer, rank]
                assert gained.get(slot, EMPTY) == (expert if fetched else EMPTY)
            for move in plan[number].moves:
                assert before[change.layer, move.source_rank, move.source_slot] == move.expert
                readers[move.source_rank, move.source_slot] += 1
        for expert in range(EXPERTS):
            shares = readers[before[change.layer] == expert]
            assert shares.max() - shares.min() <= 1


def test_a_plan_comes_into_force_layer_by_layer_while_passes_run() -> None:
    instance = Instance(placement(1))
    after = placement(2)
    instance.offer(instance.plan(1, after))
    for _ in range(MAX_TURNS):
        instance.turn()
        instance.drain()
        if not instance.ranks[0].mover.is_moving:
            break
    assert (instance.check().slots == after.slots).all()
    turns = {turn for turn, _ in instance.ranks[0].flipped}
    assert len(turns) > 1, "all layers at once would need staging for all of them"
    moved = sum(len(c.moves) for c in moves_of(placement(1).slots, after.slots, 0))
    stats = instance.ranks[0].mover.stats()
    assert stats["experts_moved_bytes"] == moved * instance.expert_bytes > 0
    assert (stats["experts_epoch"], stats["experts_flips"]) == (1, LAYERS)
    assert (stats["experts_abandoned"], stats["experts_stall_s"] > 0) == (0, True)


def test_idle_ranks_finish_a_plan_and_then_rest() -> None:
    instance = Instance(placement(1))
    instance.offer(instance.plan(1, placement(2)))
    instance.settle()
    assert (instance.check().slots == placement(2).slots).all()
    passes = [rank.network.step for rank in instance.ranks]
    instance.turn(wants_pass=False)
    instance.drain()
    assert [rank.network.step for rank in instance.ranks] == passes
    since = [rank.mover.state()["since"] for rank in instance.ranks]
    assert since == [since[0]] * 3
    for layer, first in enumerate(since[0]):
        seen = [np.frombuffer(slots, np.int32) for slots in instance.ranks[0].network.seen]
        rows = [slots.reshape(LAYERS, 3, 3)[layer] for slots in seen]
        assert [(row == placement(2).slots[layer]).all() for row in rows].index(True) == first


def test_plans_that_are_not_newer_or_not_for_us_are_refused() -> None:
    instance = Instance(placement(1))
    instance.offer(instance.plan(4, placement(2)))
    for epoch, match in ((4, "epoch 4: this rank knows of epoch 4"), (3, "knows of epoch 4")):
        with pytest.raises(StalePlanError, match=match):
            instance.offer(instance.plan(epoch, placement(3)))
    with pytest.raises(
        PlacementError, match=r"slots \[5, 2, 4\]: this instance has 6 in \[5, 3, 3\]"
    ):
        instance.offer(instance.plan(5, placement(2, ranks=2, slots=4)))
    foreign = instance.plan(5, placement(2))
    with pytest.raises(PlacementError, match="must load the same checkpoint"):
        instance.offer(replace(foreign, checksums=foreign.checksums + 1))
    with pytest.raises(PlacementError, match="has no checksum: ask the rank that holds it"):
        instance.offer(replace(foreign, checksums=np.full_like(foreign.checksums, -1)))
    instance.settle()
    assert (instance.check().slots == placement(2).slots).all()
    with pytest.raises(StalePlanError):
        instance.offer(instance.plan(4, placement(3)))


def test_an_offer_that_reaches_some_ranks_changes_nothing_and_ends_by_itself() -> None:
    instance = Instance(placement(1), deadline_s=10.0)
    instance.offer(instance.plan(1, placement(2)), to=[0, 2])
    for _ in range(5):
        instance.turn()
    assert instance.ranks[0].mover.stats()["experts_moved_bytes"] == 0
    instance.now = 10.5
    instance.settle()
    assert (instance.check().slots == placement(1).slots).all()
    states = [rank.mover.state() for rank in instance.ranks]
    assert [state["abandoned"] for state in states] == [1, 0, 1]
    assert states[0]["reason"].startswith("epoch 1: not over after 10 s")
    with pytest.raises(StalePlanError):
        instance.offer(instance.plan(1, placement(2)), to=[1])
    instance.offer(instance.plan(2, placement(3)))
    instance.settle()
    assert (instance.check().slots == placement(3).slots).all()


def test_two_plans_of_one_epoch_change_nothing_and_end_by_themselves() -> None:
    instance = Instance(placement(1), deadline_s=10.0)
    instance.offer(instance.plan(1, placement(2)), to=[0, 1])
    instance.offer(instance.plan(1, placement(3)), to=[2])
    for _ in range(5):
        instance.turn()
        instance.drain()
    assert [rank.mover.state()["moving"] for rank in instance.ranks] == [True] * 3
    instance.now = 10.5
    instance.settle()
    assert (instance.check().slots == placement(1).slots).all()
    for rank in instance.ranks:
        stats = rank.mover.stats()
        assert (stats["experts_flips"], stats["experts_moved_bytes"]) == (0, 0)
        assert stats["experts_abandoned"] == 1
    instance.offer(instance.plan(2, placement(3)))
    instance.settle()
    assert (instance.check().slots == placement(3).slots).all()


def test_one_wrong_read_is_repeated_and_many_give_the_plan_up_everywhere() -> None:
    instance = Instance(placement(1))
    instance.hub.faults.corrupt_next_copies = TRIES - 1
    instance.offer(instance.plan(1, placement(2)))
    instance.settle()
    assert (instance.check().slots == placement(2).slots).all()
    instance.hub.faults.corrupt_next_copies = 10_000
    instance.offer(instance.plan(2, placement(3)))
    instance.settle()
    instance.hub.faults.corrupt_next_copies = 0
    assert [rank.mover.state()["abandoned"] for rank in instance.ranks] == [1, 1, 1]
    assert any("checksum" in rank.mover.state()["reason"] for rank in instance.ranks)
    kept = instance.check()
    for layer in range(LAYERS):
        assert kept.slots[layer].tolist() in [
            p.slots[layer].tolist() for p in (placement(2), placement(3))
        ]
    instance.offer(instance.plan(3, placement(4)))
    instance.settle()
    assert (instance.check().slots == placement(4).slots).all()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_lost_peer_gives_the_plan_up(when: str) -> None:
    instance = Instance(placement(1))
    instance.hub.faults.polls_before_copy = 20
    if when == "before":
        for rank in instance.ranks:
            rank.backend.disconnect("decode-0.1")
    instance.offer(instance.plan(1, placement(2)))
    if when == "during":
        for _ in range(5):
            instance.turn()
        assert all(rank.mover.is_moving for rank in instance.ranks)
        instance.hub.drop("decode-0.1")
    instance.settle()
    assert {rank.mover.state()["abandoned"] for rank in instance.ranks} == {1}
    reasons = [rank.mover.state()["reason"] for rank in instance.ranks]
    assert any("peer decode-0.1" in reason for reason in reasons), reasons
    assert (instance.check().slots == placement(1).slots).all()


def test_rows_that_a_forgotten_read_may_still_write_to_are_not_used_again() -> None:
    instance = Instance(placement(1))
    slow = instance.ranks[1].backend
    slow.late = True
    instance.offer(instance.plan(1, placement(2)))
    for _ in range(5):
        instance.turn()
    instance.offer(instance.plan(2, placement(3)))
    for _ in range(5):
        instance.turn()
        instance.drain()
    told = [rank.mover.told for rank in instance.ranks]
    assert told[1] == Told(2, instance.plan(2, placement(3)).digest()).numbers()
    assert agree(told) == Agreed(0, NOT_READY, 0)
    assert instance.ranks[1].mover.stats()["experts_moved_bytes"] == 0
    slow.late = False
    instance.settle()
    assert (instance.check().slots == placement(3).slots).all()


def test_the_bucket_caps_bytes_per_second() -> None:
    bucket = TokenBucket(rate=100.0, burst=50.0, now=0.0)
    assert bucket.take(50, 0.0) and not bucket.take(1, 0.0)
    assert bucket.take(30, 0.3) and not bucket.take(10, 0.35)
    assert bucket.take(120, 9.0), "more than the burst may go once the bucket is full"
    assert not bucket.take(1, 9.6) and bucket.take(10, 9.9)
    moved = 0
    for tick in range(1000):
        moved += 7 * bucket.take(7, 20.0 + tick / 100)
    assert moved <= 50 + 10 * 100


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 5), st.booleans())
def test_any_schedule_keeps_the_ranks_together(seed: int, ranks: int, faulty: bool) -> None:
    """Offers late, partial, overtaken or refused; reads slow, corrupted; streams behind; deadlines missed."""
    rng = random.Random(seed)
    slots = -(-EXPERTS // ranks) + rng.randrange(2)

    def fresh() -> ExpertPlacement:
        return random_placement(rng, layers=LAYERS, num_experts=EXPERTS, ranks=ranks, slots=slots)

    instance = Instance(fresh(), deadline_s=60.0)
    waiting: list[tuple[int, ExpertPlan]] = []
    for epoch, turn in product(range(1, 4), range(rng.randrange(5, 40))):
        if turn == 0:
            plan = instance.plan(epoch, fresh())
            reached = [rank for rank in range(ranks) if not faulty or rng.random() < 0.9]
            waiting += [(rank, plan) for rank in reached]
        if faulty and rng.random() < 0.05:
            instance.hub.faults.corrupt_next_copies = rng.randrange(6)
        instance.hub.faults.polls_before_copy = rng.randrange(4)
        for offer in list(waiting):
            if rng.random() < 0.3:
                waiting.remove(offer)
                try:
                    instance.offer(offer[1], to=[offer[0]])
                except StalePlanError:
                    assert offer[1].epoch <= instance.ranks[offer[0]].mover.state()["epoch"]
        instance.now += rng.choice((0.1, 1.0, 1.0, 5.0))
        instance.turn(wants_pass=rng.random() < 0.7)
        for rank in instance.ranks:
            rank.run(rng.randrange(5))
    instance.hub.faults.corrupt_next_copies = 0
    instance.now += 61.0
    instance.settle()
    instance.check()
    if not faulty:
        assert all("checksum" not in rank.mover.state()["reason"] for rank in instance.ranks)
    last = fresh()
    instance.offer(instance.plan(9, last))
    instance.settle()
    assert (instance.check().slots == last.slots).all()


def test_processes_move_experts_over_nixl(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    script = str(Path(__file__).with_name("moving_rank.py"))
    ranks = [
        subprocess.Popen([sys.executable, script, address, str(rank), "2", str(tmp_path)])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    before, after = (moving_rank.placement(number, 2).slots for number in range(2))
    moves = [moves_of(before, after, rank) for rank in range(2)]
    for rank in range(2):
        arena, state = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert (ExpertPlacement.from_bytes(state["placement"]).slots == after).all()
        for layer, slot in np.argwhere(after[:, rank] != EMPTY).tolist():
            expert = int(after[layer, rank, slot])
            row = arena[layer * moving_rank.SLOTS + slot]
            assert torch.equal(row, weights_of(layer, expert, state["expert_bytes"]))
            assert state["checksums"][layer, expert] == row_checksum(row[None], 0)
        num_moves = sum(len(change.moves) for change in moves[rank])
        assert state["moved_bytes"] == num_moves * state["expert_bytes"] > 0
        assert state["flips"] == len(moves[rank]) and state["abandoned"] == 0
