"""The prefill scheduler on literal queues, then on random ones."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.prefill.scheduler import (
    SENIOR_SHARE,
    Chunk,
    Prompt,
    StepPlan,
    Supply,
    pairs_of,
    plan_step,
    rows_within,
)

BLOCK_TOKENS = 4
NO_LIMIT = 1 << 40


def plan(
    *prompts: Prompt,
    budget: int = 8,
    pairs: int = NO_LIMIT,
    blocks: int = 1000,
    free: int | None = None,
    slots: int = 100,
) -> StepPlan:
    supply = Supply(
        num_blocks=blocks, free_blocks=blocks if free is None else free, free_slots=slots
    )
    return plan_step(
        prompts, supply, chunk_tokens=budget, chunk_pairs=pairs, block_tokens=BLOCK_TOKENS
    )


def prompt(
    name: str, rows: int, done: int = 0, *, admitted: bool = False, priority: int = 0
) -> Prompt:
    return Prompt(
        request_id=name,
        num_rows=rows,
        num_done=done,
        num_blocks=-(-done // BLOCK_TOKENS),
        admitted=admitted or done > 0,
        priority=priority,
    )


def chunk(name: str, start: int, count: int) -> Chunk:
    new = -(-(start + count) // BLOCK_TOKENS) - -(-start // BLOCK_TOKENS)
    return Chunk(request_id=name, start=start, count=count, num_blocks=new)


def chunks(step: StepPlan) -> set[Chunk]:
    return set(step.chunks)


def test_several_prompts_share_a_step_and_the_longest_is_cut() -> None:
    step = plan(prompt("a", 5), prompt("b", 7), prompt("c", 1))
    assert step.admitted == ("a", "c", "b")
    assert chunks(step) == {chunk("a", 0, 5), chunk("b", 0, 2), chunk("c", 0, 1)}


def test_a_short_prompt_never_waits_for_a_long_one_and_the_long_one_keeps_its_quarter() -> None:
    step = plan(prompt("long", 900, 100), prompt("short", 7), prompt("shorter", 3))
    assert chunks(step) == {
        chunk("long", 100, 8 // SENIOR_SHARE),
        chunk("shorter", 0, 3),
        chunk("short", 0, 3),
    }
    step = plan(*(prompt(str(n), 1) for n in range(20)), prompt("long", 900))
    assert len(step.chunks) == 8
    step = plan(prompt("long", 900), *(prompt(str(n), 1) for n in range(20)))
    assert chunk("long", 0, 2) in chunks(step) and len(step.chunks) == 7


def test_priority_goes_before_length_and_age() -> None:
    urgent = prompt("urgent", 30, priority=1)
    assert chunks(plan(prompt("a", 2), prompt("b", 900, 4), urgent)) == {chunk("urgent", 0, 8)}
    step = plan(prompt("a", 2), prompt("late", 3, priority=-5), budget=3)
    assert chunks(step) == {chunk("a", 0, 2), chunk("late", 0, 1)}


def test_pairs_bound_a_step_deep_inside_a_prompt_but_one_row_always_runs() -> None:
    assert [pairs_of(0, 3), pairs_of(10, 2), pairs_of(5, 0)] == [6, 23, 0]
    assert [rows_within(0, 6), rows_within(0, 5), rows_within(10, 22), rows_within(10, 10)] == [
        *(3, 2, 1, 0)
    ]
    assert chunks(plan(prompt("a", 900, 100), pairs=210)) == {chunk("a", 100, 2)}
    assert chunks(plan(prompt("a", 900, 100), pairs=5)) == {chunk("a", 100, 1)}
    step = plan(prompt("a", 900, 100), prompt("b", 6), pairs=101 + 20)
    assert chunks(step) == {chunk("a", 100, 1), chunk("b", 0, 5)}


def test_a_prompt_without_rows_is_admitted_and_runs_nothing() -> None:
    assert plan(prompt("one", 0), free=0) == StepPlan(admitted=("one",), chunks=())
    assert plan(prompt("one", 0), slots=0) == StepPlan(admitted=(), chunks=())


def test_blocks_are_reserved_by_the_chunk() -> None:
    step = plan(prompt("a", 40), blocks=10)
    assert step.chunks == (chunk("a", 0, 8),)
    assert step.chunks[0].num_blocks == 2
    assert chunks(plan(prompt("a", 40, 6), blocks=10, free=1)) == {chunk("a", 6, 6)}
    assert chunks(plan(prompt("a", 40, 6), blocks=10, free=0)) == {chunk("a", 6, 2)}


def test_nobody_gets_a_block_that_somebody_else_may_need_to_end() -> None:
    halves = prompt("a", 20, 8), prompt("b", 20, 8)
    assert chunks(plan(*halves, blocks=7, free=3)) == {chunk("a", 8, 8)}
    grown = prompt("a", 20, 16), prompt("b", 20, 8)
    assert chunks(plan(*grown, blocks=7, free=1)) == {chunk("a", 16, 4)}
    step = plan(prompt("b", 20, 8), prompt("c", 4), blocks=5, free=3)
    assert chunks(step) == {chunk("b", 8, 4), chunk("c", 0, 4)}, "c ends, and gives its block back"
    step = plan(prompt("b", 20, 8), prompt("c", 8), budget=4, blocks=5, free=3)
    assert chunks(step) == {chunk("b", 8, 1), chunk("c", 0, 3)}
    step = plan(prompt("b", 20, 8), prompt("c", 12, 4), budget=4, blocks=5, free=2)
    assert chunks(step) == {chunk("c", 4, 4)}, "b can end after c only"


def test_slots_go_to_the_senior_first() -> None:
    step = plan(prompt("big", 40), prompt("small", 1), slots=1)
    assert step == StepPlan(admitted=("big",), chunks=(chunk("big", 0, 8),))


@settings(max_examples=300, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 30), st.integers(-1, 1), st.integers(0, 6)), max_size=12
    ),
    budget=st.integers(1, 16),
    pairs=st.integers(1, 400),
    num_blocks=st.integers(8, 12),
    num_slots=st.integers(1, 4),
    lease=st.integers(0, 3),
)
def test_every_prompt_ends_once_whatever_memory_there_is(
    prompts: list[tuple[int, int, int]],
    budget: int,
    pairs: int,
    num_blocks: int,
    num_slots: int,
    lease: int,
) -> None:
    """Prompts come later and later; what has ended keeps its memory for ``lease`` steps."""
    coming = [
        (arrives, prompt(str(n), rows, priority=priority))
        for n, (rows, priority, arrives) in enumerate(prompts)
    ]
    queue, finished = list[Prompt](), list[str]()
    free_blocks, free_slots = num_blocks, num_slots
    leased: list[tuple[int, int]] = []
    for turn in range(400):
        queue += [item for arrives, item in coming if arrives == turn]
        for end, blocks in [item for item in leased if item[0] <= turn]:
            leased.remove((end, blocks))
            free_blocks, free_slots = free_blocks + blocks, free_slots + 1
        step = plan(
            *queue,
            budget=budget,
            pairs=pairs,
            blocks=num_blocks,
            free=free_blocks,
            slots=free_slots,
        )
        assert sum(c.count for c in step.chunks) <= budget
        assert len(step.chunks) == len({c.request_id for c in step.chunks})
        if len(step.chunks) > 1:
            assert sum(pairs_of(c.start, c.count) for c in step.chunks) <= pairs
        assert step.admitted or step.chunks or not queue or leased, "a step that moves nothing"
        taken = {c.request_id: c for c in step.chunks}
        after = list[Prompt]()
        for item in queue:
            if item.request_id in step.admitted:
                assert not item.admitted
                item = replace(item, admitted=True)
                free_slots -= 1
            if item.request_id in taken:
                part = taken[item.request_id]
                assert item.admitted and part.start == item.num_done and part.count > 0
                held = item.num_blocks + part.num_blocks
                assert held == -(-(part.start + part.count) // BLOCK_TOKENS)
                free_blocks -= part.num_blocks
                item = replace(item, num_done=item.num_done + part.count, num_blocks=held)
            if item.admitted and item.num_done == item.num_rows:
                finished.append(item.request_id)
                leased.append((turn + 1 + lease, item.num_blocks))
            else:
                after.append(item)
        assert free_blocks >= 0 and free_slots >= 0
        queue = after
    assert sorted(finished, key=int) == [str(n) for n in range(len(prompts))]
    assert (free_blocks, free_slots) == (num_blocks, num_slots)
