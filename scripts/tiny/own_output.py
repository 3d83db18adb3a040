"""Rows that the tiny checkpoint wrote itself, after prompts from the training text: what its drafter learns from.

`python -m headrace.scripts.tiny.own_output --rows 2048` keeps them in `--state` as `own_output.npz`.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...model.batch import Logits, Span
from ...model.network import Network, load_network
from ...model.network_options import NetworkOptions
from .batches import BOS_ID, cached_stream
from .export import CHECKPOINT, load_tokenizer

LENGTH = 512  # tokens a row, prompt included
PROMPT_TOKENS = (48, 160)  # drawn evenly
TEMPERATURES = (0.0, 0.7, 1.0)
SHARES = (0.25, 0.3, 0.45)
BLOCK_TOKENS = 128
BATCH = 64


@dataclass(frozen=True)
class OwnOutput:
    """Rows `ids` int64 [N, LENGTH]; each was written from `prompt_tokens` [N] on at `temperatures` [N]."""

    ids: torch.Tensor
    prompt_tokens: torch.Tensor
    temperatures: torch.Tensor

    def save(self, path: Path) -> None:
        """Write an npz file."""
        np.savez(
            path,
            ids=self.ids.numpy().astype(np.uint16),
            prompt_tokens=self.prompt_tokens.numpy(),
            temperatures=self.temperatures.numpy(),
        )


def load(path: Path, rows: slice) -> OwnOutput:
    """Those `rows` of what `OwnOutput.save` wrote."""
    stored = np.load(path)
    return OwnOutput(
        ids=torch.from_numpy(stored["ids"].astype(np.int64))[rows],
        prompt_tokens=torch.from_numpy(stored["prompt_tokens"])[rows],
        temperatures=torch.from_numpy(stored["temperatures"])[rows],
    )


def open_network(directory: Path, rows: int, length: int, deterministic: bool = False) -> Network:
    """The checkpoint with room for `rows` requests of `length` tokens; request i has slot i + 1."""
    return load_network(
        directory,
        options=NetworkOptions(
            block_tokens=BLOCK_TOKENS,
            num_blocks=1 + rows * -(-length // BLOCK_TOKENS),
            num_slots=1 + rows,
            deterministic=deterministic,
        ),
    )


def span_of(
    network: Network,
    row: int,
    ids: list[int],
    start: int,
    prompt_tokens: int,
    length: int,
    logits: Logits,
) -> Span:
    """Rows `start` .. of request `row`, whose tokens so far are `ids`."""
    each = -(-length // BLOCK_TOKENS)
    return Span(
        token_ids=tuple(ids[start:]),
        start=start,
        history=tuple(ids[max(0, start - 3) : start]),
        slot=row + 1,
        blocks=tuple(range(1 + row * each, 1 + (row + 1) * each)),
        tail_start=max(0, prompt_tokens - network.keep),
        logits=logits,
    )


def write_on(
    network: Network,
    prompts: list[list[int]],
    temperatures: list[float],
    length: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Every prompt with what the network writes after it, `length` tokens in all; EOS ends nothing."""
    texts, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    heat = torch.tensor(temperatures).unsqueeze(1)
    while True:
        open_rows = [row for row, text in enumerate(texts) if len(text) < length]
        if not open_rows:
            return texts
        logits = network.forward(
            [
                span_of(network, row, texts[row], done[row], len(prompts[row]), length, Logits.LAST)
                for row in open_rows
            ]
        )
        noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=generator)))
        ids = (logits + noise * heat[open_rows]).argmax(1).tolist()
        for row, token in zip(open_rows, ids, strict=True):
            done[row] = len(texts[row])
            texts[row].append(token)


def draw(network: Network, stream: np.ndarray, number: int, seed: int) -> OwnOutput:
    """`number` rows after prompts from anywhere in `stream`."""
    generator, random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    texts: list[list[int]] = []
    lengths = random.integers(*PROMPT_TOKENS, size=number).tolist()
    temperatures = random.choice(TEMPERATURES, size=number, p=SHARES).tolist()
    starts = random.integers(len(stream) - PROMPT_TOKENS[1], size=number).tolist()
    for first in range(0, number, BATCH):
        chosen = range(first, min(first + BATCH, number))
        prompts = [
            [BOS_ID, *stream[starts[i] : starts[i] + lengths[i] - 1].tolist()] for i in chosen
        ]
        for row in range(len(prompts)):
            network.cache.clear_slot(row + 1)
        texts += write_on(network, prompts, [temperatures[i] for i in chosen], LENGTH, generator)
        print(f"{len(texts)} of {number} rows", flush=True)
    return OwnOutput(torch.tensor(texts), torch.tensor(lengths), torch.tensor(temperatures))


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("build/tiny-train"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.state.mkdir(parents=True, exist_ok=True)
    stream = cached_stream(arguments.state / "stream.npy", load_tokenizer(CHECKPOINT), 0)
    network = open_network(CHECKPOINT, BATCH, LENGTH)
    draw(network, stream, arguments.rows, arguments.seed).save(arguments.state / "own_output.npz")


if __name__ == "__main__":
    main()
