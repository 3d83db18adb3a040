"""Continuous batching: which row each admitted request runs next, and when it is over. Pure decisions.

Admission bounds the batch, so every admitted request runs one row in every step:

    position   0 ... N-2      N-1          N            N+1
    row        (prefill)   last prompt   1st sampled   2nd sampled ...
    samples                1st           2nd           3rd               each takes the position after its row
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..transfer.request import SamplingParams

HISTORY_TOKENS = 3  # ids before a row that n-gram layers look at


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token to feed, its position, and up to three ids before it, oldest first."""

    token_id: int
    position: int
    history: tuple[int, ...]


def next_row(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Row:
    """The row that samples the next token: the last id so far."""
    tail = (*prompt_ids[-HISTORY_TOKENS - 1 :], *output_ids[-HISTORY_TOKENS - 1 :])
    return Row(
        token_id=tail[-1],
        position=len(prompt_ids) + len(output_ids) - 1,
        history=tail[-HISTORY_TOKENS - 1 : -1],
    )


def finish_reason(
    token_id: int, num_output: int, limit: int, params: SamplingParams, eos_id: int
) -> str | None:
    """Why a request ends with ``token_id``, its ``num_output``-th token: ``stop``, ``length``, or None to go on.

    ``limit`` is ``admission.output_limit``: max_tokens, or less where the context ends.
    """
    if token_id == eos_id and not params.ignore_eos:
        return "stop"
    return "length" if num_output >= limit else None
