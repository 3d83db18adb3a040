"""The exchange plan by its properties, and dispatch, serve and combine against the mixture of one rank."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import moe
from headrace.kernels.dispatch import Buffers, Replicas, combine, dispatch, plan_exchange, serve
from headrace.kernels.linear import pack_weight, panel_bits
from headrace.kernels.moe import ExpertMath, ExpertShape, row_bits
from headrace.kernels.reference.storage import FLOAT32, FP8


def random_slots(draw: np.random.Generator, experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """A placement [ranks, per_rank] in which every expert has a replica, some have more, some slots are empty."""
    slots = np.full((ranks, per_rank), -1, np.int32)
    for expert in draw.permutation(experts):
        slots.flat[draw.choice(np.flatnonzero(slots.reshape(-1) < 0))] = expert
    for rank, slot in np.argwhere(slots < 0):
        expert = draw.integers(experts)
        if expert not in slots[rank] and draw.random() < 0.8:
            slots[rank, slot] = expert
    return slots


@given(
    seed=st.integers(0, 2**32 - 1),
    experts=st.integers(1, 24),
    ranks=st.integers(1, 64),
    rows=st.integers(0, 40),
    spare=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_choice_goes_to_one_replica_and_replicas_share_evenly(
    seed: int, experts: int, ranks: int, rows: int, spare: int
) -> None:
    draw = np.random.default_rng(seed)
    slots = random_slots(draw, experts, ranks, -(-experts // ranks) + spare)
    choices, rank = int(draw.integers(1, min(6, experts) + 1)), int(draw.integers(ranks))
    order = np.argsort(draw.random((rows, experts)) ** draw.integers(1, 9, experts), axis=1)
    ids = np.ascontiguousarray(order[:, :choices])
    plan, sizes = plan_exchange(ids, rank, ranks, Replicas.of(slots, experts))
    slot, line, entry, place = plan
    lines, entries = sizes
    # Lines and entries are numbered rank by rank, which is how the other side tells whose they are.
    to = np.searchsorted(np.cumsum(lines), line, side="right")
    assert (slots[to, slot] == ids).all()
    for expert in range(experts):
        replicas = np.argwhere(slots == expert)
        chosen = [tuple(pair) for pair in np.stack((to, slot), -1)[ids == expert].tolist()]
        loads = [chosen.count((r, s)) for r, s in replicas.tolist()]
        assert max(loads) - min(loads) <= 1
    # A row travels once to a rank, in order; its entries follow one another there.
    assert lines.tolist() == [len(np.unique(np.argwhere(to == r)[:, 0])) for r in range(ranks)]
    assert entries.tolist() == [(to == r).sum() for r in range(ranks)]
    of_line: dict[int, int] = {}
    for t in range(rows):
        for number in line[t].tolist():
            assert of_line.setdefault(number, t) == t
        for number in set(line[t].tolist()):
            assert entry[t][line[t] == number].tolist() == list(range((line[t] == number).sum()))
    assert sorted(of_line) == list(range(lines.sum()))
    # Answers come back in the order of lines and entries, which is that of ranks, too.
    by_place = np.lexsort((entry.reshape(-1), line.reshape(-1)))
    assert place.reshape(-1)[by_place].tolist() == list(range(rows * choices))
    ends = np.concatenate(([0], np.cumsum(entries)))
    for r, (begin, end) in enumerate(pairwise(ends.tolist())):
        assert (to.reshape(-1)[by_place][begin:end] == r).all()


@pytest.mark.parametrize(
    ("kind", "fp8", "halves"),
    [(FP8, False, False), (FP8, True, False), (FP8, True, True), (FLOAT32, False, True)],
)
@pytest.mark.parametrize("rows", [(0, 0), (1, 0), (0, 9), (40, 3)])
def test_two_ranks_give_the_mixture_of_one(
    rows: tuple[int, int], kind: int, fp8: bool, halves: bool, seeded: torch.Generator
) -> None:
    hidden, width, experts, chosen = (
        96,
        32,
        6,
        3,
    )  # lines of 96 + 3 bytes in FP8: filled up to words
    shape = ExpertShape(hidden, width)
    how = ExpertMath(shape=shape, limit=np.float32(2), kind=kind, halves=halves)

    def expert() -> torch.Tensor:
        gate_up = torch.randn(2 * width, hidden, generator=seeded).bfloat16().float()
        return shape.pack(gate_up, torch.randn(hidden, width, generator=seeded).bfloat16().float())

    each = torch.stack([expert() for _ in range(experts)])
    shared = row_bits(expert()[None])
    gate, bias = torch.randn(experts, hidden, generator=seeded), np.zeros(experts, np.float32)
    router = moe.Router(
        panels=panel_bits(pack_weight(gate))[None],
        temperature=np.float32(1),
        bias=bias,
        bias_image=bias,
        scaling=np.float32(1.5),
    )
    slots = np.array([[5, 0, -1, 2, 1], [1, 3, 4, 0, -1]], np.int32)
    replicas = Replicas.of(slots, experts)
    arenas = [row_bits(each[np.maximum(own, 0)]) for own in slots]
    x = [torch.randn(number, hidden, generator=seeded) for number in rows]
    buffers = [Buffers(), Buffers()]
    for _ in range(2):  # the second pass finds what the first one left in the buffers
        counts = np.zeros((2, experts), np.int32)
        image = [torch.zeros(number, dtype=torch.bool) for number in rows]
        sent = [
            dispatch(
                *(x[r], image[r], router, chosen, r, 2, replicas),
                *(how, fp8, counts[r], buffers[r]),
            )
            for r in range(2)
        ]
        arrived = [[sent[source].parts[r] for source in range(2)] for r in range(2)]
        answers = [serve(arrived[r], chosen, arenas[r], how, fp8, buffers[r]) for r in range(2)]
        for r in range(2):
            common = moe.shared_outputs(sent[r].rounded, shared, how)
            back = [answers[source][r] for source in range(2)]
            found = combine(back, sent[r].place, common, how, buffers[r])
            slot_of = np.arange(experts)
            whole, ids, weights = moe.mixture(
                *(x[r], image[r], router, chosen, slot_of, row_bits(each), shared, how),
                np.zeros(0, np.int32),
            )
            assert torch.equal(found, whole)
            assert torch.equal(sent[r].ids, ids)
            assert torch.equal(sent[r].weights, weights)
            assert counts[r].tolist() == torch.bincount(ids.flatten(), minlength=experts).tolist()
