"""Logit bias and penalties, for all rows that one request samples in a step (kernels/penalties.py)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .sample import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """What changes a request's logits; ``prompt_ids`` are distinct. Row j sees ``output_ids`` and j ``draft_ids``."""

    bias_ids: Ints
    biases: Floats
    prompt_ids: Ints
    output_ids: Ints
    draft_ids: Ints
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


def adjust(logits: Tensor, first: int, adjustment: Adjustment) -> Tensor:
    """Rows ``first`` and len(draft_ids) more of ``logits`` (fp32 [B, V]): biased, then penalised; a new tensor."""
    rows = logits[first : first + 1 + len(adjustment.draft_ids)].numpy().copy()
    for j, row in enumerate(rows):
        np.add.at(row, adjustment.bias_ids, adjustment.biases)
        output = np.concatenate((adjustment.output_ids, adjustment.draft_ids[:j]))
        seen = np.union1d(adjustment.prompt_ids, output)
        penalty = np.float32(adjustment.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        ids, counts = np.unique(output, return_counts=True)
        row[ids] -= np.float32(adjustment.presence_penalty)
        row[ids] -= np.float32(adjustment.frequency_penalty) * counts.astype(np.float32)
    return torch.from_numpy(rows)
