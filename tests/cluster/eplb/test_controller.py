"""What decides for an instance: literal counts and states in, plans and a book out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.eplb.config import EplbConfig
from headrace.cluster.eplb.controller import InstanceController, Piece
from headrace.model.expert_plan import ExpertPlan
from headrace.model.placement import ExpertPlacement

from .reports import EXPERTS, LAYERS, RANKS, SLOTS, rows_of

FIRST = ExpertPlacement.initial(
    layers=LAYERS, num_experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS
)
CONFIG = EplbConfig(enabled=True, min_steps=20, keep_steps=60, interval_s=10.0)
EXPERT_BYTES = 100


def state(placement: ExpertPlacement = FIRST, **changed: object) -> dict[str, Any]:
    """What a rank says that moves nothing."""
    return {
        "epoch": 0,
        "moving": False,
        "placement": placement.to_bytes(),
        "since": [0] * LAYERS,
        "staged_layers": 0,
        "moved_bytes": 0,
        "flips": 0,
        "abandoned": 0,
        "stall_s": 0.0,
        "reason": "",
        "checksums": np.full((LAYERS, EXPERTS), 7, np.int64),
        "expert_bytes": EXPERT_BYTES,
    } | changed


def parts(rows: np.ndarray, first: int = 0, ranks: int = RANKS) -> list[Piece]:
    """``rows`` [steps, layers, experts] as told by ranks that routed a share each."""
    steps = np.arange(first, first + len(rows))
    shares = [rows // ranks for _ in range(ranks - 1)]
    return [(steps, share) for share in (*shares, rows - sum(shares))]


def told(controller: InstanceController, rows: np.ndarray, first: int = 0) -> None:
    controller.heard([state()] * RANKS, 0.0)
    controller.collected(parts(rows, first))


def offered(controller: InstanceController, now: float = 1.0) -> ExpertPlan:
    question = controller.due(now)
    assert question is not None
    plan = controller.decided(question.answer(), now)
    assert plan is not None
    return ExpertPlan.from_bytes(plan)


def test_enough_passes_lead_to_a_plan_with_the_checksums_of_all_ranks() -> None:
    controller = InstanceController(0, CONFIG)
    assert controller.due(0.0) is None
    sums = [np.full((LAYERS, EXPERTS), -1, np.int64) for _ in range(RANKS)]
    for rank in range(RANKS):
        sums[rank][:, rank::RANKS] = 1000 + rank
    states = [state(checksums=each, epoch=3) for each in sums]
    controller.heard(states, 0.0)
    controller.collected(parts(rows_of(19)))
    assert controller.due(0.5) is None, "19 passes are too few"
    controller.collected(parts(rows_of(30)))
    plan = offered(controller)
    assert plan.epoch == 4
    assert (plan.placement.slots != FIRST.slots).any()
    assert set(plan.checksums.flat) == {1000, 1001, 1002, 1003}
    assert controller.due(99.0) is None, "one plan at a time"


def test_a_plan_in_force_everywhere_is_booked_with_what_it_achieved() -> None:
    controller = InstanceController(0, CONFIG)
    told(controller, rows_of(40))
    plan = offered(controller)
    moving = state(epoch=1, moving=True)
    controller.heard([moving] * RANKS, 1.5)
    done = state(plan.placement, epoch=1, since=[44, 45, 46], moved_bytes=300, stall_s=0.25)
    controller.heard([done] * 3 + [moving], 1.8)
    assert controller.due(20.0) is None, "a rank still moves"
    controller.heard([done] * RANKS, 2.0)
    controller.collected(parts(rows_of(80)[40:], 40))
    report = controller.report()
    assert report is not None
    (entry,) = report["history"]
    assert (entry["outcome"], entry["in_force_step"], entry["move_s"]) == ("moved", 46, 1.0)
    assert entry["achieved_balance"] > entry["balance_before"]
    assert report["epoch"] == 1
    assert report["series"]["epoch"] == [0] * 46 + [1] * 34
    assert (report["moved_bytes"], report["moved_experts"]) == (300 * RANKS, 3 * RANKS)
    assert controller.due(5.0) is None, "the interval is not over"
    assert controller.due(12.0) is not None


def test_passes_are_judged_by_what_was_in_force_in_each_layer() -> None:
    controller = InstanceController(0, CONFIG)
    told(controller, rows_of(40))
    plan = offered(controller)
    controller.heard([state(plan.placement, epoch=1, since=[42, 0, 44])] * RANKS, 2.0)
    controller.collected(parts(rows_of(50)[40:], 40))
    report = controller.report()
    assert report is not None
    before, after = (
        report["series"]["balance"][40:42],
        report["series"]["balance"][44:],
    )
    assert min(after) > max(before)


def test_a_layer_whose_flip_has_yet_to_run_is_judged_by_what_was() -> None:
    """A flip is launched with a pass: the placement is told at once, its first pass when it is known."""
    rows = rows_of(60)
    unmoved = InstanceController(0, CONFIG)
    told(unmoved, rows)
    controller = InstanceController(0, CONFIG)
    told(controller, rows[:40])
    plan = offered(controller)
    controller.heard([state(plan.placement, epoch=1, moving=True)] * RANKS, 1.5)
    controller.collected(parts(rows[40:50], 40))
    controller.heard([state(plan.placement, epoch=1, since=[50, 50, 50])] * RANKS, 2.0)
    controller.collected(parts(rows[50:], 50))
    found, wanted = controller.report(), unmoved.report()
    assert found is not None and wanted is not None
    assert found["series"]["balance"][:50] == wanted["series"]["balance"][:50]
    assert found["series"]["epoch"] == [0] * 50 + [1] * 10


def test_passes_wait_while_a_flip_has_not_reached_every_rank() -> None:
    controller = InstanceController(0, CONFIG)
    told(controller, rows_of(40))
    plan = offered(controller)
    done = state(plan.placement, epoch=1, since=[45, 45, 45])
    controller.heard([done] + [state(epoch=1, moving=True)] * 3, 1.5)
    controller.collected(parts(rows_of(50)[40:], 40))
    assert controller.next_step == 40
    controller.heard([done] * RANKS, 2.0)
    controller.collected(parts(rows_of(60)[40:], 40))
    report = controller.report()
    assert report is not None
    assert report["series"]["epoch"] == [0] * 45 + [1] * 15
    assert report["lost_steps"] == 0


def test_each_move_has_its_own_stall() -> None:
    controller = InstanceController(0, CONFIG)
    told(controller, rows_of(40))
    plan = offered(controller)
    controller.heard([state(plan.placement, epoch=1, since=[44] * 3, stall_s=5.0)] * RANKS, 2.0)
    question = controller.due(12.0)
    assert question is not None
    back = replace(question.answer(), pays=True, slots=FIRST.slots)
    assert controller.decided(back, 12.0) is not None
    controller.heard([state(epoch=2, since=[66] * 3, stall_s=5.5)] * RANKS, 13.0)
    report = controller.report()
    assert report is not None
    assert [entry["stall_s"] for entry in report["history"]] == [5.0, 0.5]
    assert report["stall_s"] == 5.5


def test_a_plan_that_was_given_up_says_why_and_the_next_has_a_larger_epoch() -> None:
    controller = InstanceController(0, CONFIG)
    told(controller, rows_of(40))
    offered(controller)
    lost = state(epoch=1, abandoned=1, reason="epoch 1: peer decode-0.2 is lost")
    controller.heard([state(epoch=1, abandoned=1)] * 3 + [lost], 3.0)
    report = controller.report()
    assert report is not None
    assert report["history"][0]["outcome"] == "abandoned"
    assert report["history"][0]["reason"] == "peer decode-0.2 is lost"
    assert report["abandoned"] == 1
    assert offered(controller, 12.0).epoch == 2


def test_a_refused_plan_is_booked_and_waits_for_ranks_that_took_it() -> None:
    controller = InstanceController(0, CONFIG)
    told(controller, rows_of(40))
    offered(controller)
    controller.refused("StalePlanError: epoch 1", 1.2)
    report = controller.report()
    assert report is not None
    assert report["history"][0]["outcome"] == "refused"
    controller.heard([state(epoch=1, moving=True)] + [state()] * 3, 12.0)
    assert controller.due(12.0) is None
    controller.heard([state(epoch=1, reason="epoch 1: not over after 60 s")] * RANKS, 70.0)
    report = controller.report()
    assert report is not None
    assert report["history"][0]["outcome"] == "refused", "what came first is why"
    assert offered(controller, 70.0).epoch == 2


def test_a_plan_that_no_rank_took_is_made_anew() -> None:
    controller = InstanceController(0, CONFIG)
    told(controller, rows_of(40))
    offered(controller)
    controller.refused("decode-0.1: no answer in time", 1.2)
    controller.heard([state()] * RANKS, 2.0)
    assert controller.due(5.0) is None, "the interval is not over"
    assert offered(controller, 12.0).epoch == 1


def test_an_answer_that_was_late_was_no_refusal() -> None:
    controller = InstanceController(0, CONFIG)
    told(controller, rows_of(40))
    plan = offered(controller)
    controller.refused("decode-0.1: no answer in time", 1.2)
    controller.heard([state(plan.placement, epoch=1, since=[44, 44, 44])] * RANKS, 2.0)
    controller.collected(parts(rows_of(60)[40:], 40))
    report = controller.report()
    assert report is not None
    (entry,) = report["history"]
    assert (entry["outcome"], entry["in_force_step"]) == ("moved", 44)
    assert report["predicted_balance"] == entry["predicted_balance"]
    assert report["achieved_balance"] is not None


def test_what_does_not_pay_is_kept() -> None:
    controller = InstanceController(0, EplbConfig(enabled=True, min_gain=0.9))
    told(controller, rows_of(40))
    question = controller.due(1.0)
    assert question is not None
    assert controller.decided(question.answer(), 1.0) is None
    report = controller.report()
    assert report is not None
    assert report["history"][0]["outcome"] == "kept"
    assert report["history"][0]["moved_bytes"] == 0


def test_a_new_life_goes_on_from_what_the_ranks_say() -> None:
    moved = ExpertPlacement(num_experts=EXPERTS, slots=FIRST.slots[:, ::-1].copy())
    controller = InstanceController(0, CONFIG)
    controller.heard([state(moved, epoch=7, since=[9, 9, 9], moving=True)] * RANKS, 0.0)
    controller.collected(parts(rows_of(40), 100))
    assert controller.due(1.0) is None
    controller.heard([state(moved, epoch=7, since=[9, 9, 9])] * RANKS, 2.0)
    report = controller.report()
    assert report is not None
    assert (report["epoch"], report["history"]) == (7, [])
    assert offered(controller, 2.0).epoch == 8


def test_statistics_of_an_earlier_deployment_give_a_plan_before_the_first_pass() -> None:
    controller = InstanceController(0, CONFIG, seed=rows_of(30))
    controller.heard([state()] * RANKS, 0.0)
    assert offered(controller, 0.0).epoch == 1
    report = controller.report()
    assert report is not None
    assert report["series"]["steps"] == []
    assert report["balance"] is None
    controller.collected(parts(rows_of(50, seed=3)))
    assert controller.rows.shape[0] == CONFIG.keep_steps
    assert (controller.rows[:10] == rows_of(30)[20:]).all(), "what is old makes room"
    assert (controller.rows[10:] == rows_of(50, seed=3)).all()


def test_passes_that_left_the_ring_are_counted_and_ranks_that_disagree_are_said() -> None:
    controller = InstanceController(0, CONFIG)
    told(controller, rows_of(10))
    controller.collected(parts(rows_of(10), 25))
    report = controller.report()
    assert report is not None
    assert (report["lost_steps"], report["last_step"]) == (15, 34)
    other = ExpertPlacement(num_experts=EXPERTS, slots=FIRST.slots[:, ::-1].copy())
    controller.heard([state()] * 3 + [state(other)], 1.0)
    controller.collected(parts(rows_of(40), 35))
    assert controller.due(50.0) is None
    report = controller.report()
    assert report is not None
    assert report["agree"] is False


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 4)), max_size=12),
    st.integers(1, 4),
)
def test_each_pass_is_booked_once_whatever_ranks_tell(
    looks: list[tuple[int, int, int]], ranks: int
) -> None:
    """Looks overlap, and ranks are ahead of each other; passes that some lack wait for the next look."""
    rows = rows_of(200)
    first = ExpertPlacement.initial(
        layers=LAYERS, num_experts=EXPERTS, ranks=ranks, slots_per_rank=EXPERTS
    )
    controller = InstanceController(0, CONFIG)
    controller.heard([state(first)] * ranks, 0.0)
    end = 0
    for more, back, ahead in looks:
        end += more
        begin = max(0, controller.next_step - back)
        pieces: list[Piece] = []
        for rank, (_, share) in enumerate(parts(rows, ranks=ranks)):
            last = end + (ahead if rank else 0)
            pieces.append((np.arange(begin, last), share[begin:last]))
        controller.collected(pieces)
    report = controller.report()
    assert report is not None
    assert report["series"]["steps"] == list(range(end))
    wanted = rows[:end].sum((1, 2)) / LAYERS
    assert report["series"]["rows"] == pytest.approx(wanted, abs=0.01)
    assert report["lost_steps"] == 0
