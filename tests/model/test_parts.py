"""A pass on several threads: every row once, in order, and the same bits as on one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.batch import Logits, Span
from headrace.model.network import Network
from headrace.model.parts import Crew, Order, cut_spans

from .golden import golden_folder, open_golden, prompts


def make_spans(counts: list[int], logits: Logits = Logits.LAST) -> list[Span]:
    return [
        Span(
            token_ids=tuple(range(number * 1000 + 10, number * 1000 + 10 + count)),
            start=10,
            history=tuple(range(number * 1000 + 7, number * 1000 + 10)),
            slot=number,
            blocks=(number,),
            logits=logits,
        )
        for number, count in enumerate(counts)
    ]


@given(
    st.lists(st.integers(0, 600), max_size=12),
    st.integers(1, 5),
    st.sampled_from([Logits.NONE, Logits.LAST, Logits.ALL]),
)
def test_parts_hold_every_row_once_in_order(
    counts: list[int], num_parts: int, logits: Logits
) -> None:
    spans = make_spans(counts, logits)
    parts = cut_spans(spans, num_parts)
    assert len(parts) <= num_parts
    pieces = [span for part in parts for span in part]
    rows = [(s.slot, s.start + i, t) for s in pieces for i, t in enumerate(s.token_ids)]
    assert rows == [(s.slot, s.start + i, t) for s in spans for i, t in enumerate(s.token_ids)]
    for span in pieces:
        before = span.slot * 1000 + span.start
        assert span.history[-3:] == (before - 3, before - 2, before - 1)
    if logits is Logits.LAST:
        ends = [
            span.token_ids[-1] for span in pieces if span.logits is Logits.LAST and span.token_ids
        ]
        assert ends == [span.token_ids[-1] for span in spans if span.token_ids]
    else:
        assert all(span.logits is logits for span in pieces)


def test_few_rows_stay_together_and_many_are_halved() -> None:
    assert len(cut_spans(make_spans([1] * 120), 2)) == 1
    halves = cut_spans(make_spans([1] * 130), 2)
    assert [len(part) for part in halves] == [65, 65]
    halves = cut_spans(make_spans([512]), 2)
    assert [len(part[0].token_ids) for part in halves] == [256, 256]
    assert cut_spans([], 2) in ([], [[]])


@pytest.fixture
def two_threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def prefill(network: Network, ids: tuple[int, ...], tail_start: int) -> torch.Tensor:
    """Logits of ``ids``, run in chunks of 150 rows."""
    network.cache.clear_slot(1)
    results: list[torch.Tensor] = []
    for start in range(0, len(ids), 150):
        span = Span(
            token_ids=ids[start : start + 150],
            start=start,
            history=ids[max(0, start - 3) : start],
            slot=1,
            blocks=tuple(range(1, 50)),
            tail_start=tail_start,
            logits=Logits.ALL,
        )
        results.append(network.forward([span]))
    return torch.cat(results)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("tail_start", [0, 60])
def test_threads_change_no_bit(tail_start: int, tmp_path: Path) -> None:
    folder = golden_folder("v41-spec-micro")
    network = open_golden(folder, "released", tmp_path)
    ids = prompts(folder)["p200"]
    alone = prefill(network, ids, tail_start)
    blocks, slots = network.cache.blocks.clone(), network.cache.slots.clone()
    for threads in (2, 3):
        assert len(cut_spans([*make_spans([150])], threads)) == 2
        network.cache.blocks.zero_()
        torch.set_num_threads(threads)
        assert torch.equal(prefill(network, ids, tail_start), alone)
        assert torch.equal(network.cache.blocks, blocks)
        assert torch.equal(network.cache.slots, slots)


@pytest.mark.usefixtures("two_threads")
def test_a_part_that_fails_fails_the_pass_and_the_next_one_works(tmp_path: Path) -> None:
    folder = golden_folder("v41-spec-micro")
    network = open_golden(folder, "released", tmp_path)
    ids = prompts(folder)["p200"]
    whole = prefill(network, ids, 0)
    torch.set_num_threads(2)
    bad = Span(
        token_ids=(*ids[:-1], 10**6), start=0, history=(), slot=1, blocks=tuple(range(1, 14))
    )
    with pytest.raises(IndexError):
        network.forward([bad])
    with pytest.raises((IndexError, RuntimeError)):
        network.forward([replace(bad, token_ids=(10**6, *ids[1:]))])
    assert torch.equal(prefill(network, ids, 0), whole)


def test_a_failed_part_releases_the_one_behind_it() -> None:
    order = Order(3)
    order.finish(0)
    order.wait(0)
    order.end(failed=True)
    with pytest.raises(RuntimeError, match="earlier part of this pass failed"):
        order.wait(2)


def test_a_crew_gives_results_in_order_and_the_first_error() -> None:
    crew = Crew()
    results = crew.run([lambda n=n: torch.tensor(n) for n in range(4)])
    assert [int(result) for result in results] == [0, 1, 2, 3]

    def fail() -> torch.Tensor:
        raise ValueError("part 2")

    with pytest.raises(ValueError, match="part 2"):
        crew.run([lambda: torch.tensor(1), fail])
