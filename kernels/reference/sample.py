"""Tokens from rows of logits, written for reading: whole sorts and whole exponentials (kernels/sample.py)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASS_BITS = 40
"""Masses are integers in units of 2^-40 of the largest: their sums do not depend on an order."""
LOG2_E = np.float32(1.4426950408889634)
EXP2 = tuple(
    np.float32(c)
    for c in (1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1)
)
"""2^f for f from 0 to 1, highest power first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How the rows of R requests are sampled. Requests lie one behind the other in the rows.

    ``num_rows``, ``top_k`` (V or more keeps all), ``position`` (of the token of the request's first row): int64 [R];
    ``seed``: uint64 [R]; ``temperature`` (0 is greedy), ``top_p``, ``min_p``: float64 [R]. ``replaced_at``: int64
    [R], the request's first row in ``replaced``, which stands for the logits, or -1; ``mask_at`` likewise in ``masks``,
    uint32 [., ceil(V / 32)], bit x % 32 of word x / 32 for every id x that is allowed.
    """

    num_rows: Ints
    temperature: Doubles
    top_p: Doubles
    min_p: Doubles
    top_k: Ints
    seed: npt.NDArray[np.uint64]
    position: Ints
    replaced_at: Ints
    replaced: Tensor
    mask_at: Ints
    masks: npt.NDArray[np.uint32]


def draw(logits: Tensor, choices: Choices) -> Ints:
    """Token ids, int64 [B], for ``logits`` (fp32 [B, V]); -1 where a logit is not finite or nothing is allowed."""
    ids: list[int] = []
    for request, row, j in _rows(logits, choices):
        temperature = float(choices.temperature[request])
        if np.isnan(row).any() or row.max() in (np.inf, -np.inf):
            ids.append(-1)
        elif temperature == 0:
            ids.append(int(row.argmax()))
        else:
            position = int(choices.position[request]) + j
            key = stream_key(int(choices.seed[request]), position)
            scores = np.full(len(row), -np.inf)
            kept = _kept(row, choices, request)
            share = (row.astype(np.float64) - float(row.max())) / temperature
            scores[kept] = share[kept] - np.log(exponentials(key, len(row))[kept])
            ids.append(int(scores.argmax()))
    return np.array(ids, np.int64)


def _rows(logits: Tensor, choices: Choices) -> Iterator[tuple[int, Floats, int]]:
    """Request, its masked logits, and the number of the row within the request."""
    first = 0
    for request, count in enumerate(choices.num_rows):
        at, mask_at = choices.replaced_at[request], choices.mask_at[request]
        source = logits[first : first + count] if at < 0 else choices.replaced[at : at + count]
        for j in range(count):
            row = source[j].numpy().copy()
            if mask_at >= 0:
                bits = np.unpackbits(choices.masks[mask_at + j].view(np.uint8), bitorder="little")
                row[bits[: len(row)] == 0] = -np.inf
            yield request, row, j
        first += count


def _kept(row: Floats, choices: Choices, request: int) -> Ints:
    """Ids that the filters leave, likeliest first."""
    temperature = float(choices.temperature[request])
    order = np.argsort(-row, kind="stable")
    order = order[row[order] > -np.inf]
    with np.errstate(over="ignore"):
        below = row - row.max()
    mass = np.cumsum(masses(below, temperature)[order])
    wanted = min(max(int(np.ceil(choices.top_p[request] * float(mass[-1]))), 1), int(mass[-1]))
    top_p = int(np.searchsorted(mass, wanted)) + 1 if choices.top_p[request] < 1 else len(order)
    min_p = float(choices.min_p[request])
    floor = np.float32(temperature * np.log(min_p)) if min_p > 0 else np.float32(-np.inf)
    above = int((below[order] >= floor).sum())
    return order[: min(top_p, int(choices.top_k[request]), above)]


def masses(below: Floats, temperature: float) -> Ints:
    """e^(below / temperature), ``below`` <= 0, in units of 2^-40."""
    with np.errstate(over="ignore"):
        y = below * np.float32(1 / temperature) * LOG2_E
    alive = y > -MASS_BITS
    y = np.maximum(y, np.float32(-MASS_BITS))
    whole = np.floor(y)
    power = EXP2[0]
    for coefficient in EXP2[1:]:
        power = power * (y - whole) + coefficient
    return np.where(alive, np.ldexp(power, whole.astype(int) + MASS_BITS), 0).astype(np.int64)


def stream_key(seed: int, position: int) -> int:
    """Names the numbers of one position of one seed."""
    return _mix((_mix(seed) + (position + 1) * GAMMA) % 2**64)


def exponentials(key: int, count: int) -> Doubles:
    """-ln(1 - u) for the first ``count`` numbers ``u`` of the SplitMix64 stream ``key``: in (0, 1), 2^-52 apart."""
    u = np.array([((_mix((key + (x + 1) * GAMMA) % 2**64)) >> 12) + 0.5 for x in range(count)])
    return -np.log1p(-u * 2.0**-52)


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * MIX_1 % 2**64
    x = (x ^ (x >> 27)) * MIX_2 % 2**64
    return x ^ (x >> 31)
