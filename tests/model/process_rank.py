"""One rank of an instance of two: ``process_rank.py KIND ADDRESS RANK FOLDER`` leaves its logits in the folder."""

import sys
from pathlib import Path

import torch

from headrace.model.batch import Logits, Span
from headrace.model.exchange import join_exchange
from headrace.model.network import Network, load_network
from headrace.model.network_options import NetworkOptions
from headrace.model.parallel import ExpertExchange

CHECKPOINT = Path(__file__).parents[1] / "data" / "golden" / "v41-spec-micro" / "checkpoint"
PROMPTS = [tuple(range(3, 3 + length)) for length in (1, 40, 9, 23)]
STEPS = 3


def open_rank(exchange: ExpertExchange) -> Network:
    torch.set_num_threads(1)
    options = NetworkOptions(block_tokens=16, num_blocks=8, num_slots=2)
    return load_network(CHECKPOINT, options=options, exchange=exchange)


def run_rank(network: Network, prompt: tuple[int, ...] | None) -> torch.Tensor:
    """Prefill ``prompt`` in one step, then greedy steps; a rank without a prompt steps with zero rows."""
    ids, outputs = list(prompt or ()), []
    start = 0
    for _ in range(STEPS):
        spans: list[Span] = []
        if prompt is not None:
            history = tuple(ids[max(0, start - 3) : start])
            spans = [
                Span(
                    token_ids=tuple(ids[start:]),
                    start=start,
                    history=history,
                    slot=1,
                    blocks=(1, 2, 3),
                    tail_start=max(0, len(prompt) - 20),
                    logits=Logits.LAST,
                )
            ]
        logits = network.forward(spans)
        if prompt is not None:
            start = len(ids)
            outputs.append(logits[0])
            ids.append(int(logits[0].argmax()))
    return torch.stack(outputs) if outputs else torch.zeros(0)


def main(kind: str, address: str, rank: int, folder: Path) -> None:
    exchange = join_exchange(kind, address, rank, 2, timeout_s=60)
    assert exchange.gather([rank, 7.5]) == [[0.0, 7.5], [1.0, 7.5]]
    torch.save(run_rank(open_rank(exchange), PROMPTS[rank]), folder / f"{rank}.pt")
    exchange.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
