"""Loss curve of a training run as CSV and PNG: `python -m headrace.scripts.tiny.report --state build/tiny-train`."""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from ..train_tiny import PHASES
from .export import CHECKPOINT

COLUMNS = ("step", "tokens", "seconds", "loss", "index_loss", "gradient_norm")
SMOOTHING = 0.9


def write_log(log: list[tuple], path: Path) -> None:
    """One row a step; `loss` is the mean cross entropy of the step's tokens in nats."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(log)


def plot(log: list[tuple], phase_ends: list[int], path: Path) -> None:
    """Loss over tokens, raw and smoothed, with a line at the end of every phase but the last."""
    tokens, losses = [row[1] / 1e6 for row in log], [row[3] for row in log]
    smooth, value = [], losses[0]
    for loss in losses:
        value = SMOOTHING * value + (1 - SMOOTHING) * loss
        smooth.append(value)
    figure, axes = plt.subplots(figsize=(6, 3.2))
    axes.plot(tokens, losses, linewidth=0.4, alpha=0.5, color="tab:blue")
    axes.plot(tokens, smooth, linewidth=1.2, color="tab:blue")
    for end in phase_ends:
        axes.axvline(end / 1e6, linewidth=0.6, color="gray", linestyle="--")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("training loss, nats per token")
    axes.set_ylim(min(smooth) - 0.3, 8.4)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Write loss.csv and loss.png."""
    parser = argparse.ArgumentParser(
        description="Write loss.csv and loss.png of a run into the checkpoint folder."
    )
    parser.add_argument("--state", type=Path, default=Path("build/tiny-train"))
    parser.add_argument("--minutes", type=float, default=80, help="as given to the run")
    arguments = parser.parse_args()
    log = torch.load(arguments.state / "state.pt", weights_only=True)["log"]
    write_log(log, CHECKPOINT / "loss.csv")
    ends = [
        max((row[1] for row in log if row[2] <= phase.until * arguments.minutes * 60), default=0)
        for phase in PHASES[:-1]
    ]
    plot(log, ends, CHECKPOINT / "loss.png")


if __name__ == "__main__":
    main()
