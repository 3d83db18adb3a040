"""One layer's experts over the ranks of an instance, around two exchanges (spec/model.md 4).

    dispatch   route our rows, choose replicas, write lines    -> exchange ->
    serve      outputs of our experts for the lines that came  -> exchange ->
    combine    add what came back in the router's order

A line is a row of 4-byte words: the rounded row (float32, or FP8 with its scales), then k pairs (slot int32, weight
float32); slots are -1 behind the last that is wanted. An answer is one output: float32 or bfloat16.
Shapes: T rows, k choices, E experts, R ranks, S slots, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _steps
from ._dispatch import make_plan
from ._experts import add, compute
from ._formats import load_row, store_row
from ._numba import Scalar, compiled
from ._route import route_rows
from .moe import ExpertMath, Router
from .reference.storage import FP8

_NO_SLOT = np.int32(-1)


@dataclass(frozen=True, eq=False)
class Replicas:
    """Replicas of every expert of a layer in order of (rank, slot): those of e are ``first[e]`` to ``first[e+1] - 1``.

    first int64 [E + 1]; where int64 [2, replicas]: their ranks, their slots.
    """

    first: NDArray[np.int64]
    where: NDArray[np.int64]

    @classmethod
    def of(cls, slots: NDArray[np.int32], num_experts: int) -> "Replicas":
        """From ``slots`` [R, S]: expert, or negative where empty."""
        flat = slots.reshape(-1)
        used = np.flatnonzero(flat >= 0)
        order = used[np.argsort(flat[used], kind="stable")]
        first = np.searchsorted(flat[order], np.arange(num_experts + 1)).astype(np.int64)
        return cls(first, np.stack(np.divmod(order, slots.shape[1])))


class Buffers:
    """Memory that is used again by the layers of a network, one after another; it grows as needed."""

    def __init__(self) -> None:
        self._words: dict[str, NDArray[np.float32]] = {}

    def words(self, name: str, rows: int, columns: int) -> NDArray[np.float32]:
        """[rows, columns] of any values, valid until ``name`` is asked for again."""
        held, number = self._words.get(name), rows * columns
        if held is None or held.size < number:
            held = self._words[name] = np.empty(max(2 * number, 1024), np.float32)
        return held[:number].reshape(rows, columns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """What a rank sends, and what it needs to know when answers come.

    ids int64 [T, k], weights [T, k], rounded [T, H]; place int64 [T, k]: the answer to each choice among all that come
    back; parts: lines for every rank, uint8 [n_r, line bytes], valid until the next dispatch with the same buffers.
    """

    ids: Tensor
    weights: Tensor
    rounded: Tensor
    place: NDArray[np.int64]
    parts: Sequence[Tensor]


@compiled
def _plan(
    ids: np.ndarray,
    rank: int,
    first: np.ndarray,
    replicas: np.ndarray,
    plan: np.ndarray,
    sizes: np.ndarray,
) -> None:
    make_plan(ids, rank, first, replicas, plan, sizes)


@compiled
def _dispatch(
    x: np.ndarray,
    router: np.ndarray,
    temperature: Scalar,
    bias: np.ndarray,
    bias_image: np.ndarray,
    image: np.ndarray,
    scaling: Scalar,
    kind: int,
    fp8: bool,
    rank: int,
    first: np.ndarray,
    replicas: np.ndarray,
    counts: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    rounded: np.ndarray,
    plan: np.ndarray,
    sizes: np.ndarray,
    lines: np.ndarray,
    line_ints: np.ndarray,
    line_bytes: np.ndarray,
) -> None:
    route_rows(x, router, temperature, bias, bias_image, image, scaling, counts, ids, weights)
    _steps.round_all(x, kind, rounded)
    make_plan(ids, rank, first, replicas, plan, sizes)
    choices = ids.shape[1]
    tail = lines.shape[1] - 2 * choices
    for t in range(ids.shape[0]):
        for c in range(choices):
            slot, to, entry = plan[0, t, c], plan[1, t, c], plan[2, t, c]
            if entry == 0:
                if fp8:
                    store_row(x[t], line_bytes[to], FP8)
                else:
                    for i in range(x.shape[1]):
                        lines[to, i] = rounded[t, i]
                for i in range(choices):
                    line_ints[to, tail + 2 * i] = _NO_SLOT
            line_ints[to, tail + 2 * entry] = np.int32(slot)
            lines[to, tail + 2 * entry + 1] = weights[t, c]


@compiled
def _serve(
    lines: np.ndarray,
    line_ints: np.ndarray,
    line_bytes: np.ndarray,
    arrived: np.ndarray,
    choices: int,
    fp8: bool,
    weights: np.ndarray,
    double: int,
    limit: Scalar,
    kind: int,
    halves: bool,
    answered: np.ndarray,
    out: np.ndarray,
    narrow: np.ndarray,
) -> None:
    number, hidden = lines.shape[0], out.shape[1]
    tail = lines.shape[1] - 2 * choices
    x = lines
    if fp8:
        x = np.empty((number, hidden), np.float32)
        stored = line_bytes.reshape((1, number, line_bytes.shape[1]))
        for i in range(number):
            load_row(stored, 0, i, x, i, FP8)
    source, slots = np.empty(out.shape[0], np.int64), np.empty(out.shape[0], np.int64)
    scale = np.empty(out.shape[0], np.float32)
    n, i = 0, 0
    for r in range(arrived.shape[0]):
        before = n
        for _ in range(arrived[r]):
            for c in range(choices):
                slot = line_ints[i, tail + 2 * c]
                if slot < 0:
                    break
                source[n] = i
                slots[n] = slot
                scale[n] = lines[i, tail + 2 * c + 1]
                n += 1
            i += 1
        answered[r] = n - before
    compute(x, source[:n], slots[:n], scale[:n], weights, double, limit, kind, halves, out[:n])
    if halves:
        for i in range(n):
            for c in range(hidden):
                bits = np.float32(out[i, c]).view(np.int32)
                narrow[i, c] = np.int16(bits >> np.int32(16))


@compiled
def _combine(
    answers: np.ndarray,
    narrow: np.ndarray,
    halves: bool,
    place: np.ndarray,
    shared: np.ndarray,
    out: np.ndarray,
) -> None:
    if halves:
        answers = np.empty(narrow.shape, np.float32)
        for n in range(narrow.shape[0]):
            for c in range(narrow.shape[1]):
                bits = np.int32(narrow[n, c]) << np.int32(16)
                answers[n, c] = np.int32(bits).view(np.float32)
    add(answers, place, shared, out)


def _parts(rows: NDArray[np.uint8], sizes: NDArray[np.int64]) -> Sequence[Tensor]:
    numbers: list[int] = sizes.tolist()
    return torch.from_numpy(rows[: sum(numbers)]).split(numbers)


def _joined(parts: Sequence[Tensor], buffers: Buffers, name: str) -> NDArray[np.uint8]:
    total = sum(part.shape[0] for part in parts)
    rows = buffers.words(name, total, parts[0].shape[1] // 4).view(np.uint8)
    torch.cat(list(parts), out=torch.from_numpy(rows))
    return rows


def plan_exchange(
    ids: NDArray[np.int64], rank: int, ranks: int, replicas: Replicas
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The plan alone, as ``dispatch`` makes it on ``rank`` for choices [T, k]: ``_dispatch.make_plan``'s two arrays."""
    plan, sizes = np.empty((4, *ids.shape), np.int64), np.empty((2, ranks), np.int64)
    _plan(ids, rank, replicas.first, replicas.where, plan, sizes)
    return plan, sizes


def dispatch(
    x: Tensor,
    image: Tensor,
    router: Router,
    num_chosen: int,
    rank: int,
    ranks: int,
    replicas: Replicas,
    how: ExpertMath,
    fp8: bool,
    counts: np.ndarray,
    buffers: Buffers,
) -> Dispatched:
    """Route rows ``x`` [T, H] of ``rank`` and write their lines; ``fp8`` sends them as they are rounded anyway.

    Adds the rows of every expert to ``counts`` int32 [E], or [0] to count nothing.
    """
    rows, hidden = x.shape
    ids = torch.empty((rows, num_chosen), dtype=torch.int64)
    weights = torch.empty((rows, num_chosen))
    rounded = torch.empty_like(x)
    plan, sizes = np.empty((4, rows, num_chosen), np.int64), np.empty((2, ranks), np.int64)
    words = -(-(hidden + hidden // 32) // 4) if fp8 else hidden
    most = rows * min(num_chosen, ranks)
    lines = buffers.words("lines", most, words + 2 * num_chosen)
    line_bytes = lines.view(np.uint8)
    _dispatch(
        x.numpy(),
        router.panels,
        router.temperature,
        router.bias,
        router.bias_image,
        image.numpy(),
        router.scaling,
        how.kind,
        fp8,
        rank,
        replicas.first,
        replicas.where,
        counts,
        ids.numpy(),
        weights.numpy(),
        rounded.numpy(),
        plan,
        sizes,
        lines,
        lines.view(np.int32),
        line_bytes,
    )
    return Dispatched(
        ids=ids,
        weights=weights,
        rounded=rounded,
        place=plan[3],
        parts=_parts(line_bytes, sizes[0]),
    )


def serve(
    arrived: Sequence[Tensor],
    num_chosen: int,
    weights: np.ndarray,
    how: ExpertMath,
    fp8: bool,
    buffers: Buffers,
) -> Sequence[Tensor]:
    """Answers for every rank, uint8 [m_r, answer bytes], to the lines that ``arrived`` from it.

    ``weights`` [S, .] are the ``row_bits`` of our slots. Valid until the next call with the same buffers.
    """
    hidden = how.shape.hidden
    line_bytes = _joined(arrived, buffers, "arrived")
    numbers = np.array([part.shape[0] for part in arrived])
    answered = np.empty_like(numbers)
    lines = line_bytes.view(np.float32)
    most = lines.shape[0] * num_chosen
    out = buffers.words("outputs", most, hidden)
    # Half as many words hold as many bfloat16 values.
    halves = buffers.words("halves", most if how.halves else 0, hidden // 2).view(np.int16)
    _serve(
        lines,
        lines.view(np.int32),
        line_bytes,
        numbers,
        num_chosen,
        fp8,
        weights,
        2 * how.shape.width,
        how.limit,
        how.kind,
        how.halves,
        answered,
        out,
        halves,
    )
    return _parts((halves if how.halves else out).view(np.uint8), answered)


def combine(
    answers: Sequence[Tensor],
    place: NDArray[np.int64],
    shared: Tensor,
    how: ExpertMath,
    buffers: Buffers,
) -> Tensor:
    """``shared`` [T, H] plus the answers to every row's choices in their order: [T, H]."""
    out = torch.empty_like(shared)
    joined = _joined(answers, buffers, "answers")
    narrow = joined.view(np.int16)
    wide = narrow[:0].view(np.float32) if how.halves else joined.view(np.float32)
    _combine(wide, narrow, how.halves, place, shared.numpy(), out.numpy())
    return out
