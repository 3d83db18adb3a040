"""Choosing tokens from logits, each row by itself.

A row's token depends on its logits, its SamplingParams and the position of the new token, never on the other rows, the
rank or the time. Order of the filters: temperature, top-p, top-k, draw (spec engine.md section 7).

    logits --/temperature--> p, sorted, larger first, smaller id first at ties
             |<------- top-p: shortest prefix with mass >= top_p ------->|
             |<-- top-k -->|                     the shorter of the two is kept
             |<- u * mass ->  token             u = uniform(seed, position, "token")
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..transfer.request import SamplingParams, TopLogprobs

GREEDY_BELOW = 1e-5  # temperatures under this are greedy (spec engine.md section 7)
_FIRST_CANDIDATES = 256

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def uniform(seed: int, position: int, purpose: str) -> float:
    """One number in [0, 1) with 53 random bits, decided by its arguments alone (a counter-based stream)."""
    key = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = blake2b(purpose.encode(), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Token ids for ``logits`` (fp32 [R, V], finite); ``positions[r]`` is the position the new token of row r takes."""
    greedy = torch.argmax(logits, dim=-1).tolist() if len(params) else []
    return [
        greedy[row]
        if param.temperature < GREEDY_BELOW
        else _draw(_float64(logits[row]), param, uniform(param.seed, position, "token"))
        for row, (param, position) in enumerate(zip(params, positions, strict=True))
    ]


def top_logprobs(logits: Tensor, k: int) -> list[TopLogprobs]:
    """The ``k`` likeliest ids of every row of ``logits`` (fp32 [R, V]) with natural logarithms of their probabilities.

    The distribution is the model's own, before temperature and filters, normalised in float64.
    """
    return [_top_logprobs(_float64(row), k) for row in logits]


def _top_logprobs(row: Floats, k: int) -> TopLogprobs:
    ids = _largest(row, k)
    peak = float(row[ids[0]])
    log_mass = peak + float(np.log(np.exp(row - peak).sum()))
    return TopLogprobs(ids=tuple(ids.tolist()), logprobs=tuple((row[ids] - log_mass).tolist()))


def _draw(row: Floats, param: SamplingParams, u: float) -> int:
    mass = np.exp((row - row.max()) / param.temperature)
    if param.top_p >= 1.0 and not param.top_k:
        return _pick(mass, u)  # nothing is cut off, so no order is needed
    ids = _nucleus(mass, param.top_p, param.top_k or len(mass))
    return int(ids[_pick(mass[ids], u)])


def _nucleus(mass: Floats, top_p: float, top_k: int) -> Ids:
    """Ids that top-p and top-k leave, in order; sorts no more of the vocabulary than it has to."""
    wanted = top_p * float(mass.sum())
    count = min(top_k, _FIRST_CANDIDATES, len(mass))
    while True:
        ids = _largest(mass, count)
        reached = int(np.searchsorted(np.cumsum(mass[ids]), wanted, side="left"))
        if reached < count or count == min(top_k, len(mass)):
            return ids[: reached + 1]
        count = min(count * 16, top_k, len(mass))


def _pick(mass: Floats, u: float) -> int:
    """Index whose piece of the cumulative mass holds the share ``u``; never an index without mass."""
    edges = np.cumsum(mass)
    index = int(np.searchsorted(edges, u * edges[-1], side="right"))
    if index == len(mass):  # u * edges[-1] was rounded up to the whole
        index = int(np.searchsorted(edges, edges[-1], side="left"))
    return index


def _largest(values: Floats, count: int) -> Ids:
    """Indices of the ``count`` largest values, larger first; equal values by smaller index, at the cut too."""
    count = min(count, len(values))
    bound = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > bound)
    equal = np.flatnonzero(values == bound)[: count - len(above)]
    ids = np.sort(np.concatenate((above, equal)))
    return ids[np.argsort(-values[ids], kind="stable")]


def _float64(row: Tensor) -> Floats:
    return row.to(device="cpu", dtype=torch.float64).numpy()
