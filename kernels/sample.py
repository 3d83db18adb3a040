"""Tokens from rows of logits, each row by itself: filters, and a draw by counter-based noise.

The draw is a race: with E(x) = -ln(1 - u(x)) exponential and independent, the smallest E(x) / p(x) wins with
probability p(x). ``u`` is a hash of the row's key and x, so a token has its random number before anybody asks.

    logits --mask--> --/t--> sorted, larger first, smaller id first at ties
                       |<------ top-p: shortest prefix with mass >= top_p ------>|
                       |<-- top-k: first k -->|                                     the shortest is kept
                       |<-- min-p: p >= min_p * largest p -->|

Nothing is sorted: the end of a prefix is found digit by digit of the logits' bits.
"""

import math

import numpy as np
from torch import Tensor

from ._numba import Scalar, compiled, contiguous, inner
from ._order import NEGATIVE_INF_KEY, NUM_DIGITS, peak_of, prefix_end
from .reference.sample import EXP2, LOG2_E, MASS_BITS, Choices, Ints

_G, _M1, _M2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_C0, _C1, _C2, _C3, _C4, _C5 = EXP2
_SMALLEST = np.float32(-MASS_BITS)
_UNIT = np.float32(2.0**MASS_BITS)
_LN_2 = np.float32(0.6931471805599453)
_SLACK = np.float32(1e-2)
"""More than the rounding errors of the bound on a score that can win."""


@inner("uint64(uint64)")
def _mix(x: Scalar) -> Scalar:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


@inner("uint64(uint64, int64)")
def _hash(key: Scalar, count: int) -> Scalar:
    """Number ``count`` of the SplitMix64 stream ``key``."""
    return _mix(key + (np.uint64(count) + np.uint64(1)) * _G)


@inner("void(float32[::1], uint32[::1], float32[::1])")
def _allow(row: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
    """``row`` with -inf wherever ``mask`` has no bit."""
    for x in range(row.shape[0]):
        bit = (mask[x >> 5] >> np.uint32(x & 31)) & np.uint32(1)
        out[x] = row[x] if bit else np.float32(-np.inf)


@inner("int64(float32[::1], float32, float32, int64[::1])")
def _masses(row: np.ndarray, peak: Scalar, rate: Scalar, out: np.ndarray) -> Scalar:
    """e^((row - peak) * rate) in units of 2^-40 into ``out``; returns the sum."""
    total = 0
    for x in range(row.shape[0]):
        y = (row[x] - peak) * rate * LOG2_E
        alive = y > _SMALLEST
        y = max(y, _SMALLEST)
        whole = np.float32(math.floor(y))
        f = y - whole
        power = ((((_C0 * f + _C1) * f + _C2) * f + _C3) * f + _C4) * f + _C5
        scale = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
        mass = np.int64(power * scale * _UNIT) if alive else np.int64(0)
        out[x] = mass
        total += mass
    return total


@inner("float64(float32[::1], int64, float32, float64, uint64)")
def _score(row: np.ndarray, x: int, peak: Scalar, temperature: Scalar, key: Scalar) -> Scalar:
    """ln(p(x) / E(x)), but for a constant of the row."""
    u = (np.float64(_hash(key, x) >> np.uint64(12)) + 0.5) * 2.0**-52
    return (np.float64(row[x]) - np.float64(peak)) / temperature - math.log(-math.log1p(-u))


@inner(
    "int64(float32[::1], int32[::1], float32, float64, float32, int64, int64, float32, uint64, float32[::1],"
    " float32[::1])"
)
def _race(
    row: np.ndarray,
    keys: np.ndarray,
    peak: Scalar,
    temperature: Scalar,
    rate: Scalar,
    last_key: Scalar,
    last_id: Scalar,
    floor: Scalar,
    key: Scalar,
    noise: np.ndarray,
    bounds: np.ndarray,
) -> Scalar:
    """The winner among what the filters kept.

    E >= u, and log2 of a float lies above its exponent plus its mantissa. That bounds every score from above without a
    logarithm, and only the few with a bound above the best score so far are computed.
    """
    for x in range(row.shape[0]):
        noise[x] = np.float32(np.int32(_hash(key, x) >> np.uint64(40)))
    bits = noise.view(np.int32)
    last = np.int32(last_key)
    top = np.float32(-np.inf)
    for x in range(row.shape[0]):
        below = row[x] - peak
        log2 = np.float32(bits[x]) * np.float32(2.0**-23) - np.float32(127 + 24)
        out = keys[x] < last or below < floor
        bounds[x] = np.float32(-np.inf) if out else below * rate - log2 * _LN_2
    winner, best = -1, -np.inf
    threshold = np.float32(-np.inf)
    first = 0
    for x in range(row.shape[0]):
        if bounds[x] > top and not (keys[x] == last and x > last_id):
            top, first = bounds[x], x
    winner, best = first, _score(row, first, peak, temperature, key)
    threshold = np.float32(best) - _SLACK
    for x in range(row.shape[0]):
        if bounds[x] >= threshold and not (keys[x] == last and x > last_id):
            score = _score(row, x, peak, temperature, key)
            if score > best or (score == best and x < winner):
                winner, best = x, score
                threshold = np.float32(best) - _SLACK
    return winner


@inner(
    "int64(float32[::1], float64, float64, float64, int64, uint64, int64, int32[::1], int64[::1], float32[:,::1],"
    " int64[:,::1])"
)
def _choose(
    row: np.ndarray,
    temperature: Scalar,
    top_p: Scalar,
    min_p: Scalar,
    top_k: int,
    seed: Scalar,
    position: int,
    keys: np.ndarray,
    masses: np.ndarray,
    floats: np.ndarray,
    digits: np.ndarray,
) -> Scalar:
    """The token of one row; what begins with ``keys`` is scratch."""
    at = peak_of(row, keys)
    if at < 0 or temperature == 0:
        return at
    peak, rate = row[at], np.float32(1 / temperature)
    last_key, last_id = np.int64(NEGATIVE_INF_KEY), row.shape[0]
    if top_p < 1 or top_k < row.shape[0]:
        wanted = np.int64(0x7FFFFFFFFFFFFFFF)
        if top_p < 1:
            total = _masses(row, peak, rate, masses)
            wanted = min(max(np.int64(math.ceil(top_p * np.float64(total))), 1), total)
        last_key, last_id = prefix_end(
            keys, masses, top_k, wanted, contiguous(digits[0]), contiguous(digits[1])
        )
    floor = np.float32(temperature * math.log(min_p)) if min_p > 0 else np.float32(-np.inf)
    key = _mix(_mix(seed) + (np.uint64(position) + np.uint64(1)) * _G)
    noise, bounds = contiguous(floats[0]), contiguous(floats[1])
    return _race(row, keys, peak, temperature, rate, last_key, last_id, floor, key, noise, bounds)


@compiled
def _draw(
    logits: np.ndarray,
    num_rows: np.ndarray,
    temperature: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    top_k: np.ndarray,
    seed: np.ndarray,
    position: np.ndarray,
    replaced_at: np.ndarray,
    replaced: np.ndarray,
    mask_at: np.ndarray,
    masks: np.ndarray,
    out: np.ndarray,
) -> None:
    vocabulary = logits.shape[1]
    keys, masses = np.empty(vocabulary, np.int32), np.zeros(vocabulary, np.int64)
    floats, digits = np.empty((3, vocabulary), np.float32), np.empty((2, NUM_DIGITS), np.int64)
    allowed = contiguous(floats[2])
    first = 0
    for r in range(num_rows.shape[0]):
        for j in range(num_rows[r]):
            row = contiguous(logits[first + j])
            if replaced_at[r] >= 0:
                row = contiguous(replaced[replaced_at[r] + j])
            if mask_at[r] >= 0:
                _allow(row, contiguous(masks[mask_at[r] + j]), allowed)
                row = allowed
            out[first + j] = _choose(
                row,
                temperature[r],
                top_p[r],
                min_p[r],
                top_k[r],
                seed[r],
                position[r] + j,
                keys,
                masses,
                floats,
                digits,
            )
        first += num_rows[r]


def draw(logits: Tensor, choices: Choices) -> Ints:
    """Token ids, int64 [B], for ``logits`` (fp32 [B, V]); -1 where a logit is not finite or nothing is allowed."""
    out = np.empty(logits.shape[0], np.int64)
    _draw(
        logits.contiguous().numpy(),
        choices.num_rows,
        choices.temperature,
        choices.top_p,
        choices.min_p,
        choices.top_k,
        choices.seed,
        choices.position,
        choices.replaced_at,
        choices.replaced.numpy(),
        choices.mask_at,
        choices.masks,
        out,
    )
    return out
