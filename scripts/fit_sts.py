"""Calibrates the drafter's confidences by sequential temperature scaling: `python -m headrace.scripts.fit_sts`.

Drafts on held-out code at several temperatures, and for every draft in order chooses the factor with which the product
of confidences up to it best matches how often all of them were accepted (spec/model.md 6.6). Every second prompt is
for fitting, the others for the errors that are printed. Writes `dspark_sts.json` into the checkpoint.
"""

import argparse
import json
from pathlib import Path

import torch

from ..model.config import load_config
from ..model.drafter import TEMPERATURES_FILE, draft_temperatures
from .tiny.export import CHECKPOINT, load_tokenizer
from .tiny.own_output import open_network
from .tiny.speculation import Answer, answers, held_out_prompts

GRID = torch.logspace(-1, 1, 41, dtype=torch.float64)
BINS = 15
TEMPERATURES = (0.0, 0.7, 1.0)


def calibration_error(probabilities: torch.Tensor, right: torch.Tensor) -> float:
    """Expected calibration error over BINS bins of equal width: mean distance of claimed and observed frequency.

    `probabilities` [N] in 0..1, `right` bool [N].
    """
    places = (probabilities * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64)
    gaps.index_add_(0, places, probabilities.double() - right.double())
    return float(gaps.abs().sum() / len(probabilities))


def survival_errors(
    raw: torch.Tensor, accepted: torch.Tensor, temperatures: list[float]
) -> list[float]:
    """Calibration error of every draft's survival: `raw` confidence logits [N, G], `accepted` drafts [N]."""
    survival = torch.sigmoid(raw / torch.tensor(temperatures, dtype=raw.dtype)).cumprod(1)
    return [
        calibration_error(survival[:, place], accepted > place) for place in range(raw.shape[1])
    ]


def fit(raw: torch.Tensor, accepted: torch.Tensor) -> list[float]:
    """The factor of every draft, one after the other: `raw` confidence logits [N, G], `accepted` drafts [N]."""
    before = torch.ones(len(raw), dtype=raw.dtype)
    chosen: list[float] = []
    for place in range(raw.shape[1]):
        survival = [before * torch.sigmoid(raw[:, place] / factor) for factor in GRID]
        errors = [calibration_error(one, accepted > place) for one in survival]
        best = errors.index(min(errors))
        chosen.append(round(float(GRID[best]), 4))
        before = survival[best]
    return chosen


def observed(made: list[Answer], current: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(confidence logits before scaling [N, G], accepted drafts [N]) of all rounds."""
    rounds = [one for answer in made for one in answer.rounds]
    confidences = torch.tensor([one.confidences for one in rounds], dtype=torch.float64)
    raw = torch.logit(confidences, eps=1e-7) * torch.tensor(current, dtype=torch.float64)
    return raw, torch.tensor([one.accepted for one in rounds])


def main() -> None:
    """Fit, write the file, print factors and errors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prompts = held_out_prompts(
        load_tokenizer(arguments.checkpoint), arguments.prompts, arguments.prompt_tokens
    )
    length = arguments.prompt_tokens + arguments.new_tokens + 8
    network = open_network(arguments.checkpoint, len(prompts), length, deterministic=True)
    current = draft_temperatures(arguments.checkpoint, load_config(arguments.checkpoint))
    fitting: list[Answer] = []
    judging: list[Answer] = []
    for temperature in TEMPERATURES:
        made = answers(network, prompts, temperature, arguments.new_tokens)
        fitting += made[::2]
        judging += made[1::2]
    temperatures = fit(*observed(fitting, current))
    document = json.dumps({"temperatures": temperatures}) + "\n"
    (arguments.checkpoint / TEMPERATURES_FILE).write_text(document)
    raw, accepted = observed(judging, current)
    before = survival_errors(raw, accepted, [1.0] * raw.shape[1])
    after = survival_errors(raw, accepted, temperatures)
    result = {
        "rounds": len(raw),
        "temperatures": temperatures,
        "error_before": [round(error, 4) for error in before],
        "error_after": [round(error, 4) for error in after],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
