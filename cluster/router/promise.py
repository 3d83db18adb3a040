"""How much of a decode rank's memory the router promises to one request. Pure.

    tokens   |---- prompt ----|---- share of the answer ----|......................|  longest answer
             |-------- so far, and a step ahead -------| + one block of headroom

A promise is the larger of two: the prompt with ``1 / decode_overcommit`` of ``max_tokens``, and what the request has
by now, with the headroom that the rank's admission asks for. It never exceeds the longest answer. So with a factor of 1
nobody ever waits or pauses on a rank, and with a larger one a rank is filled by what answers turn out to be: as soon as
the answers inside it have grown into its memory, it gets nobody new. What was promised too much is paused there.
"""

from math import ceil

from ...decode.admission import blocks_needed

GROWTH_TOKENS = 14
"""At most what a request is ahead of its known tokens: two steps, each of a row and six drafts."""


def promised_blocks(
    num_prompt: int, num_output: int, max_tokens: int, block_tokens: int, overcommit: float
) -> int:
    """Blocks of a request with ``num_output`` tokens so far, of at most ``max_tokens``; ``overcommit`` >= 1."""
    share = blocks_needed(num_prompt, ceil(max_tokens / overcommit), block_tokens)
    ahead = blocks_needed(num_prompt, num_output + GROWTH_TOKENS, block_tokens) + 1
    return min(max(share, ahead), blocks_needed(num_prompt, max_tokens, block_tokens))
