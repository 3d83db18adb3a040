"""Which experts a row goes to (spec/model.md 4)."""

import math

import numpy as np

from ._numba import Scalar, inner

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
