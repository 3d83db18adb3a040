"""Who is paused and who goes on, in literal numbers."""

from dataclasses import replace

from headrace.decode.pressure import (
    Decision,
    Memory,
    Pause,
    PauseCosts,
    PausedView,
    RunningView,
    decide,
)

MOVE_IS_CHEAP = PauseCosts(byte_s=1e-9, row_s=1e-3)
MEMORY = Memory(
    free_blocks=0,
    free_slots=9,
    free_places=9,
    free_host_bytes=10_000,
    block_bytes=100,
    slot_bytes=50,
)


def run(name: str, have: int, need: int, **changed: int) -> RunningView:
    view = RunningView(
        request_id=name,
        age=ord(name),
        num_tokens=10 * have,
        num_blocks=have,
        need_blocks=need,
        can_grow=True,
    )
    return replace(view, **changed)


def wait(name: str, need: int, can_grow: bool = True) -> PausedView:
    return PausedView(request_id=name, age=ord(name), need_blocks=need, can_grow=can_grow)


def test_growth_that_fits_is_given() -> None:
    decision = decide(
        [run("a", 2, 3), run("b", 4, 4), run("c", 1, 3)],
        [],
        replace(MEMORY, free_blocks=3),
        MOVE_IS_CHEAP,
    )
    assert decision == Decision(growth={"a": 1, "c": 2})


def test_the_youngest_gives_way_and_no_more_of_them_than_needed() -> None:
    decision = decide(
        [run("a", 2, 3), run("b", 4, 5), run("c", 2, 2), run("d", 1, 2)],
        [],
        replace(MEMORY, free_blocks=0),
        MOVE_IS_CHEAP,
    )
    # d's block is not enough for a and b, c's two are
    assert decision == Decision(
        pauses=(Pause(request_id="c", means="move"), Pause(request_id="d", means="move")),
        growth={"a": 1, "b": 1},
    )


def test_the_oldest_waits_a_step_rather_than_be_paused() -> None:
    decision = decide([run("a", 2, 4), run("b", 1, 1)], [], MEMORY, MOVE_IS_CHEAP)
    assert decision == Decision(
        pauses=(Pause(request_id="b", means="move"),), growth={}, stalled="a"
    )


def test_the_cheaper_means_within_the_host_budget() -> None:
    views = [run("a", 3, 9), run("b", 2, 2), run("c", 2, 2), run("d", 2, 2, movable=False)]
    free = replace(MEMORY, free_blocks=0)  # one room of two blocks is 250 bytes

    def means(costs: PauseCosts, host: int) -> dict[str, str]:
        decision = decide(views, [], replace(free, free_host_bytes=host), costs)
        return {pause.request_id: pause.means for pause in decision.pauses}

    assert means(MOVE_IS_CHEAP, 500) == {"b": "move", "c": "move", "d": "recompute"}
    assert means(MOVE_IS_CHEAP, 499) == {"b": "move", "c": "recompute", "d": "recompute"}
    assert set(means(MOVE_IS_CHEAP, 0).values()) == {"recompute"}
    # 500 bytes out and in against 20 rows
    assert means(PauseCosts(byte_s=1.0, row_s=25.0), 500)["b"] == "move"
    assert means(PauseCosts(byte_s=1.0, row_s=24.0), 500)["b"] == "recompute"


def test_the_oldest_paused_resumes_with_headroom() -> None:
    running, paused = [run("a", 4, 4)], [wait("c", 3), wait("d", 1)]

    def resumed(free: int, **changed: int) -> dict[str, int]:
        memory = replace(MEMORY, free_blocks=free, **changed)
        return decide(running, paused, memory, MOVE_IS_CHEAP).resumptions

    assert resumed(4) == {}  # 3, and one each for a and c
    assert resumed(5) == {"c": 3}
    assert resumed(6) == {"c": 3}  # d would leave 2 for three
    assert resumed(7) == {"c": 3, "d": 1}
    assert resumed(7, free_slots=1) == {"c": 3}
    assert resumed(7, free_places=0) == {}
    assert resumed(7, arriving_growing=1) == {"c": 3}


def test_on_an_empty_rank_the_oldest_resumes_if_it_fits_at_all() -> None:
    memory = replace(MEMORY, free_blocks=3)
    assert decide([], [wait("c", 3), wait("d", 1)], memory, MOVE_IS_CHEAP).resumptions == {"c": 3}
    assert decide([], [wait("c", 4), wait("d", 1)], memory, MOVE_IS_CHEAP).resumptions == {}


def test_nobody_resumes_when_memory_is_short() -> None:
    decision = decide([run("a", 2, 3), run("b", 9, 9)], [wait("c", 1)], MEMORY, MOVE_IS_CHEAP)
    assert [pause.request_id for pause in decision.pauses] == ["b"]
    assert decision.resumptions == {}


def test_who_joined_past_a_paused_one_gives_way_to_it() -> None:
    decision = decide(
        [run("a", 2, 2), run("d", 3, 3)],
        [wait("b", 2)],
        replace(MEMORY, free_blocks=1, free_slots=0, free_places=0),
        MOVE_IS_CHEAP,
    )
    assert [pause.request_id for pause in decision.pauses] == ["d"]
    assert decision.resumptions == {"b": 2}


def test_an_overdue_arrival_is_made_room_for_if_that_is_possible() -> None:
    running = [run("a", 5, 5), run("b", 2, 2), run("c", 2, 3)]
    wanted = replace(MEMORY, free_blocks=1, wanted_blocks=3)
    assert [p.request_id for p in decide(running, [], wanted, MOVE_IS_CHEAP).pauses] == ["c"]
    wanted = replace(wanted, wanted_blocks=4)
    assert [p.request_id for p in decide(running, [], wanted, MOVE_IS_CHEAP).pauses] == ["b", "c"]
    wanted = replace(
        wanted, wanted_blocks=6
    )  # not without the oldest: nobody is disturbed for nothing
    assert decide(running, [], wanted, MOVE_IS_CHEAP) == Decision(growth={"c": 1})
