"""``headrace bench engine``: how fast one prefill rank and one decode rank are by themselves, in this process.

    prompts --> prefill rank (timed: prompt tokens/s) --loopback--> decode rank (timed: output tokens/s)

No Ray, no network: what is measured is the engine. Both ranks hold all experts and use the configuration's numerics and
decode settings; caches are made as large as the batch needs.
"""

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ...decode.config import DecodeConfig
from ...decode.events import DecodeFailed, Tokens
from ...decode.rank import DecodeRank
from ...model.config import load_config
from ...model.network import Network, load_network
from ...model.parallel import LocalExchange
from ...model.tokenizer import Tokenizer
from ...prefill.events import Offered
from ...prefill.rank import PrefillRank
from ...transfer.errors import ConfigError
from ...transfer.loopback import LoopbackBackend, LoopbackHub
from ...transfer.messages import Handoff
from ...transfer.request import Request, SamplingParams
from ..build import build_decode_rank, network_options
from ..config import ClusterConfig, checkpoint_dir, load_cluster_config
from ..show_config import add_config_arguments

_LEASE_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run of a batch. ``stats`` are the decode rank's since its start, ``ids`` the answers."""

    prefill_s: float
    decode_s: float
    stats: dict[str, Any]
    ids: tuple[tuple[int, ...], ...]


class Engine:
    """A prefill and a decode network with room for ``batch`` requests, used again in every round."""

    def __init__(self, config: ClusterConfig, batch: int, tokens: int) -> None:
        block_tokens = config.model.block_tokens
        num_blocks = 1 + batch * (2 - (-tokens // block_tokens))
        self._config = config
        self._batch = batch
        self._prefill, self._decode = (
            load_network(
                checkpoint_dir(config),
                options=replace(
                    network_options(config, kind), num_blocks=num_blocks, num_slots=batch + 2
                ),
            )
            for kind in ("prefill", "decode")
        )
        for network in (self._prefill, self._decode):
            network.warm_up()
        context = self._decode.config.max_position_embeddings
        if tokens > context:
            raise ConfigError(
                f"prompt and answer of {tokens} tokens do not fit into the context of {context}: ask for less"
            )

    @property
    def network(self) -> Network:
        """The decode rank's."""
        return self._decode

    def session(self, decode: DecodeConfig | None = None) -> "Session":
        """Ranks with the configuration's decode settings or others; only one session may answer at a time."""
        hub = LoopbackHub()
        backends = [
            LoopbackBackend(hub, name, network.cache.arenas)
            for name, network in (("prefill", self._prefill), ("decode", self._decode))
        ]
        backends[1].connect(backends[0].pairing())
        backends[0].connect(backends[1].pairing())
        limits = replace(self._config.prefill, lease_s=_LEASE_S, queue_timeout_s=_LEASE_S)
        prefill = PrefillRank("prefill", self._prefill, backends[0], limits)
        settings = replace(decode or self._config.decode, max_batch=self._batch)
        rank = build_decode_rank("decode", self._decode, backends[1], settings, LocalExchange())
        return Session(prefill, rank)


class Session:
    """Ranks that stay between rounds, so that what they learn about drafts and step times does too."""

    def __init__(self, prefill: PrefillRank, decode: DecodeRank) -> None:
        self._prefill, self._decode = prefill, decode

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._decode.close()

    def run(self, requests: Sequence[Request]) -> Round:
        """Answer ``requests`` together."""
        handoffs, prefill_s = _prefill_all(self._prefill, requests)
        return _decode_all(self._decode, self._prefill, requests, handoffs, prefill_s)


def _prefill_all(
    rank: PrefillRank, requests: Sequence[Request]
) -> tuple[dict[str, Handoff], float]:
    began = time.perf_counter()
    for request in requests:
        rank.submit(request)
    handoffs: dict[str, Handoff] = {}
    while len(handoffs) < len(requests):
        rank.pump()
        for event in rank.step():
            if not isinstance(event, Offered):
                raise event.error
            handoffs[event.request_id] = event.handoff
    return handoffs, time.perf_counter() - began


def _decode_all(
    rank: DecodeRank,
    prefill: PrefillRank,
    requests: Sequence[Request],
    handoffs: dict[str, Handoff],
    prefill_s: float,
) -> Round:
    for request in requests:
        rank.submit(request, handoffs[request.request_id])
    while rank.stats()["running"] < len(requests):
        rank.pump()
        prefill.pump()
    ids: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    unfinished = len(requests)
    began = time.perf_counter()
    while unfinished:
        rank.pump()
        for event in rank.step([rank.outlook]):
            if isinstance(event, DecodeFailed):
                raise event.error
            assert isinstance(event, Tokens)
            ids[event.request_id] += event.ids
            unfinished -= event.finish_reason is not None
    return Round(
        prefill_s=prefill_s,
        decode_s=time.perf_counter() - began,
        stats=dict(rank.stats()),
        ids=tuple(ids.values()),
    )


def code_prompts(config: ClusterConfig, number: int, length: int) -> list[tuple[int, ...]]:
    """``number`` different pieces of the standard library's source, ``length`` tokens each."""
    directory = checkpoint_dir(config)
    tokenizer = Tokenizer(directory, load_config(directory))
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(ids) >= number * length:
            break
        ids += tokenizer.encode_prompt(path.read_text(encoding="utf-8"))[1:]
    if len(ids) < number:
        raise ConfigError("the standard library's sources are not installed: they are the prompts")
    stride = max(1, (len(ids) - length) // number)
    first = tokenizer.encode_prompt("")[:1]
    return [(*first, *ids[at : at + length - 1]) for at in range(0, stride * number, stride)]


def make_requests(
    prompts: Sequence[tuple[int, ...]], output_tokens: int, temperature: float
) -> list[Request]:
    """Requests that run to their full length."""
    return [
        Request(
            request_id=f"bench-{number}",
            prompt_ids=ids,
            sampling=SamplingParams(
                max_tokens=output_tokens, temperature=temperature, seed=number, ignore_eos=True
            ),
        )
        for number, ids in enumerate(prompts)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    add_config_arguments(parser)
    parser.add_argument("--batch", type=int, default=32, help="requests at a time; default: 32")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each; default: 128")
    parser.add_argument("--output-tokens", type=int, default=64, help="of each; default: 64")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--threads", type=int, default=2, help="arithmetic threads; default: 2")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; medians are reported")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> dict[str, object]:
    """See cli.Command."""
    for name in ("batch", "prompt_tokens", "output_tokens", "threads", "repeats"):
        if getattr(args, name) < 1:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} {getattr(args, name)} is not allowed: at least 1")
    config = load_cluster_config(cast(str, args.config), cast("list[str]", args.overrides))
    torch.set_num_threads(args.threads)
    engine = Engine(config, args.batch, args.prompt_tokens + args.output_tokens)
    prompts = code_prompts(config, args.batch, args.prompt_tokens)
    requests = make_requests(prompts, args.output_tokens, args.temperature)
    rounds: list[Round] = []
    with engine.session() as session:
        session.run(requests)
        for number in range(args.repeats):
            rounds.append(session.run(requests))
            sys.stderr.write(f"round {number + 1} of {args.repeats}: {rounds[-1].decode_s:.2f} s\n")
    return {
        "batch": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "threads": args.threads,
        **summary(rounds, args.batch, args.prompt_tokens, args.output_tokens),
    }


def summary(
    rounds: Sequence[Round], batch: int, prompt_tokens: int, output_tokens: int
) -> dict[str, object]:
    """Medians over rounds."""

    def middle(values: Sequence[float], digits: int) -> float:
        return round(statistics.median(values), digits)

    return {
        "output_tokens_per_s": middle([batch * output_tokens / r.decode_s for r in rounds], 1),
        "prompt_tokens_per_s": middle([batch * prompt_tokens / r.prefill_s for r in rounds], 1),
        "step_ms_p50": middle([r.stats["step_ms_p50"] for r in rounds], 3),
        "planner_us_p50": middle([r.stats["planner_us_p50"] for r in rounds], 1),
        "mean_accepted": middle([r.stats["mean_accepted"] for r in rounds], 3),
    }
