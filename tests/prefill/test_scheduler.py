"""The prefill scheduler on literal queues, then on random ones."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.prefill.scheduler import Chunk, Prompt, StepPlan, plan_step


def plan(*prompts: Prompt, budget: int = 8, blocks: int = 100, slots: int = 100) -> StepPlan:
    return plan_step(
        prompts, chunk_tokens=budget, block_tokens=4, free_blocks=blocks, free_slots=slots
    )


def prompt(name: str, rows: int, done: int = 0, *, admitted: bool = False) -> Prompt:
    return Prompt(request_id=name, num_rows=rows, num_done=done, admitted=admitted or done > 0)


def chunk(name: str, start: int, count: int) -> Chunk:
    return Chunk(request_id=name, start=start, count=count)


def test_several_prompts_share_a_step_and_the_last_is_cut() -> None:
    step = plan(prompt("a", 5), prompt("b", 7), prompt("c", 1))
    assert step == StepPlan(admitted=("a", "b"), chunks=(chunk("a", 0, 5), chunk("b", 0, 3)))
    step = plan(prompt("b", 7, 3), prompt("c", 1), prompt("d", 9))
    assert step.admitted == ("c", "d")
    assert step.chunks == (chunk("b", 3, 4), chunk("c", 0, 1), chunk("d", 0, 3))


def test_a_prompt_without_rows_is_admitted_and_runs_nothing() -> None:
    assert plan(prompt("one", 0), blocks=0) == StepPlan(admitted=("one",), chunks=())


def test_the_whole_prompt_is_reserved_at_admission() -> None:
    assert plan(prompt("a", 13), blocks=3).admitted == ()
    assert plan(prompt("a", 13), blocks=4).admitted == ("a",)


def test_nobody_overtakes_a_head_that_waits_for_memory() -> None:
    step = plan(prompt("a", 9, 5), prompt("big", 40), prompt("small", 1), blocks=5)
    assert step == StepPlan(admitted=(), chunks=(chunk("a", 5, 4),))
    assert plan(prompt("a", 2), prompt("b", 2), slots=1).admitted == ("a",)


@given(
    rows=st.lists(st.integers(0, 30), max_size=12),
    budget=st.integers(1, 16),
    num_blocks=st.integers(8, 12),
    num_slots=st.integers(1, 4),
)
def test_every_prompt_is_finished_once_and_in_order(
    rows: list[int], budget: int, num_blocks: int, num_slots: int
) -> None:
    queue = [prompt(str(i), count) for i, count in enumerate(rows)]
    free_blocks, free_slots, finished = num_blocks, num_slots, list[str]()
    for _ in range(sum(rows) + len(rows) + 1):
        step = plan(*queue, budget=budget, blocks=free_blocks, slots=free_slots)
        assert sum(c.count for c in step.chunks) <= budget
        assert not queue or step.admitted or step.chunks, "a step that moves nothing"
        taken = {c.request_id: c for c in step.chunks}
        after = list[Prompt]()
        for item in queue:
            if item.request_id in step.admitted:
                assert not item.admitted
                item = replace(item, admitted=True)
                free_blocks -= -(-item.num_rows // 4)
                free_slots -= 1
            if item.request_id in taken:
                assert item.admitted and taken[item.request_id].start == item.num_done
                item = replace(item, num_done=item.num_done + taken[item.request_id].count)
            if item.admitted and item.num_done == item.num_rows:
                finished.append(item.request_id)
                free_blocks += -(-item.num_rows // 4)
                free_slots += 1
            else:
                after.append(item)
        assert free_blocks >= 0 and free_slots >= 0
        queue = after
    assert finished == [str(i) for i in range(len(rows))]
    assert (free_blocks, free_slots) == (num_blocks, num_slots)
