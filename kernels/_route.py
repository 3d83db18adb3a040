"""Which experts a row goes to (spec/model.md 4)."""

import math

import numpy as np

from . import _steps
from ._numba import Scalar, inner
from .reference.storage import FLOAT32

_SOFTPLUS_LINEAR = np.float32(20)


@inner()
def _score(logit: Scalar) -> Scalar:
    if logit > _SOFTPLUS_LINEAR:
        return np.float32(math.sqrt(logit))
    return np.float32(math.sqrt(np.float32(math.log1p(np.float32(math.exp(logit))))))


@inner()
def choose(
    logits: np.ndarray,
    bias: np.ndarray,
    bias_image: np.ndarray,
    image: np.ndarray,
    scaling: Scalar,
    ids: np.ndarray,
    weights: np.ndarray,
) -> None:
    rows, experts = logits.shape
    chosen = ids.shape[1]
    scores = np.empty(experts, np.float32)
    biased = np.empty(experts, np.float32)
    for t in range(rows):
        for e in range(experts):
            scores[e] = _score(logits[t, e])
            biased[e] = scores[e] + (bias_image[e] if image[t] else bias[e])
        total = np.float32(0)
        for slot in range(chosen):
            best = 0
            for e in range(1, experts):
                if biased[e] > biased[best]:
                    best = e
            ids[t, slot] = best
            weights[t, slot] = scores[best]
            total += scores[best]
            biased[best] = -np.inf
        for slot in range(chosen):
            if chosen > 1:
                weights[t, slot] /= total + np.float32(1e-20)
            weights[t, slot] *= scaling


@inner()
def route_rows(
    x: np.ndarray,
    router: np.ndarray,
    temperature: Scalar,
    bias: np.ndarray,
    bias_image: np.ndarray,
    image: np.ndarray,
    scaling: Scalar,
    counts: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
) -> None:
    """``choose`` for rows ``x`` [T, H]; adds the rows of every expert to ``counts`` [E], unless that is empty."""
    rows, experts = x.shape[0], bias.shape[0]
    logits = np.empty((rows, experts), np.float32)
    _steps.product(x, router, experts, FLOAT32, logits)
    if temperature != np.float32(1):
        for t in range(rows):
            for e in range(experts):
                logits[t, e] /= temperature
    choose(logits, bias, bias_image, image, scaling, ids, weights)
    if counts.shape[0]:
        for t in range(rows):
            for c in range(ids.shape[1]):
                counts[ids[t, c]] += 1
