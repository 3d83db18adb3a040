"""Real ranks: a network over the checkpoint, an expert exchange over gloo, a NIXL transport."""

from dataclasses import dataclass
from typing import cast

from ..decode import sampler
from ..decode.config import DecodeConfig
from ..decode.grammar_compiler import GrammarCompiler
from ..decode.profiling import measured_cost
from ..decode.rank import DecodeRank
from ..model.checkpoint import Checkpoint
from ..model.exchange import join_exchange
from ..model.network import Network, NetworkOptions, load_network
from ..model.parallel import ExpertExchange
from ..prefill.rank import PrefillRank
from ..transfer.backend import Arenas, TransferBackend
from ..transfer.nixl import NixlBackend
from .config import ClusterConfig, checkpoint_dir
from .rank_host import BuiltRank, Joined, RankId


def network_options(config: ClusterConfig, kind: str) -> NetworkOptions:
    """How the ranks of a pool run the checkpoint."""
    pool = config.prefill if kind == "prefill" else config.decode
    return NetworkOptions(
        numerics=config.model.numerics,
        deterministic=config.model.deterministic,
        block_tokens=config.model.block_tokens,
        num_blocks=pool.num_blocks,
        num_slots=pool.num_slots,
        keep=config.model.keep,
        experts=pool.experts,
    )


def build_decode_rank(
    name: str,
    network: Network,
    backend: TransferBackend,
    config: DecodeConfig,
    exchange: ExpertExchange,
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
    )


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
        cache = network.cache
        arenas = Arenas(layout=cache.layout, blocks=cache.blocks, slots=cache.slots)
        backend = NixlBackend(who.name, arenas, config.transfer.nixl)
        if who.kind == "prefill":
            rank = PrefillRank(who.name, network, backend, config.prefill)
        else:
            rank = build_decode_rank(
                who.name, network, backend, config.decode, cast(ExpertExchange, exchange)
            )
        return BuiltRank(
            rank=rank, peering=backend, context_tokens=network.config.max_position_embeddings
        )
