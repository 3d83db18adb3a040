"""Real ranks: a network over the checkpoint, an expert exchange over gloo, a NIXL transport."""

from dataclasses import dataclass
from typing import cast

import torch

from ..decode import sampler
from ..decode.config import DecodeConfig
from ..decode.grammar_compiler import GrammarCompiler
from ..decode.keeper import Keeper
from ..decode.profiling import measured_cost
from ..decode.rank import DecodeRank
from ..model.checkpoint import Checkpoint
from ..model.exchange import join_exchange
from ..model.expert_reads import expert_layout
from ..model.network import Network, load_network
from ..model.network_options import NetworkOptions, Part
from ..model.parallel import ExpertExchange
from ..model.rebalance import ExpertMover
from ..prefill.rank import PrefillRank
from ..transfer.backend import Arenas, TransferBackend
from ..transfer.nixl import NixlBackend
from ..transfer.tiers.open import open_tiers
from .config import ClusterConfig, checkpoint_dir
from .rank_experts import RankExperts
from .rank_host import BuiltRank, Joined, RankId


def network_options(config: ClusterConfig, kind: str) -> NetworkOptions:
    """How the ranks of a pool run the checkpoint."""
    pool = config.prefill if kind == "prefill" else config.decode
    part: Part = "whole"
    num_tails = 0
    if config.split == "seam":
        part = "encoder" if kind == "prefill" else "decoder"
        num_tails = 0 if kind == "prefill" else config.decode.num_tails
    return NetworkOptions(
        numerics=config.model.numerics,
        deterministic=config.model.deterministic,
        block_tokens=config.model.block_tokens,
        num_blocks=pool.num_blocks,
        num_slots=pool.num_slots,
        keep=config.model.keep,
        experts=pool.experts,
        part=part,
        num_tails=num_tails,
    )


def build_decode_rank(
    name: str,
    network: Network,
    backend: TransferBackend,
    config: DecodeConfig,
    exchange: ExpertExchange,
    keeper: Keeper | None = None,
) -> DecodeRank:
    """A decode rank with everything it can have. Every rank of an instance calls this at the same time."""
    tokenizer = network.tokenizer
    sampler.warm_up()
    return DecodeRank(
        name,
        network,
        backend,
        config,
        pieces=tokenizer.text_bytes,
        grammars=GrammarCompiler(tokenizer, limits=config.grammar),
        cost=measured_cost(network, config, exchange),
        rank=exchange.rank,
        keeper=keeper,
    )


def build_experts(who: RankId, network: Network, config: ClusterConfig) -> RankExperts:
    """What moves experts between the ranks of an instance, if the pool wants that and there are several."""
    pool = config.prefill if who.kind == "prefill" else config.decode
    if not pool.eplb.enabled or who.size == 1:
        return RankExperts(network)
    store = network.expert_store
    layout = expert_layout(network.cache.layout.model_fingerprint, store.expert_bytes)
    slots = torch.zeros((1, layout.slot_bytes), dtype=torch.uint8)
    arenas = Arenas(layout=layout, blocks=store.arena, slots=slots)
    names = [f"{who.instance}.{rank}.experts" for rank in range(who.size)]
    backend = NixlBackend(names[who.rank], arenas, config.transfer.nixl)
    mover = ExpertMover(
        network,
        backend,
        names,
        who.rank,
        bandwidth=pool.eplb.bandwidth_mib_per_s * 2**20,
        deadline_s=pool.eplb.deadline_s,
    )
    return RankExperts(network, mover, backend)


@dataclass(frozen=True, slots=True)
class NetworkBuilder:
    """Builds ranks of the configured checkpoint."""

    def check(self, who: RankId, config: ClusterConfig) -> None:
        """Headers, names, shapes and sizes; no weights are read."""
        Checkpoint(checkpoint_dir(config))
        network_options(config, who.kind)

    def join(self, who: RankId, config: ClusterConfig, address: str) -> Joined:
        """One rank needs no company."""
        pool = config.prefill if who.kind == "prefill" else config.decode
        limit = config.timeouts.step_s
        return join_exchange(pool.experts.exchange, address, who.rank, who.size, limit)

    def load(self, who: RankId, config: ClusterConfig, exchange: Joined) -> BuiltRank:
        """Reads this rank's share of the weights."""
        network = load_network(
            checkpoint_dir(config),
            options=network_options(config, who.kind),
            exchange=cast(ExpertExchange, exchange),
        )
        network.warm_up()
        backend = NixlBackend(who.name, network.cache.arenas, config.transfer.nixl)
        experts = build_experts(who, network, config)
        tiers = open_tiers(config.tiers, network.cache.layout) if config.tiers.any else None
        if who.kind == "prefill":
            rank = PrefillRank(who.name, network, backend, config.prefill, tiers=tiers)
        else:
            rank = build_decode_rank(
                who.name,
                network,
                backend,
                config.decode,
                cast(ExpertExchange, exchange),
                Keeper(tiers, network.cache, config.prefill.prefix_cache),
            )
        network.expert_counts.clear()  # of passes that measured what a step costs
        return BuiltRank(
            rank=rank,
            peering=backend,
            context_tokens=network.config.max_position_embeddings,
            experts=experts,
        )
