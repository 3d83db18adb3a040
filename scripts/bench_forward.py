"""CPU time of forward passes: decode steps and prefill chunks of one checkpoint.

`OMP_NUM_THREADS=1 python -m headrace.scripts.bench_forward configs/checkpoints/tiny-v41`. Process time, the best of
`--repeats`: on a busy machine neighbours still cost cache, so compare two versions in turns.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..model.batch import Logits, Span
from ..model.network import Network, NetworkOptions, load_network

BLOCK_TOKENS = 128


def best_s(run: Callable[[int], object], repeats: int) -> float:
    """Least process time of ``run(0)`` .. ``run(repeats - 1)``."""
    times: list[float] = []
    for repeat in range(repeats):
        start = time.process_time()
        run(repeat)
        times.append(time.process_time() - start)
    return min(times)


def span(
    network: Network, ids: tuple[int, ...], start: int, count: int, request: int, tail: int
) -> Span:
    """``count`` rows from ``start`` of request number ``request``, with slot and blocks of its own."""
    per_request = (network.options.num_blocks - 1) // (network.options.num_slots - 1)
    first = 1 + per_request * request
    return Span(
        token_ids=ids[start : start + count],
        start=start,
        history=ids[max(0, start - 3) : start],
        slot=1 + request,
        blocks=tuple(range(first, first + per_request)),
        tail_start=tail,
        logits=Logits.LAST if count == 1 else Logits.NONE,
    )


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="*", default=[200, 2000])
    parser.add_argument("--chunks", type=int, nargs="*", default=[32, 128, 512])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prefilled prompt")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--any-order", action="store_true", help="deterministic: false")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    requests = max([1, *arguments.rows])
    tokens = max([arguments.prompt, *arguments.contexts]) + arguments.repeats + 1
    options = NetworkOptions(
        deterministic=not arguments.any_order,
        block_tokens=BLOCK_TOKENS,
        num_blocks=1 + -(-tokens // BLOCK_TOKENS) * requests,
        num_slots=1 + requests,
    )
    network = load_network(arguments.checkpoint, options=options)
    generator = torch.Generator().manual_seed(1)
    ids = tuple(torch.randint(5, 500, (tokens,), generator=generator).tolist())
    network.forward([span(network, ids, 0, 64, 0, 0)])
    network.forward([span(network, ids, 64, 1, 0, 0)])
    for context in arguments.contexts:
        tail = max(0, context - network.keep)
        for rows in arguments.rows:

            def step(repeat: int, at: int = context, count: int = rows, tail: int = tail) -> None:
                network.forward([span(network, ids, at + repeat, 1, r, tail) for r in range(count)])

            print(
                f"decode context {context} rows {rows}: {best_s(step, arguments.repeats) * 1e3:.2f} ms"
            )
    for chunk in arguments.chunks:
        whole = arguments.prompt // chunk * chunk
        for name, tail in (("all layers", 0), ("encoder", whole)):

            def prefill(_: int, rows: int = chunk, end: int = whole, tail: int = tail) -> None:
                for start in range(0, end, rows):
                    network.forward([span(network, ids, start, rows, 0, tail)])

            print(f"prefill chunk {chunk} {name}: {whole / best_s(prefill, 2):.0f} tokens/s")


if __name__ == "__main__":
    main()
