"""Measures the bundled tiny checkpoint: bits per byte on held-out modules against gzip -9, and expert usage.

`python -m headrace.scripts.eval_tiny` reads the exported files, so it sees what a deployment loads. Results go to
`evaluation.json` in the checkpoint folder.
"""

import argparse
import gzip
import json
import math
from pathlib import Path

import torch
from torch.nn import functional

from ..model.batch import Logits, Span
from ..model.network import load_network
from ..model.network_options import NetworkOptions
from .tiny import corpus
from .tiny.batches import BOS_ID
from .tiny.engram_hash import EngramHash, compressed_map
from .tiny.export import CHECKPOINT, load_tokenizer, stacked_weights
from .tiny.network import Network, Numerics

LENGTH, STRIDE = (
    1024,
    512,
)  # every token but a file's first 512 is predicted from at least 512 before it
ROWS = 4  # rows of LENGTH tokens in one forward pass
MODES = {
    "dense": Numerics(quantised=True, selected=False),
    "top_k": Numerics(quantised=True, selected=True),
}


class Evaluation:
    """The exported checkpoint in its training form."""

    def __init__(self, directory: Path):
        self.config = json.loads((directory / "config.json").read_text())
        self.tokenizer = load_tokenizer(directory)
        self.network = Network(self.config, stacked_weights(directory), LENGTH)
        self.hash = EngramHash(self.config["text_config"], compressed_map(self.tokenizer))

    @torch.no_grad()
    def logits(
        self, ids: torch.Tensor, numerics: Numerics
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """ids [B, S] -> (logits [B, S, V], rows of every expert by layer)."""
        hidden, trace = self.network.forward(ids, self.hash.rows(ids), numerics)
        return functional.linear(hidden, self.network.weights["head.weight"]).view(
            *ids.shape, -1
        ), trace.counts

    def windows(self, text: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(inputs, targets, counted) rows of LENGTH tokens that together predict every token of `text` once."""
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids)
        rows = []
        for start in range(0, max(len(ids) - (LENGTH - STRIDE), 1), STRIDE):
            targets = ids[start : start + LENGTH]
            counted = torch.zeros(LENGTH, dtype=torch.bool)
            counted[(LENGTH - STRIDE if start else 0) : len(targets)] = True
            targets = functional.pad(targets, (0, LENGTH - len(targets)), value=BOS_ID)
            rows.append((functional.pad(targets[:-1], (1, 0), value=BOS_ID), targets, counted))
        return rows

    def bits(self, texts: list[str], numerics: Numerics) -> tuple[float, dict[int, torch.Tensor]]:
        """(total bits of all texts, rows of every expert by layer)."""
        rows = [row for text in texts for row in self.windows(text)]
        total, usage = 0.0, {}
        for first in range(0, len(rows), ROWS):
            inputs, targets, counted = (
                torch.stack(column) for column in zip(*rows[first : first + ROWS], strict=True)
            )
            logits, counts = self.logits(inputs, numerics)
            nats = functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="none"
            )
            total += nats[counted.flatten()].sum().item() / math.log(2)
            for layer, count in counts.items():
                usage[layer] = usage.get(layer, 0) + count
        return total, usage


def gzip_bits(texts: list[str]) -> int:
    """Size of every text under gzip -9, summed."""
    return sum(8 * len(gzip.compress(text.encode(), compresslevel=9, mtime=0)) for text in texts)


def product_difference(
    evaluation: Evaluation, directory: Path, text: str, length: int
) -> dict[str, float]:
    """Logit difference between the product's network and the training form, mathematics only, over `length` tokens.

    `covered`: rows that see at most index_topk entries, where selection plays no part. `median`: over all rows.
    """
    ids = [BOS_ID, *evaluation.tokenizer.encode(text, add_special_tokens=False).ids][:length]
    block_tokens = 128
    blocks = tuple(range(1, 1 + -(-length // block_tokens)))
    network = load_network(
        directory,
        options=NetworkOptions(
            numerics="plain",
            block_tokens=block_tokens,
            num_blocks=len(blocks) + 1,
            num_slots=2,
            deterministic=False,
        ),
    )
    product = network.forward(
        [Span(token_ids=tuple(ids), start=0, history=(), slot=1, blocks=blocks, logits=Logits.ALL)]
    )
    ours, _ = evaluation.logits(torch.tensor([ids]), Numerics(quantised=False, selected=True))
    difference = (product - ours[0]).abs().amax(-1)
    covered = evaluation.config["text_config"]["index_topk"]
    return {
        "covered": difference[:covered].max().item(),
        "median": difference.median().item(),
        "largest": difference.max().item(),
    }


def main() -> None:
    """Evaluate, print and write `evaluation.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _, held_out = corpus.split(corpus.read_standard_library())
    texts = [document.text for document in held_out]
    num_bytes = sum(len(text.encode()) for text in texts)
    evaluation = Evaluation(arguments.checkpoint)
    result = {
        "held_out": [document.path for document in held_out],
        "bytes": num_bytes,
        "gzip_9_bits_per_byte": gzip_bits(texts) / num_bytes,
    }
    for mode, numerics in MODES.items():
        total, usage = evaluation.bits(texts, numerics)
        result[f"{mode}_bits_per_byte"] = total / num_bytes
        print(mode, result[f"{mode}_bits_per_byte"], flush=True)
    result["expert_share"] = {
        layer: [round(share, 4) for share in (count / count.sum()).tolist()]
        for layer, count in usage.items()
    }
    result["product_difference"] = product_difference(
        evaluation, arguments.checkpoint, texts[0], 256
    )
    (arguments.checkpoint / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
