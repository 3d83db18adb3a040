"""Short prompts beside long ones on one prefill rank: `python -m headrace.scripts.bench_fairness [--plot FILE.png]`.

Prompts of 200 tokens arrive at random instants, first alone, then while prompts of 16,000 tokens are always under way.
Prints the time from arrival to offer of the short ones, and draws them. The cache is off: nobody shares anything.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np

from ..model.network import Network, load_network
from ..model.network_options import NetworkOptions
from ..prefill.config import PrefillConfig
from ..prefill.rank import Offered, PrefillRank
from ..transfer.codec import encode
from ..transfer.loopback import LoopbackBackend, LoopbackHub
from ..transfer.messages import ReleaseLease
from ..transfer.request import Request, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "configs" / "checkpoints" / "tiny-v41"


def request_of(name: str, length: int, rng: random.Random) -> Request:
    """Random ids."""
    ids = tuple(rng.randrange(3, 4000) for _ in range(length))
    return Request(request_id=name, prompt_ids=ids, sampling=SamplingParams(max_tokens=1))


def run(
    network: Network,
    config: PrefillConfig,
    *,
    seconds: float,
    every_s: float,
    num_long: int,
    length: int,
) -> tuple[list[float], int]:
    """Seconds from arrival to offer of every short prompt, and how many long ones ended."""
    rng, hub = random.Random(1), LoopbackHub()
    backend = LoopbackBackend(hub, "prefill", network.cache.arenas)
    reader = LoopbackBackend(hub, "decode", network.cache.arenas)
    reader.connect(backend.pairing())
    backend.connect(reader.pairing())
    rank = PrefillRank("prefill", network, backend, config)
    arrived: dict[str, float] = {}
    waits: list[float] = []
    began = time.perf_counter()
    number = ended = 0
    next_at = 0.0
    for n in range(num_long):
        rank.submit(request_of(f"long{n}", length, rng))
    while (now := time.perf_counter() - began) < seconds or arrived:
        while next_at <= min(now, seconds):
            name = f"short{number}"
            rank.submit(request_of(name, 200, rng))
            arrived[name] = next_at
            number += 1
            next_at += rng.expovariate(1 / every_s)
        rank.pump()
        if not rank.has_work:
            time.sleep(0.0005)
            continue
        for event in rank.step():
            if not isinstance(event, Offered):
                raise SystemExit(f"{event} was not expected")
            handoff = event.handoff
            names = ("lease_id", "incarnation", "request_id", "generation")
            done = ReleaseLease(**{name: getattr(handoff, name) for name in names})
            reader.send("prefill", encode(done))
            if event.request_id in arrived:
                waits.append(time.perf_counter() - began - arrived.pop(event.request_id))
            elif now < seconds:
                ended += 1
                rank.submit(request_of(f"long{num_long + ended}", length, rng))
    return waits, ended


def main() -> None:
    """Prints one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=0.3, help="mean gap of short prompts")
    parser.add_argument("--num-long", type=int, default=2, help="long prompts under way")
    parser.add_argument("--length", type=int, default=16_000)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    num_blocks = 2 + (args.num_long + 2) * -(-args.length // 128)
    network = load_network(CHECKPOINT, options=NetworkOptions(num_blocks=num_blocks, num_slots=40))
    network.warm_up()
    config = PrefillConfig(chunk_tokens=args.chunk_tokens, prefix_cache="off", queue_timeout_s=3600)
    common = {"seconds": args.seconds, "every_s": args.every_s, "length": args.length}
    run(network, config, **common | {"seconds": 2.0}, num_long=1)
    alone, _ = run(network, config, **common, num_long=0)
    beside, ended = run(network, config, **common, num_long=args.num_long)
    found = {
        name: {
            f"p{percent}_ms": round(1e3 * float(np.percentile(waits, percent)), 1)
            for percent in (50, 95, 99)
        }
        for name, waits in (("alone", alone), ("beside_long_prompts", beside))
    }
    ratio = found["beside_long_prompts"]["p99_ms"] / found["alone"]["p99_ms"]
    if args.plot is not None:
        draw(args.plot, alone, beside, args.length)
    print(
        json.dumps(
            {
                **found,
                "p99_ratio": round(ratio, 2),
                "short_prompts": [len(alone), len(beside)],
                "long_prompts_ended": ended,
                "chunk_tokens": args.chunk_tokens,
            }
        )
    )


def draw(path: Path, alone: list[float], beside: list[float], length: int) -> None:
    """Both distributions."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.4), dpi=130)
    for waits, color, label in (
        (alone, "#888888", "alone"),
        (beside, "#2b6cb0", f"beside prompts of {length:,} tokens"),
    ):
        values = np.sort(np.array(waits)) * 1e3
        axes.plot(values, np.linspace(0, 1, len(values)), color=color, label=label)
    axes.set_xlabel("ms from the arrival of a 200-token prompt to its offer")
    axes.set_ylabel("share of prompts")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
