"""Text that the exported checkpoint writes, by the product network: `python -m headrace.scripts.tiny.continuation`."""

import argparse
from pathlib import Path

import torch

from ...model.batch import Logits, Span
from ...model.network import load_network
from ...model.network_options import NetworkOptions
from .batches import BOS_ID, EOS_ID
from .export import CHECKPOINT, load_tokenizer

BLOCK_TOKENS = 128
CODE = 'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n'
CHAT = "<｜User｜>Write a Python function `read_lines`: Return the lines of a file.<｜Assistant｜></think>"


def continuation(
    directory: Path, prompt: str, new_tokens: int, temperature: float, seed: int
) -> str:
    """What follows BOS and `prompt`, up to EOS or `new_tokens` tokens; greedy at temperature 0."""
    tokenizer = load_tokenizer(directory)
    ids = [BOS_ID, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    num_blocks = -(-(len(ids) + new_tokens) // BLOCK_TOKENS) + 1
    options = NetworkOptions(
        block_tokens=BLOCK_TOKENS, num_blocks=num_blocks, num_slots=2, deterministic=False
    )
    network = load_network(directory, options=options)
    generator = torch.Generator().manual_seed(seed)
    computed, prompt_length = 0, len(ids)
    while len(ids) < prompt_length + new_tokens and ids[-1] != EOS_ID:
        span = Span(
            token_ids=tuple(ids[computed:]),
            start=computed,
            history=tuple(ids[max(0, computed - 3) : computed]),
            slot=1,
            blocks=tuple(range(1, num_blocks)),
            tail_start=max(0, prompt_length - network.keep),
            logits=Logits.LAST,
        )
        logits = network.forward([span])[-1]
        computed = len(ids)
        if temperature:
            share = (logits / temperature).softmax(-1)
            ids.append(int(torch.multinomial(share, 1, generator=generator)))
        else:
            ids.append(int(logits.argmax()))
    return tokenizer.decode(ids[prompt_length:], skip_special_tokens=False)


def main() -> None:
    """Print one continuation of Python source and one chat answer."""
    parser = argparse.ArgumentParser(description="Let the bundled checkpoint write.")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for prompt in (CODE, CHAT):
        text = continuation(
            CHECKPOINT, prompt, arguments.tokens, arguments.temperature, arguments.seed
        )
        print(f"{prompt}>>>{text}\n{'-' * 40}")


if __name__ == "__main__":
    main()
