"""Draws docs/eplb.png: a batch whose topic turns half-way, with and without rebalancing of experts.

    python -m headrace.scripts.eplb_picture --output docs/eplb.png

Requests continue Python sources of the standard library first, then prose (Python's reference pages and the licence).
The batch runs twice through a cluster of its own, with `decode.eplb.enabled` true and false. Every request has to be
answered, and both runs have to give the same tokens and logprobs; the picture is made of what the running cluster
measured. Prints one JSON document.
"""

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PROMPT_CHARACTERS = 300
RUNS = {"on": "true", "off": "false"}


@dataclass(frozen=True, eq=False)
class Course:
    """The balance of the decode instance pass by pass; arrays [passes], passes without rows left out."""

    steps: np.ndarray
    rows: np.ndarray
    balance: np.ndarray
    epoch: np.ndarray

    @classmethod
    def of(cls, report: dict[str, Any]) -> "Course":
        """From what ``headrace batch --eplb-report`` saved."""
        series = report["decode"]["instances"][0]["series"]
        rows = np.array(series["rows"], float)
        busy = rows > 0
        return cls(
            steps=np.arange(busy.sum()),
            rows=rows[busy],
            balance=np.array([value or 0.0 for value in series["balance"]])[busy],
            epoch=np.array(series["epoch"])[busy],
        )

    def over(self, first: int, end: int) -> float:
        """The balance of passes ``first`` to before ``end`` together: means over peaks."""
        rows = self.rows[first:end]
        return float(rows.sum() / (rows / self.balance[first:end]).sum())

    def smooth(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """The balance over ``window`` passes at a time, at their middle."""
        firsts = range(max(1, len(self.rows) - window + 1))
        values = np.array([self.over(first, first + window) for first in firsts])
        return self.steps[: len(values)] + window / 2, values

    def step_at(self, share: float) -> int:
        """The pass in which this share of all rows is done."""
        done = np.cumsum(self.rows)
        return int(np.searchsorted(done, share * done[-1]))


def drifting_prompts(number: int, seed: int) -> list[str]:
    """``number`` texts: sources in the first half, prose in the second."""
    rng = random.Random(seed)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    code = [path.read_text(encoding="utf-8") for path in sorted(stdlib.glob("*.py"))]
    prose = [*topics.topics.values(), (ROOT / "LICENSE").read_text(encoding="utf-8")]

    def piece(texts: Sequence[str]) -> str:
        text = rng.choice([text for text in texts if len(text) > 2 * PROMPT_CHARACTERS])
        start = text.index("\n", rng.randrange(len(text) - PROMPT_CHARACTERS - 100))
        return text[start + 1 : start + 1 + PROMPT_CHARACTERS]

    half = number // 2
    return [piece(code) for _ in range(half)] + [piece(prose) for _ in range(number - half)]


def write_input(path: Path, prompts: Sequence[str], output_tokens: int) -> None:
    """Batch lines; half of them greedy, half sampled with a seed."""
    with path.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts):
            line = {
                "id": f"r{number:04}",
                "prompt": prompt,
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "logprobs": 1,
                "temperature": 0.0 if number % 2 else 0.8,
                "seed": number,
            }
            file.write(json.dumps(line) + "\n")


def run_batch(folder: Path, config: str, name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Answers the input in a cluster of its own; returns the closing report."""
    command = [sys.executable, "-m", "headrace.cluster.cli", "batch", config]
    command += ["--input", str(folder / "input.jsonl"), "--output", str(folder / f"{name}.jsonl")]
    command += ["--eplb-report", str(folder / f"{name}.json"), "--ordered", "--json"]
    for setting in (*settings, f"decode.eplb.enabled={RUNS[name]}"):
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def answers(path: Path) -> list[Any]:
    """Choices and usage of every line, in the order of the input."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (line["custom_id"], line["response"]["body"]["choices"], line["response"]["body"]["usage"])
        for line in lines
        if line["error"] is None
    ]


def draw(path: Path, on: Course, off: Course, turn: tuple[float, float], window: int) -> None:
    """``turn``: the shares of all rows between which both topics run."""
    figure, axes = plt.subplots(figsize=(9, 4.2), dpi=130)
    axes.axvspan(
        on.step_at(turn[0]),
        on.step_at(turn[1]),
        color="#f3e3c3",
        label="requests turn from code to prose",
    )
    axes.plot(on.steps, on.balance, ".", color="#2b6cb0", alpha=0.15, markersize=3)
    axes.plot(*off.smooth(window), color="#888888", label="experts stay where they are")
    axes.plot(*on.smooth(window), color="#2b6cb0", linewidth=2, label="experts are rebalanced")
    flips = np.flatnonzero(np.diff(on.epoch) > 0) + 1
    for number, step in enumerate(on.steps[flips]):
        label = "a new plan is in force" if number == 0 else None
        axes.axvline(float(step), color="#2f855a", linestyle=":", linewidth=1, label=label)
    axes.set_xlabel("decode pass")
    axes.set_ylabel("balance: rows of the mean rank / busiest rank")
    axes.set_title(
        f"4 decode ranks, live; every pass (dots) and over {window} passes (lines)", fontsize=10
    )
    axes.set_ylim(min(0.5, float(off.smooth(window)[1].min()) - 0.03), 1.0)
    axes.legend(loc="lower left", fontsize=8, framealpha=0.9)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def figures(on: Course, off: Course, turn: tuple[float, float], window: int) -> dict[str, Any]:
    """The picture in numbers."""
    begin, end = (on.step_at(share) for share in turn)
    moved = np.flatnonzero(np.diff(on.epoch) > 0) + 1
    first_plan = int(moved[0]) if len(moved) else len(on.rows)
    after = on.smooth(window)[1][begin:]
    return {
        "passes": len(on.rows),
        "plans_in_force_at": moved.tolist(),
        "balance_at_first": round(on.over(0, first_plan), 3),
        "balance_of_code": round(on.over(max(0, begin - 3 * window), begin), 3),
        "balance_at_the_dip": round(float(after.min()), 3),
        "balance_of_prose": round(on.over(len(on.rows) - 3 * window, len(on.rows)), 3),
        "unmoved_balance_of_code": round(off.over(0, off.step_at(turn[0])), 3),
        "unmoved_balance_of_prose": round(off.over(off.step_at(turn[1]), len(off.rows)), 3),
        "turn_passes": [begin, end],
    }


def main() -> None:
    """Runs both batches, compares them and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="local_ep4")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--in-flight", type=int, default=65, help="requests at a time, for the label"
    )
    parser.add_argument("--window", type=int, default=20, help="passes that a line averages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "eplb.png")
    parser.add_argument("--keep", type=Path, help="folder for inputs, answers and reports")
    parser.add_argument("--redraw", action="store_true", help="draw again what --keep holds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not args.redraw:
            prompts = drifting_prompts(args.requests, args.seed)
            write_input(folder / "input.jsonl", prompts, args.output_tokens)
            closing = {name: run_batch(folder, args.config, name, args.settings) for name in RUNS}
            (folder / "closing.json").write_text(json.dumps(closing))
        closing = json.loads((folder / "closing.json").read_text())
        failed = sum(closing[name]["failed"] for name in RUNS)
        same = answers(folder / "on.jsonl") == answers(folder / "off.jsonl")
        on, off = (Course.of(json.loads((folder / f"{name}.json").read_text())) for name in RUNS)
        turn = (0.5 - args.in_flight / args.requests, 0.5)
        draw(args.output, on, off, turn, args.window)
        (instance,) = closing["on"]["eplb"]["decode"]["instances"]
        document = {
            "requests": args.requests,
            "failed": failed,
            "same_tokens": same,
            **figures(on, off, turn, args.window),
            "moved_experts": instance["moved_experts"],
            "moved_bytes": instance["moved_bytes"],
            "stall_s": instance["stall_s"],
            "output_tokens_per_s": {
                name: closing[name]["run_output_tokens_per_s"] for name in RUNS
            },
            "tpot_p50_s": {name: closing[name]["tpot_p50_s"] for name in RUNS},
        }
    print(json.dumps(document))
    if failed or not same or not instance["moved_experts"]:
        sys.exit("a request failed, tokens differ, or nothing was moved: this is not the picture")


if __name__ == "__main__":
    main()
