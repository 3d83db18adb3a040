"""Times the planning of decode steps: `python -m headrace.scripts.bench_planner CHECKPOINT --requests 1 64 256 1024`.

The rank is real; the network gives zeros at once, and drafts are n-grams of what follows, so a step's time is the
scheduler's: budget, growth, plan, and (as `step`) also building spans, sampling, accepting and delivering.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..decode.config import DecodeConfig
from ..decode.rank import DecodeRank
from ..kernels.reference.storage import KV_FORMATS
from ..model.batch import Logits, Span
from ..model.cache import Cache, cache_layout, default_keep
from ..model.config import load_config
from ..prefill.config import PrefillConfig
from ..prefill.events import Offered
from ..prefill.rank import PrefillRank
from ..transfer.loopback import LoopbackBackend, LoopbackHub
from ..transfer.request import Request, SamplingParams


class ZeroNetwork:
    """Has caches and computes nothing."""

    drafter = None

    def __init__(self, checkpoint: Path, num_requests: int) -> None:
        self.config = load_config(checkpoint)
        fmt = KV_FORMATS["released"]
        layout = cache_layout(self.config, fmt, 128, default_keep(self.config), "zeros")
        self.cache = Cache(self.config, fmt, layout, 3 * num_requests + 2, num_requests + 2)

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Zeros for every row that wants logits."""
        rows = sum(len(span.token_ids) for span in spans if span.logits is Logits.ALL)
        return torch.zeros(rows, 64)


def planning(checkpoint: Path, num_requests: int, num_steps: int) -> dict[str, float]:
    """Microseconds of planning and of a whole step for so many requests, medians over steps."""
    hub = LoopbackHub()
    networks = [ZeroNetwork(checkpoint, num_requests) for _ in range(2)]
    backends = [
        LoopbackBackend(hub, name, network.cache.arenas)
        for name, network in zip(("prefill", "decode"), networks, strict=True)
    ]
    backends[0].connect(backends[1].pairing())
    backends[1].connect(backends[0].pairing())
    prefill = PrefillRank(
        "prefill", networks[0], backends[0], PrefillConfig(chunk_tokens=4096, lease_s=600)
    )
    rank = DecodeRank(
        "decode", networks[1], backends[1], DecodeConfig(max_batch=num_requests, overlap=False)
    )
    for number in range(num_requests):
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        request = Request(
            request_id=f"r{number}", prompt_ids=(3, *[4] * (20 + number % 80)), sampling=params
        )
        prefill.submit(request)
        handoff = None
        while handoff is None:
            for event in prefill.step():
                assert isinstance(event, Offered)
                handoff = event.handoff
        rank.submit(request, handoff)
    while rank.stats()["running"] < num_requests:
        rank.pump()
        prefill.pump()
    for _ in range(num_steps):
        rank.step([rank.outlook])
    stats = rank.stats()
    rank.close()
    return {
        "requests": num_requests,
        "planner_us": round(stats["planner_us_p50"], 1),
        "device_us": round(1e3 * stats["step_ms_p50"], 1),
    }


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 512, 1024]
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for number in args.requests:
        runs = [planning(args.checkpoint, number, args.steps) for _ in range(args.repeats)]
        found.append({key: statistics.median(run[key] for run in runs) for key in runs[0]})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
