"""Who may enter a decode rank: a pure decision over plain values.

Admission is by reservation. A request enters when the blocks of its longest possible answer, a slot and a place in
the batch are free together, so a running request never waits for memory and is never pushed out.

    tokens   0 ............ N-1 | N ....... N+L-2 | N+L-1          N prompt tokens, at most L sampled
             |<-- handoff -->|row                  sampled, never fed: needs no KV
             |<------ blocks reserved ----------->|
"""

from collections.abc import Sequence

from ..transfer.errors import PromptTooLongError


def output_limit(num_prompt: int, max_tokens: int, context: int) -> int:
    """Tokens a request may sample: ``max_tokens``, or less where the context ends; 0 if the prompt fills it."""
    return max(0, min(max_tokens, context - num_prompt))


def blocks_needed(num_prompt: int, num_output: int, block_tokens: int) -> int:
    """Blocks for a prompt and ``num_output`` sampled tokens, of which the last leaves no KV."""
    return -(-(num_prompt + num_output - 1) // block_tokens)


def check_fits(
    num_prompt: int, max_tokens: int, *, context: int, block_tokens: int, num_blocks: int
) -> None:
    """Raise PromptTooLongError for a request that an idle rank of ``num_blocks`` usable blocks could not take."""
    limit = output_limit(num_prompt, max_tokens, context)
    if limit == 0:
        raise PromptTooLongError(
            f"prompt of {num_prompt} tokens leaves no room for an answer in a context of {context} tokens: "
            f"shorten it to at most {context - 1}"
        )
    needed = blocks_needed(num_prompt, limit, block_tokens)
    if needed > num_blocks:
        raise PromptTooLongError(
            f"prompt of {num_prompt} tokens with an answer of up to {limit} needs {needed} blocks of "
            f"{block_tokens} tokens, but the decode cache has {num_blocks}: shorten the prompt, lower max_tokens, "
            f"or raise num_blocks of the decode pool"
        )


def count_admissible(
    demands: Sequence[int], *, free_blocks: int, free_slots: int, free_places: int
) -> int:
    """How many heads of the queue enter now; ``demands`` are their blocks in arrival order. Nobody overtakes."""
    count = 0
    for num_blocks in demands[: min(free_slots, free_places)]:
        if num_blocks > free_blocks:
            break
        free_blocks -= num_blocks
        count += 1
    return count
