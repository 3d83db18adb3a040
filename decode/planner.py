"""Which rows the next step may run, planned while the steps before it still run. Pure decisions.

A step in flight gives each of its requests between one token and one more than the drafts it verifies. The planner
counts the most: then no row lies beyond the request's limit or its blocks, whatever is accepted.

    known (handled)  |  in flight, at most   |  this step, at most        limit
    t0 ... t9        |  t10 t11 t12          |  t13 t14 ... t18             |
                                             |<------------ left ---------->|
"""

from collections.abc import Sequence


def max_drafts(left: int, num_drafts: int) -> int | None:
    """Drafts that the next step may verify for a request; None if it may not run at all before more is known.

    ``left``: tokens that its limit allows beyond those known and those that steps in flight may add at most.
    """
    return None if left <= 0 else min(num_drafts, left - 1)


def cached_tokens(num_tokens: int, in_flight: int, drafts: int) -> int:
    """Tokens that have KV after the next step with so many ``drafts``, at most: what blocks must cover.

    ``num_tokens``: of prompt and answer, as far as known.
    """
    return num_tokens + in_flight + drafts


def replay_chunks(lengths: Sequence[int], done: Sequence[int], budget: int) -> list[int]:
    """Rows of each replay in the next step: first come, first served, ``budget`` rows in all."""
    counts: list[int] = []
    for length, start in zip(lengths, done, strict=True):
        count = min(budget, length - start)
        counts.append(count)
        budget -= count
    return counts
