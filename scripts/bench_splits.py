"""Both ways to cut the network, side by side: `python -m headrace.scripts.bench_splits [--json]`.

What a prefill rank holds, what a handoff moves, what prompts and running requests wait for: one prefill and one decode
rank of each split in this process, in turns. Then the same sizes for the released model, by formula.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..decode.config import DecodeConfig
from ..decode.events import Tokens
from ..decode.rank import DecodeRank
from ..decode.speculation_config import SpeculationConfig
from ..kernels.storage import KV_FORMATS
from ..model.cache import cache_layout, default_keep
from ..model.config import config_from_dict
from ..model.network import Network, load_network
from ..model.network_options import NetworkOptions, Part
from ..prefill.config import PrefillConfig
from ..prefill.rank import Offered, PrefillRank
from ..transfer.loopback import LoopbackBackend, LoopbackHub
from ..transfer.request import Request, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "configs" / "checkpoints" / "tiny-v41"
SLOTS, TAILS, BYSTANDERS = 24, 8, 8


@dataclass
class Side:
    """A prefill and a decode rank of one split. ``now`` is the wall clock."""

    name: str
    prefill_network: Network
    decode_network: Network
    prefill: PrefillRank
    decode: DecodeRank

    def prefill_one(self, request: Request) -> Offered:
        """Run a prompt to its offer."""
        self.prefill.submit(request)
        while True:
            self.prefill.pump()
            for event in self.prefill.step():
                if isinstance(event, Offered):
                    return event
                raise SystemExit(f"{event} was not expected")

    def turn(self) -> list[Tokens]:
        """One turn of decode, with prefill's answers."""
        self.decode.pump()
        events = self.decode.step() if self.decode.outlook[0] else []
        self.prefill.pump()
        return [event for event in events if isinstance(event, Tokens)]


def make_side(name: str, tail_tokens: int) -> Side:
    """Ranks of the bundled checkpoint."""
    parts: tuple[Part, Part] = ("whole", "whole") if name == "classic" else ("encoder", "decoder")
    networks = [
        load_network(
            CHECKPOINT,
            options=NetworkOptions(
                num_blocks=200, num_slots=SLOTS, part=part, num_tails=TAILS * (part == "decoder")
            ),
        )
        for part in parts
    ]
    for network in networks:
        network.warm_up()
    hub = LoopbackHub()
    backends = [
        LoopbackBackend(hub, side, network.cache.arenas)
        for side, network in zip(("prefill", "decode"), networks, strict=True)
    ]
    backends[1].connect(backends[0].pairing())
    backends[0].connect(backends[1].pairing())
    limits = PrefillConfig(chunk_tokens=2048, prefix_cache="off")
    speculation = SpeculationConfig(proposer="off")
    config = DecodeConfig(
        max_batch=SLOTS - 2,
        overlap=False,
        speculation=speculation,
        tail_tokens=tail_tokens,
        num_tails=TAILS,
    )
    prefill = PrefillRank("prefill", networks[0], backends[0], limits)
    decode = DecodeRank("decode", networks[1], backends[1], config)
    return Side(name, networks[0], networks[1], prefill, decode)


def request_of(name: str, length: int, max_tokens: int, seed: int) -> Request:
    """Ids that depend on the seed."""
    ids = tuple((seed * 7919 + 31 * n) % 4000 + 3 for n in range(length))
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_ids=ids, sampling=sampling)


def measure(side: Side, length: int, arrivals: int, round_number: int) -> dict[str, list[float]]:
    """TTFT of newcomers in ms (prefill and decode by turns) and TPOT of bystanders, alone and beside arrivals."""
    for n in range(BYSTANDERS):
        request = request_of(f"b{round_number}.{n}", 40, 400, n)
        side.decode.submit(request, side.prefill_one(request).handoff)
    while side.decode.stats()["running"] < BYSTANDERS:
        side.turn()
    found: dict[str, list[float]] = {
        "prefill_ms": [],
        "first_ms": [],
        "alone_ms": [],
        "beside_ms": [],
    }
    for _ in range(20):
        found["alone_ms"].append(timed(side))
    for n in range(arrivals):
        request = request_of(f"a{round_number}.{n}", length, 1, 100 + n + round_number)
        began = time.perf_counter()
        offered = side.prefill_one(request)
        found["prefill_ms"].append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        side.decode.submit(request, offered.handoff)
        waiting = True
        while waiting:
            step = time.perf_counter()
            tokens = side.turn()
            if any(each.request_id.startswith("b") for each in tokens):
                found["beside_ms"].append(1e3 * (time.perf_counter() - step))
            waiting = not any(each.request_id == request.request_id for each in tokens)
        found["first_ms"].append(1e3 * (time.perf_counter() - began))
    for n in range(BYSTANDERS):
        side.decode.cancel(f"b{round_number}.{n}")
    while side.decode.stats()["running"]:
        side.turn()
    return found


def timed(side: Side) -> float:
    """A turn in ms."""
    began = time.perf_counter()
    side.turn()
    return 1e3 * (time.perf_counter() - began)


def held(side: Side) -> dict[str, Any]:
    """Bytes that a prefill rank holds of experts, and that a handoff of 1,024 tokens moves."""
    store, layout = side.prefill_network.expert_store, side.prefill_network.cache.layout
    return {
        "prefill_expert_bytes": store.layers * store.slots_per_rank * store.expert_bytes,
        "handoff_bytes_1024": layout.handoff_bytes(1024),
        "slot_and_tail_bytes": layout.handoff_bytes(1024) - int(layout.bytes_per_token * 1024),
    }


def released(config_file: Path) -> dict[str, dict[str, float]]:
    """The same for the released model in FP4, from its configuration; expert bytes read by a prompt of 1,024 tokens.

    A prompt of so many rows reads every expert of the encoder layers; its ``keep`` tail rows read, of each decoder
    layer, all but those that no row chose: 1 - (1 - top_k / experts) ** keep of them.
    """
    config = config_from_dict(json.loads(config_file.read_text()), str(config_file))
    keep, fmt = default_keep(config), KV_FORMATS["released"]
    split, layers, experts = config.split_layer, config.num_hidden_layers, config.n_routed_experts
    expert = 3 * config.hidden_size * config.moe_intermediate_size * 17 / 32
    touched = experts * (1 - (1 - config.num_experts_per_tok / experts) ** keep)
    found: dict[str, dict[str, float]] = {}
    for name in ("classic", "seam"):
        seam = name == "seam"
        layout = cache_layout(config, fmt, 128, keep, "released", seam=seam)
        decoder_layers = 0 if seam else layers - split
        found[name] = {
            "prefill_expert_gb": round((split + decoder_layers) * experts * expert / 1e9, 1),
            "handoff_mb_1024": round(layout.handoff_bytes(1024) / 1e6, 2),
            "handoff_mb_32768": round(layout.handoff_bytes(32768) / 1e6, 2),
            "prefill_expert_gb_read_per_prompt": round(
                (split * experts + decoder_layers * touched) * expert / 1e9, 1
            ),
        }
    return found


def summary(values: Sequence[float]) -> float:
    """The median, rounded."""
    return round(statistics.median(values), 2)


def main() -> None:
    """Prints one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--arrivals", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tail-tokens", type=int, default=64)
    parser.add_argument("--released-config", type=Path, help="config.json of the released model")
    args = parser.parse_args()
    sides = [make_side(name, args.tail_tokens) for name in ("classic", "seam")]
    sums: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
    for number in range(args.repeats):
        for side in sides:
            for key, values in measure(side, args.length, args.arrivals, number).items():
                sums[side.name].setdefault(key, []).extend(values)
    document: dict[str, Any] = {
        side.name: {
            **held(side),
            **{key: summary(values) for key, values in sums[side.name].items()},
            "beside_max_ms": round(max(sums[side.name]["beside_ms"]), 2),
        }
        for side in sides
    }
    if args.released_config is not None:
        document["released"] = released(args.released_config)
    for side in sides:
        side.decode.close()
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
