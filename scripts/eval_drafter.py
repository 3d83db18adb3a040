"""Measures the tiny checkpoint's drafter on held-out code: `python -m headrace.scripts.eval_drafter`.

Prints JSON. `accepted`: drafts accepted a round of five. `tokens_per_step`: the same and the token that every step
gives. `by_position`: how often a draft is accepted, given that those before it were. `survival`: how often it and all
before it are. `rejection_by_position`: the first, if rejection sampling judged instead of shared noise.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch

from .tiny.export import CHECKPOINT, load_tokenizer
from .tiny.own_output import open_network
from .tiny.speculation import Round, answers, held_out_prompts


def summary(rounds: list[Round], size: int) -> dict[str, object]:
    """Figures of `rounds` of `size` drafts."""
    accepted = torch.tensor([one.accepted for one in rounds])
    reached = [int((accepted >= place).sum()) for place in range(size + 1)]
    chances = [
        [one.chances[place] for one in rounds if len(one.chances) > place] for place in range(size)
    ]
    return {
        "rounds": len(rounds),
        "accepted": round(accepted.float().mean().item(), 3),
        "tokens_per_step": round(accepted.float().mean().item() + 1, 3),
        "by_position": [round(right / max(asked, 1), 3) for asked, right in pairwise(reached)],
        "survival": [round(right / len(rounds), 3) for right in reached[1:]],
        "rejection_by_position": [round(sum(c) / max(len(c), 1), 3) for c in chances],
    }


def main() -> None:
    """Print the figures at every temperature."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prompts = held_out_prompts(
        load_tokenizer(arguments.checkpoint), arguments.prompts, arguments.prompt_tokens
    )
    length = arguments.prompt_tokens + arguments.new_tokens + 8
    network = open_network(arguments.checkpoint, len(prompts), length, deterministic=True)
    result = {"prompts": len(prompts), "new_tokens": arguments.new_tokens}
    for temperature in arguments.temperatures:
        made = answers(network, prompts, temperature, arguments.new_tokens)
        rounds = [one for answer in made for one in answer.rounds]
        result[f"temperature {temperature}"] = summary(rounds, network.drafter.block_size)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
