"""Compares numbers of verified drafts: `python -m headrace.scripts.bench_speculation local --batches 1 8 32 128`.

Every round answers the same prompts with no drafts, with 1, 3 and 5 always verified, and with as many as the schedule
chooses, one after the other on the same networks; a first round warms every arm's rank up. Tokens/s are medians over
rounds. Answers must be equal, or it fails.
"""

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace

import torch

from ..cluster.bench.engine import Engine, Round, code_prompts, make_requests
from ..cluster.config import ClusterConfig, load_cluster_config
from ..decode.config import DecodeConfig
from ..decode.speculation_config import SpeculationConfig
from ..transfer.errors import IntegrityError

ARMS = {
    "0": SpeculationConfig(proposer="off"),
    "1": SpeculationConfig(proposer="drafter", num_drafts=1, schedule="fixed"),
    "3": SpeculationConfig(proposer="drafter", num_drafts=3, schedule="fixed"),
    "5": SpeculationConfig(proposer="drafter", num_drafts=5, schedule="fixed"),
    "scheduled": SpeculationConfig(proposer="drafter", num_drafts=5),
}


def compare(config: ClusterConfig, args: argparse.Namespace, batch: int) -> dict[str, object]:
    """Tokens/s of every arm for one batch size, and what the schedule accepted."""
    output = max(args.output_tokens, args.least_steps // batch)
    engine = Engine(config, batch, args.prompt_tokens + output)
    prompts = code_prompts(config, batch, args.prompt_tokens)
    requests = make_requests(prompts, output, args.temperature)
    rounds: dict[str, list[Round]] = {name: [] for name in ARMS}
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(engine.session(settings(config.decode, arm)))
            for name, arm in ARMS.items()
        }
        for session in sessions.values():
            session.run(requests)
        for number in range(args.repeats):
            # every second round in the other direction, so that a drift of the machine favours nobody
            names = list(ARMS) if number % 2 == 0 else list(reversed(ARMS))
            for name in names:
                rounds[name].append(sessions[name].run(requests))
    answers = {found.ids for arm in rounds.values() for found in arm}
    if len(answers) != 1:
        raise IntegrityError(
            f"batch {batch}: drafts changed tokens, {len(answers)} different answers"
        )
    speeds = {
        name: [batch * output / found.decode_s for found in arm] for name, arm in rounds.items()
    }
    fixed = [name for name in ARMS if name != "scheduled"]
    best = max(fixed, key=lambda name: statistics.median(speeds[name]))
    ratios = [a / b for a, b in zip(speeds["scheduled"], speeds[best], strict=True)]
    return {
        "batch": batch,
        "output_tokens": output,
        **{f"tokens_per_s_{name}": round(statistics.median(s), 1) for name, s in speeds.items()},
        "best_fixed": best,
        "scheduled_over_best_fixed": round(statistics.median(ratios), 3),
        **{
            f"mean_accepted_{name}": round(arm[-1].stats["mean_accepted"], 2)
            for name, arm in rounds.items()
        },
    }


def settings(decode: DecodeConfig, arm: SpeculationConfig) -> DecodeConfig:
    """The configuration's decode settings with one arm's speculation."""
    return replace(decode, speculation=arm)


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--least-steps", type=int, default=384, help="tokens of a batch at least")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = load_cluster_config(args.config, [])
    found: list[dict[str, object]] = []
    for batch in args.batches:
        found.append(compare(config, args, batch))
        sys.stderr.write(json.dumps(found[-1]) + "\n")
    print(json.dumps({"temperature": args.temperature, "threads": args.threads, "results": found}))


if __name__ == "__main__":
    main()
