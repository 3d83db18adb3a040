"""Distils the tiny checkpoint's DSpark drafter: `python -m headrace.scripts.train_drafter --minutes 16`.

It learns from rows that the checkpoint wrote itself (`scripts.tiny.own_output`), each at the temperature at which it
was written, and goes on from the checkpoint's own drafter. Teacher and features come from the frozen backbone with fake
quantisation and selection, computed once a row. The result lies in `--state` as `drafter.pt`.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.nn import functional

from .tiny import drafter, own_output, quantise
from .tiny.engram_hash import EngramHash, compressed_map
from .tiny.export import CHECKPOINT, load_tokenizer, stacked_weights
from .tiny.network import Network, Numerics
from .tiny.optimiser import Optimiser

ROWS, ANCHORS = 4, 384  # a step: rows of own output, anchors drawn in them
WARM_UP, DECAY_FROM = 0.03, 0.4  # shares of the time budget
BIAS_RATE = 0.001
COLDEST = 0.3  # stands for temperature 0, whose distribution has no gradient
NOISE_ROWS = 4096
NUMERICS = Numerics(quantised=True, selected=True)


class Teacher:
    """The frozen backbone on rows of own output: features and final states, kept as float16."""

    def __init__(self, network: Network, hash_rows: EngramHash, ids: torch.Tensor):
        self.network, self.hash, self.ids = network, hash_rows, ids
        width = network.text["hidden_size"]
        self.parts = len(network.text["dspark_target_layer_ids"]) + 1
        self.kept = torch.zeros(*ids.shape, self.parts * width, dtype=torch.float16)
        self.known = torch.zeros(len(ids), dtype=torch.bool)

    @torch.no_grad()
    def look(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Features [B * S, H] of every target layer, then normalised final states [B * S, H], of `rows` [B]."""
        new = rows[~self.known[rows]]
        if len(new):
            ids = self.ids[new]
            hidden, trace = self.network.forward(ids, self.hash.rows(ids), NUMERICS)
            parts = torch.cat((*trace.features, hidden), dim=-1)
            self.kept[new] = parts.view(*ids.shape, -1).to(torch.float16)
            self.known[new] = True
        return list(self.kept[rows].float().flatten(0, 1).chunk(self.parts, dim=-1))


class Distillation:
    """Frozen backbone, drafter weights and their optimiser."""

    def __init__(self, arguments: argparse.Namespace):
        config = json.loads((arguments.checkpoint / "config.json").read_text())
        weights = stacked_weights(arguments.checkpoint)
        backbone = {name: w for name, w in weights.items() if not name.startswith("mtp.")}
        self.masters = (
            drafter.initial_weights(config, backbone, arguments.seed)
            if arguments.new
            else {name: w for name, w in weights.items() if name not in backbone}
        )
        self.weights = {
            name: weight.clone().requires_grad_(not name.endswith("gate.bias"))
            for name, weight in self.masters.items()
        }
        self.data = own_output.load(
            arguments.state / "own_output.npz", slice(*(arguments.rows or [None]))
        )
        self.network = Network(config, backbone | self.weights, own_output.LENGTH)
        self.drafter = drafter.Drafter(self.network)
        self.optimiser = Optimiser(self.masters)
        tokenizer = load_tokenizer(arguments.checkpoint)
        self.teacher = Teacher(
            self.network,
            EngramHash(config["text_config"], compressed_map(tokenizer)),
            self.data.ids,
        )
        self.generator = torch.Generator().manual_seed(arguments.seed)
        self.order = torch.empty(0, dtype=torch.int64)
        self.noise = self.gumbel()

    def gumbel(self) -> torch.Tensor:
        """Gumbel noise [NOISE_ROWS, V] to draw rows from."""
        uniform = torch.rand(NOISE_ROWS, self.network.text["vocab_size"], generator=self.generator)
        return -torch.log(-torch.log(uniform.clamp_(1e-12, 1 - 1e-7)))

    def anchors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows of the data [B], row in them [A], last final position [A]): drafts that follow own output."""
        if len(self.order) < ROWS:
            self.order = torch.randperm(len(self.data.ids), generator=self.generator)
        rows, self.order = self.order[:ROWS], self.order[ROWS:]
        row = torch.arange(ROWS).repeat_interleave(ANCHORS // ROWS)
        first = self.data.prompt_tokens[rows][row] - 2
        share = torch.rand(len(row), generator=self.generator)
        ends = own_output.LENGTH - 1 - self.drafter.size
        return rows, row, first + (share * (ends - first)).long()

    def step(self, factor: float) -> tuple[float, torch.Tensor]:
        """One update; returns (loss, mean acceptance of every draft)."""
        rows, row, last = self.anchors()
        *features, hidden = self.teacher.look(rows)
        ids = self.data.ids[rows]
        steps = last[:, None] + 1 + torch.arange(self.drafter.size)
        states = hidden.view(*ids.shape, -1)[row[:, None], steps]
        target = functional.linear(states, self.network.weights["head.weight"])
        picks = torch.randint(NOISE_ROWS, steps.shape, generator=self.generator)
        heat = self.data.temperatures.float()[rows][row]
        noise = self.noise[picks] * (heat > 0)[:, None, None]
        for name, weight in self.weights.items():
            weight.data = quantise.round_to_storage(name, self.masters[name])
        loss, accepted = self.drafter.loss(
            ids, features, target, row, last, heat.clamp_min(COLDEST), noise
        )
        loss.backward()
        self.optimiser.step(self.weights, factor)
        for name, counts in self.network.trace.counts.items():
            if isinstance(name, str):
                load = counts.float()
                self.masters[f"{name}.ffn.gate.bias"] += BIAS_RATE * (load.mean() - load).sign()
        for weight in self.weights.values():
            weight.grad = None
        return loss.item(), accepted


def main() -> None:
    """Distil until the time budget is spent."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=16, help="of processor time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1.0, help="factor on all learning rates")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument(
        "--rows", type=int, nargs=2, help="first and end of own output to learn from; default all"
    )
    parser.add_argument("--new", action="store_true", help="start from random weights")
    parser.add_argument("--state", type=Path, default=Path("build/tiny-train"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run, start = Distillation(arguments), time.process_time()
    losses, shares = 0.0, torch.zeros(run.drafter.size)
    while (progress := (time.process_time() - start) / (arguments.minutes * 60)) < 1:
        factor = min(1.0, progress / WARM_UP + 0.02, (1 - progress) / (1 - DECAY_FROM))
        loss, accepted = run.step(factor * arguments.rate)
        losses, shares = losses + loss, shares + accepted
        if run.optimiser.steps % 50 == 0:
            seconds = time.process_time() - start
            print(
                f"step {run.optimiser.steps} time {seconds:.0f} s loss {losses / 50:.3f}"
                f" acceptance {[round(share, 3) for share in (shares / 50).tolist()]}",
                flush=True,
            )
            losses, shares = 0.0, torch.zeros(run.drafter.size)
            run.noise = run.gumbel()
            torch.save(run.masters, arguments.state / "drafter.pt")
    torch.save(run.masters, arguments.state / "drafter.pt")


if __name__ == "__main__":
    main()
