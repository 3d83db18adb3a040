"""Trains the bundled tiny checkpoint on the Python standard library: `python -m headrace.scripts.train_tiny`.

Three phases, cut by the share of the time budget that has passed: short rows, longer rows, then long rows with fake
quantisation and the indexer's selection switched on, so that the exported checkpoint is what was trained last.
A killed run continues from `--state` when it is started again with the same arguments.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from .tiny import attention, corpus, quantise
from .tiny import tokenizer as tiny_tokenizer
from .tiny.batches import Batches, cached_stream
from .tiny.engram_hash import EngramHash, compressed_map
from .tiny.export import CHECKPOINT, load_tokenizer
from .tiny.network import Network, Numerics
from .tiny.optimiser import Optimiser
from .tiny.weights import initial_weights

WARM_UP, DECAY_FROM = 0.015, 0.4  # shares of the time budget
BIAS_RATE = 0.001  # of the routers' load balance
INDEX_EVERY = 2  # steps between two losses of the indexer
SAVE_EVERY_S = 180


@dataclass(frozen=True)
class Phase:
    """Holds until `until`, a share of the time budget."""

    until: float
    length: int
    tokens: int
    numerics: Numerics


PHASES = [
    Phase(0.35, 256, 2048, Numerics(quantised=False, selected=False)),
    Phase(0.70, 512, 2048, Numerics(quantised=False, selected=False)),
    Phase(1.00, 1024, 4096, Numerics(quantised=True, selected=True)),
]


def rate_factor(progress: float) -> float:
    """Learning-rate factor at a share of the budget: linear warm-up, constant, linear to zero."""
    return min(1.0, progress / WARM_UP + 0.02, max(0.0, 1 - progress) / (1 - DECAY_FROM))


class Trainer:
    """Weights, optimiser and clock of one run."""

    def __init__(self, config: dict, tokenizer: Tokenizer, arguments: argparse.Namespace):
        self.arguments, self.config = arguments, config
        self.weights = initial_weights(config, arguments.seed)
        self.batches = Batches(
            cached_stream(arguments.state / "stream.npy", tokenizer, arguments.seed), arguments.seed
        )
        self.hash = EngramHash(config["text_config"], compressed_map(tokenizer))
        self.elapsed_s, self.tokens, self.log = 0.0, 0, []
        self.optimiser = Optimiser(self.weights)
        self.restore()
        for name, weight in self.weights.items():
            weight.requires_grad_(not name.endswith("gate.bias"))
        self.network = Network(config, self.weights, max(phase.length for phase in PHASES))
        self.random = random.Random(arguments.seed + self.optimiser.steps)

    def run(self) -> None:
        budget_s, last_save = self.arguments.minutes * 60, time.monotonic()
        while self.elapsed_s < budget_s:
            start = time.monotonic()
            progress = self.elapsed_s / budget_s
            phase = next(p for p in PHASES if progress < p.until)
            entry = self.step(phase, rate_factor(progress))
            self.elapsed_s += time.monotonic() - start
            self.log.append((self.optimiser.steps, self.tokens, round(self.elapsed_s, 1), *entry))
            if self.optimiser.steps % 10 == 0:
                self.report(phase)
            if time.monotonic() - last_save > SAVE_EVERY_S or self.elapsed_s >= budget_s:
                self.save()
                last_save = time.monotonic()

    def step(self, phase: Phase, factor: float) -> tuple[float, float, float]:
        """One update; returns (loss in nats per token, indexer loss, gradient norm)."""
        inputs, targets = self.batches.next(phase.tokens, phase.length)
        chunk = (
            self.random.randrange(phase.length // attention.CHUNK)
            if self.optimiser.steps % INDEX_EVERY == 0
            else None
        )
        masters = self.quantise() if phase.numerics.quantised else None
        hidden, trace = self.network.forward(inputs, self.hash.rows(inputs), phase.numerics, chunk)
        loss = functional.cross_entropy(
            functional.linear(hidden, self.weights["head.weight"]), targets.flatten()
        )
        (loss if trace.index_loss is None else loss + trace.index_loss).backward()
        if masters is not None:
            for name, master in masters.items():
                self.weights[name].data = master
        norm = self.optimiser.step(self.weights, factor)
        with torch.no_grad():
            for layer, counts in trace.counts.items():
                load = counts.float()
                self.weights[f"layers.{layer}.ffn.gate.bias"] += (
                    BIAS_RATE * factor * (load.mean() - load).sign()
                )
        for weight in self.weights.values():
            weight.grad = None
        self.tokens += phase.tokens
        index_loss = float("nan") if trace.index_loss is None else round(trace.index_loss.item(), 4)
        return round(loss.item(), 4), index_loss, round(norm, 3)

    def quantise(self) -> dict[str, torch.Tensor]:
        """Puts stored-precision values in place of all weights and returns the full-precision ones."""
        masters = {name: weight.data for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            weight.data = quantise.round_to_storage(name, masters[name])
        return masters

    def report(self, phase: Phase) -> None:
        recent = self.log[-10:]
        loss = sum(row[3] for row in recent) / len(recent)
        rate = (recent[-1][1] - recent[0][1]) / max(recent[-1][2] - recent[0][2], 1e-9)
        print(
            f"step {self.optimiser.steps} tokens {self.tokens} time {self.elapsed_s:.0f} s loss {loss:.3f} "
            f"index {recent[-2][4]} "
            f"norm {recent[-1][5]} length {phase.length} {rate:.0f} tokens/s",
            flush=True,
        )

    def save(self) -> None:
        path = self.arguments.state / "state.pt"
        torch.save(
            {
                "weights": {name: w.detach() for name, w in self.weights.items()},
                "optimiser": self.optimiser.state(),
                "elapsed_s": self.elapsed_s,
                "tokens": self.tokens,
                "position": self.batches.position,
                "log": self.log,
            },
            path.with_suffix(".new"),
        )
        path.with_suffix(".new").replace(path)

    def restore(self) -> None:
        path = self.arguments.state / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        for name, weight in state["weights"].items():
            self.weights[name].copy_(weight)
        self.optimiser.load(state["optimiser"])
        self.elapsed_s, self.tokens, self.batches.position = (
            state["elapsed_s"],
            state["tokens"],
            state["position"],
        )
        self.log = [tuple(row) for row in state["log"]]


def main() -> None:
    """Train until the time budget is spent."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--minutes",
        type=float,
        default=80,
        help="time budget of the whole run; the schedule follows it",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--state",
        type=Path,
        default=Path("build/tiny-train"),
        help="folder for the resumable state and the log",
    )
    parser.add_argument(
        "--new-tokenizer", action="store_true", help="train the tokenizer again before the network"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.state.mkdir(parents=True, exist_ok=True)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    if arguments.new_tokenizer:
        training, _ = corpus.split(corpus.read_standard_library())
        learned = tiny_tokenizer.train(d.text for d in training if not corpus.is_test(d.path))
        tiny_tokenizer.save(learned, CHECKPOINT, config["text_config"]["max_position_embeddings"])
    trainer = Trainer(config, load_tokenizer(CHECKPOINT), arguments)
    trainer.run()


if __name__ == "__main__":
    main()
