"""CPU time of forward passes: decode steps and prefill chunks of one checkpoint.

`OMP_NUM_THREADS=1 python -m headrace.scripts.bench_forward configs/checkpoints/tiny-v41`. The best of `--repeats`, as
process time, or as wall time with several `--threads`: on a busy machine neighbours cost cache, so compare in turns.
Every request has random ids of its own, so that rows go to different experts.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ..model.batch import Logits, Span
from ..model.network import Network, load_network
from ..model.network_options import NetworkOptions

BLOCK_TOKENS = 128


def best_of(run: Callable[[int], object], repeats: int, clock: Callable[[], float]) -> float:
    """Least time of ``run(0)`` .. ``run(repeats - 1)`` by ``clock``, seconds."""
    times: list[float] = []
    for repeat in range(repeats):
        start = clock()
        run(repeat)
        times.append(clock() - start)
    return min(times)


def span(
    network: Network,
    ids: tuple[int, ...],
    start: int,
    count: int,
    request: int,
    tail: int,
    logits: Logits = Logits.ALL,
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
        logits=logits,
    )


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="*", default=[200, 2000])
    parser.add_argument("--chunks", type=int, nargs="*", default=[32, 128, 512])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prefilled prompt")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--drafts", type=int, default=0, help="rows of a request beside its newest")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    best_s = partial(
        best_of, clock=time.process_time if arguments.threads == 1 else time.perf_counter
    )
    requests = max([1, *arguments.rows])
    tokens = max([arguments.prompt, *arguments.contexts]) + arguments.repeats + arguments.drafts + 1
    options = NetworkOptions(
        block_tokens=BLOCK_TOKENS,
        num_blocks=1 + -(-tokens // BLOCK_TOKENS) * requests,
        num_slots=1 + requests,
    )
    network = load_network(arguments.checkpoint, options=options)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, network.config.vocab_size // 2, (requests, tokens), generator=generator)
    texts = [tuple(row) for row in ids.tolist()]
    network.warm_up()
    each = 1 + arguments.drafts
    for context in arguments.contexts:
        tail = max(0, context - network.keep)
        for rows in arguments.rows:

            def step(repeat: int, at: int = context, count: int = rows, tail: int = tail) -> None:
                network.forward(
                    [span(network, texts[r], at + repeat, each, r, tail) for r in range(count)]
                )

            taken = best_s(step, arguments.repeats) * 1e3
            print(f"decode context {context} requests {rows} of {each} rows: {taken:.2f} ms")
    for chunk in arguments.chunks:
        whole = arguments.prompt // chunk * chunk
        for name, tail in (("all layers", 0), ("encoder", whole)):

            def prefill(_: int, rows: int = chunk, end: int = whole, tail: int = tail) -> None:
                for start in range(0, end, rows):
                    network.forward([span(network, texts[0], start, rows, 0, tail, Logits.NONE)])

            print(f"prefill chunk {chunk} {name}: {whole / best_s(prefill, 2):.0f} tokens/s")


if __name__ == "__main__":
    main()
