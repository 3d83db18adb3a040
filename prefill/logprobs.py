"""What the model says about the prompt's own tokens, reduced from logits chunk by chunk."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..kernels.logprobs import token_logprobs
from ..transfer.request import PromptLogprob, TopLogprobs


def prompt_logprobs(logits: Tensor, ids: Sequence[int], k: int) -> tuple[PromptLogprob, ...]:
    """What rows of ``logits`` (fp32 [n, V]) say about ``ids`` [n], which follow them, and about the ``k`` likeliest."""
    found = token_logprobs(logits, np.array(ids, np.int64), k)
    columns = (values.tolist() for values in found)
    return tuple(
        PromptLogprob(
            logprob=logprob,
            rank=rank,
            likeliest=TopLogprobs(ids=tuple(top), logprobs=tuple(top_logprobs)),
        )
        for logprob, rank, top, top_logprobs in zip(*columns, strict=True)
    )
