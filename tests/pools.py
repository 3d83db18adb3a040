"""Instances of the product's own ranks and loops on threads of the test's process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.cluster.rank_loop import RankLoop
from headrace.decode.config import DecodeConfig
from headrace.decode.events import Tokens
from headrace.decode.grammar_compiler import GrammarCompiler
from headrace.decode.keeper import Keeper
from headrace.decode.rank import DecodeRank
from headrace.model.network import load_network
from headrace.model.network_options import NetworkOptions, Part
from headrace.model.parallel import LocalExchange, ThreadExchange, ThreadHub
from headrace.prefill.config import PrefillConfig
from headrace.prefill.events import Offered
from headrace.prefill.hits import PrefixMode
from headrace.prefill.rank import PrefillRank
from headrace.transfer.backend import Arenas, TransferBackend
from headrace.transfer.request import Request
from headrace.transfer.tiers.open import open_tiers
from headrace.transfer.tiers.tiers_config import TiersConfig

CHECKPOINT = Path(__file__).parents[1] / "configs" / "checkpoints" / "tiny-v41"
TIMEOUT_S = 240.0
MakeBackend = Callable[[str, Arenas], TransferBackend]


@dataclass(frozen=True)
class Pool:
    """The loops of one instance, their ranks and transports."""

    loops: list[RankLoop]
    backends: list[TransferBackend]

    def stop(self) -> None:
        for loop in self.loops:
            loop.check_integrity(timeout_s=30)
        for loop in self.loops:
            assert loop.stop(timeout_s=30)

    def connect(self, other: "Pool") -> None:
        """Make every rank of ``other`` known to every rank; a transport is used from its loop's thread alone."""
        for loop, backend in zip(self.loops, self.backends, strict=True):
            for peer in other.backends:
                loop.call(partial(backend.connect, peer.pairing()), TIMEOUT_S, "pair")


def start_pool(
    kind: str,
    size: int,
    chunk: int,
    make_backend: MakeBackend,
    *,
    decode: DecodeConfig | None = None,
    num_blocks: int = 200,
    num_slots: int = 33,
    block_tokens: int = 128,
    seam: bool = False,
    prefix_cache: PrefixMode = "exact",
    tiers: TiersConfig | None = None,
) -> Pool:
    """Ranks of the bundled checkpoint, taking turns; with ``seam`` of the part that the pool holds."""
    settings = decode or DecodeConfig(max_batch=num_slots - 1)
    part: Part = "whole" if not seam else "encoder" if kind == "prefill" else "decoder"
    num_tails = settings.num_tails if part == "decoder" else 0
    hub = ThreadHub(size, timeout_s=TIMEOUT_S)
    pool = Pool([], [])
    for rank in range(size):
        options = NetworkOptions(
            num_blocks=num_blocks,
            num_slots=num_slots,
            block_tokens=block_tokens,
            part=part,
            num_tails=num_tails,
        )
        exchange = ThreadExchange(hub, rank) if size > 1 else LocalExchange()
        network = load_network(CHECKPOINT, options=options, exchange=exchange)
        name, layout = f"{kind}.{rank}", network.cache.layout
        stack = None if tiers is None else open_tiers(tiers, layout)
        backend = make_backend(name, network.cache.arenas)
        worker = (
            PrefillRank(
                name,
                network,
                backend,
                PrefillConfig(chunk_tokens=chunk, lease_s=TIMEOUT_S, prefix_cache=prefix_cache),
                tiers=stack,
            )
            if kind == "prefill"
            else DecodeRank(
                name,
                network,
                backend,
                settings,
                pieces=network.tokenizer.text_bytes,
                grammars=GrammarCompiler(network.tokenizer),
                rank=rank,
                keeper=Keeper(stack, network.cache, prefix_cache),
            )
        )
        loop = RankLoop(name)
        loop.on_close(backend.close)
        loop.on_close(worker.close)
        loop.on_close(exchange.close)  # a rank that leaves lets the others go, as in the cluster
        loop.begin(worker, exchange)
        pool.loops.append(loop)
        pool.backends.append(backend)
    return pool


def answer(prefill: Pool, decode: Pool, asked: list[Request]) -> dict[str, tuple[int, ...]]:
    """Send every request through a prefill and a decode rank, spread in turn."""
    by_id = {request.request_id: (number, request) for number, request in enumerate(asked)}
    for number, request in enumerate(asked):
        prefill.loops[number % len(prefill.loops)].submit_many([(request,)])
    answers: dict[str, tuple[int, ...]] = {request.request_id: () for request in asked}
    unfinished = set(answers)
    deadline = time.monotonic() + TIMEOUT_S
    while unfinished:
        assert time.monotonic() < deadline, f"unanswered: {sorted(unfinished)}"
        for loop in prefill.loops:
            for event in loop.collect(0.005):
                assert isinstance(event, Offered), event
                number, request = by_id[event.request_id]
                decode.loops[number % len(decode.loops)].submit_many([(request, event.handoff)])
        for loop in decode.loops:
            for event in loop.collect(0.005):
                assert isinstance(event, Tokens), event
                answers[event.request_id] += event.ids
                if event.finish_reason is not None:
                    unfinished.discard(event.request_id)
    return answers


def stats(pool: Pool) -> list[dict[str, Any]]:
    """What each rank counted."""
    return [loop.stats(timeout_s=30) for loop in pool.loops]
