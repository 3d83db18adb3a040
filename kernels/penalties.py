"""Logit bias and penalties, for all rows that one request samples in a step."""

import numpy as np
from torch import Tensor

from ._numba import Scalar, compiled
from .reference.penalties import Adjustment


@compiled
def _adjust(
    rows: np.ndarray,
    bias_ids: np.ndarray,
    biases: np.ndarray,
    prompt_ids: np.ndarray,
    output_ids: np.ndarray,
    draft_ids: np.ndarray,
    repetition: Scalar,
    presence: Scalar,
    frequency: Scalar,
) -> None:
    counts = np.zeros(rows.shape[1], np.int32)
    seen = np.zeros(rows.shape[1], np.bool_)
    touched = np.empty(prompt_ids.shape[0] + output_ids.shape[0] + draft_ids.shape[0], np.int64)
    held = 0
    for token in prompt_ids:
        seen[token] = True
        touched[held] = token
        held += 1
    for i in range(output_ids.shape[0] + draft_ids.shape[0] + 1):
        j = i - output_ids.shape[0]
        if j >= 0:
            for b in range(bias_ids.shape[0]):
                rows[j, bias_ids[b]] += biases[b]
            for t in range(held):
                x = touched[t]
                value = rows[j, x]
                value = value / repetition if value > 0 else value * repetition
                if counts[x]:
                    value -= presence
                    value -= frequency * np.float32(counts[x])
                rows[j, x] = value
        if j < draft_ids.shape[0]:
            token = output_ids[i] if j < 0 else draft_ids[j]
            if not seen[token]:
                seen[token] = True
                touched[held] = token
                held += 1
            counts[token] += 1


def adjust(logits: Tensor, first: int, adjustment: Adjustment) -> Tensor:
    """Rows ``first`` and len(draft_ids) more of ``logits`` (fp32 [B, V]): biased, then penalised; a new tensor."""
    rows = logits[first : first + 1 + len(adjustment.draft_ids)].clone()
    _adjust(
        rows.numpy(),
        adjustment.bias_ids,
        adjustment.biases,
        adjustment.prompt_ids,
        adjustment.output_ids,
        adjustment.draft_ids,
        np.float32(adjustment.repetition_penalty),
        np.float32(adjustment.presence_penalty),
        np.float32(adjustment.frequency_penalty),
    )
    return rows
