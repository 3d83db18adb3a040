"""Distils the tiny checkpoint's DSpark drafter: `python -m headrace.scripts.train_drafter --minutes 15`.

Teacher and features come from the frozen backbone of the exported checkpoint, with fake quantisation and selection, on
rows of the training text. The result lies in `--state` as `drafter.pt`, where `scripts.tiny.export` finds it.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.nn import functional

from .tiny import drafter, quantise
from .tiny.batches import Batches, cached_stream
from .tiny.engram_hash import EngramHash, compressed_map
from .tiny.export import CHECKPOINT, load_tokenizer, stacked_weights
from .tiny.network import Network, Numerics
from .tiny.optimiser import Optimiser

LENGTH, TOKENS, ANCHORS = (
    512,
    2048,
    384,
)  # per step: rows of LENGTH tokens, TOKENS in all, ANCHORS drawn in them
WARM_UP, DECAY_FROM = 0.03, 0.4  # shares of the time budget
BIAS_RATE = 0.001
NUMERICS = Numerics(quantised=True, selected=True)


class Distillation:
    """Frozen backbone, drafter weights and their optimiser."""

    def __init__(self, arguments: argparse.Namespace):
        config = json.loads((CHECKPOINT / "config.json").read_text())
        tokenizer = load_tokenizer(CHECKPOINT)
        backbone = {
            name: weight
            for name, weight in stacked_weights(CHECKPOINT).items()
            if not name.startswith("mtp.")
        }
        self.masters = drafter.initial_weights(config, backbone, arguments.seed)
        self.weights = {
            name: weight.clone().requires_grad_(not name.endswith("gate.bias"))
            for name, weight in self.masters.items()
        }
        self.network = Network(config, backbone | self.weights, LENGTH)
        self.drafter = drafter.Drafter(self.network)
        self.optimiser = Optimiser(self.masters)
        self.hash = EngramHash(config["text_config"], compressed_map(tokenizer))
        self.batches = Batches(
            cached_stream(arguments.state / "stream.npy", tokenizer, arguments.seed),
            arguments.seed + 1,
        )
        self.generator = torch.Generator().manual_seed(arguments.seed)

    def step(self, factor: float) -> tuple[float, torch.Tensor]:
        """One update; returns (loss, mean acceptance probability of every draft)."""
        ids, _ = self.batches.next(TOKENS, LENGTH)
        with torch.no_grad():
            hidden, trace = self.network.forward(ids, self.hash.rows(ids), NUMERICS)
            target = functional.linear(hidden, self.network.weights["head.weight"]).view(
                *ids.shape, -1
            )
        for name, weight in self.weights.items():
            weight.data = quantise.round_to_storage(name, self.masters[name])
        row = torch.randint(len(ids), (ANCHORS,), generator=self.generator)
        last = torch.randint(LENGTH - self.drafter.size - 1, (ANCHORS,), generator=self.generator)
        loss, accepted = self.drafter.loss(ids, trace.features, target, row, last)
        loss.backward()
        self.optimiser.step(self.weights, factor)
        for name, counts in trace.counts.items():
            if isinstance(name, str):
                load = counts.float()
                self.masters[f"{name}.ffn.gate.bias"] += BIAS_RATE * (load.mean() - load).sign()
        for weight in self.weights.values():
            weight.grad = None
        return loss.item(), accepted


def main() -> None:
    """Distil until the time budget is spent."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("build/tiny-train"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run, start = Distillation(arguments), time.monotonic()
    while (progress := (time.monotonic() - start) / (arguments.minutes * 60)) < 1:
        factor = min(1.0, progress / WARM_UP + 0.02, (1 - progress) / (1 - DECAY_FROM))
        loss, accepted = run.step(factor)
        if run.optimiser.steps % 10 == 0:
            shares = [round(share, 3) for share in accepted.tolist()]
            seconds = time.monotonic() - start
            print(
                f"step {run.optimiser.steps} time {seconds:.0f} s loss {loss:.3f} acceptance {shares}",
                flush=True,
            )
        if run.optimiser.steps % 50 == 0:
            torch.save(run.masters, arguments.state / "drafter.pt")
    torch.save(run.masters, arguments.state / "drafter.pt")


if __name__ == "__main__":
    main()
