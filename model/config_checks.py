"""What a ModelConfig must satisfy so that every operator is legal. Source: spec model.md sections 1.2 and 12."""

from typing import TYPE_CHECKING

from ..transfer.errors import CheckpointError
from .engram_tables import engram_tables

if TYPE_CHECKING:
    from .config import ModelConfig

#: Channels that share a scale in FP8 and FP4 storage; every quantised input width is a multiple of it.
GROUP = 32

_MAY_BE_ZERO = frozenset(
    {"bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "engram_pad_token_id"}
)
_NOT_CHECKED_HERE = frozenset(
    {"candidate_source_layer_id", "dspark_noise_token_id", "num_nextn_predict_layers"}
)


def check_config(config: "ModelConfig") -> None:
    """Raise CheckpointError at the first constraint that `config` breaks; the message names key, value and rule."""
    _check_positive(config)
    _check_widths(config)
    _check_layers(config)
    _check_sources(config)
    _check_selection(config)
    _check_engram(config)
    _check_dspark(config)
    for key in (*_MAY_BE_ZERO, "dspark_noise_token_id"):
        value = getattr(config, key)
        _require(
            0 <= value < config.vocab_size,
            key,
            value,
            f"a token id below vocab_size {config.vocab_size}",
        )


def _require(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise CheckpointError(f"{key} is {value!r}; it must be {allowed}")


def _check_positive(config: "ModelConfig") -> None:
    for key, value in vars(config).items():
        if isinstance(value, int | float) and key not in _MAY_BE_ZERO | _NOT_CHECKED_HERE:
            _require(value > 0, key, value, "greater than 0")
    for key, value in vars(config.rope_scaling).items():
        _require(value > 0, f"rope_scaling.{key}", value, "greater than 0")
    _require(config.n_shared_experts == 1, "n_shared_experts", config.n_shared_experts, "1")
    for total, chosen in (
        ("n_routed_experts", "num_experts_per_tok"),
        ("dspark_n_routed_experts", "dspark_num_experts_per_tok"),
    ):
        limit = getattr(config, total)
        value = getattr(config, chosen)
        _require(value <= limit, chosen, value, f"at most {total} {limit}")


def _check_widths(config: "ModelConfig") -> None:
    heads, groups = config.num_attention_heads, config.o_groups
    _require(heads % groups == 0, "o_groups", groups, f"a divisor of num_attention_heads {heads}")
    for key in (
        "head_dim",
        "index_head_dim",
        "hidden_size",
        "q_lora_rank",
        "moe_intermediate_size",
    ):
        value = getattr(config, key)
        _require(
            value % GROUP == 0,
            key,
            value,
            f"a multiple of {GROUP} (one scale covers {GROUP} inputs)",
        )
    inner = groups * config.o_lora_rank
    _require(inner % GROUP == 0, "o_groups * o_lora_rank", inner, f"a multiple of {GROUP}")
    rope, narrow = config.qk_rope_head_dim, min(config.head_dim, config.index_head_dim)
    _require(
        rope % 2 == 0 and rope <= narrow,
        "qk_rope_head_dim",
        rope,
        f"even and at most {narrow}, the narrowest head",
    )


def _check_layers(config: "ModelConfig") -> None:
    ratios, depth, drafts = (
        config.compress_ratios,
        config.num_hidden_layers,
        config.num_nextn_predict_layers,
    )
    _require(
        len(ratios) == depth + drafts,
        "compress_ratios",
        list(ratios),
        f"num_hidden_layers + num_nextn_predict_layers = {depth + drafts} entries long",
    )
    _require(set(ratios) <= {0, 1, 2}, "compress_ratios", list(ratios), "made of 0, 1 and 2")
    _require(not any(ratios[depth:]), "compress_ratios", list(ratios), "0 for every DSpark block")
    _require(1 in ratios, "compress_ratios", list(ratios), "1 for at least one layer (the decoder)")
    decoder = ratios[config.split_layer : depth]
    _require(
        set(decoder) == {1},
        "compress_ratios",
        list(ratios),
        f"1 from layer {config.split_layer} to the last layer",
    )


def _check_sources(config: "ModelConfig") -> None:
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids: tuple[int, ...] = getattr(config, key)
        _check_ascending(key, ids, 0, config.num_hidden_layers)
        for layer in ids:
            _require(
                config.ratio(layer) > 0,
                key,
                list(ids),
                f"layers with a ratio above 0 (layer {layer} has 0)",
            )
    kv, index = config.kv_source_layer_ids, config.index_source_layer_ids
    for layer in range(config.num_hidden_layers):
        if config.ratio(layer) == 0:
            continue
        _require(
            any(source <= layer for source in kv),
            "kv_source_layer_ids",
            list(kv),
            f"one at or before {layer}",
        )
        source = max(source for source in kv if source <= layer)
        same = config.ratio(source) == config.ratio(layer)
        _require(
            same,
            "kv_source_layer_ids",
            list(kv),
            f"such that layer {layer} reads a source of its own ratio",
        )
        chosen = any(source <= selector <= layer for selector in index)
        _require(
            chosen,
            "index_source_layer_ids",
            list(index),
            f"one from {source} to {layer}: its entries changed",
        )


def _check_selection(config: "ModelConfig") -> None:
    source, last = config.candidate_source_layer_id, config.kv_source_layer_ids[-1]
    _require(source == last, "candidate_source_layer_id", source, f"the last KV source, {last}")
    pool = config.candidate_topk_blocks * config.candidate_block_size
    least = config.index_topk + config.candidate_block_size - 1
    _require(
        pool >= least,
        "candidate_topk_blocks * candidate_block_size",
        pool,
        f"at least index_topk + candidate_block_size - 1 = {least}",
    )


def _check_engram(config: "ModelConfig") -> None:
    ids, rows = config.engram_layer_ids, config.engram_num_embeddings
    _check_ascending("engram_layer_ids", ids, 0, config.split_layer)
    same = len(rows) == len(ids)
    _require(same, "engram_num_embeddings", list(rows), f"as long as engram_layer_ids {list(ids)}")
    size = config.engram_max_ngram_size
    _require(size >= 2, "engram_max_ngram_size", size, "at least 2")
    dim = config.engram_head_dim
    _require(
        dim % GROUP == 0,
        "engram_head_dim",
        dim,
        f"a multiple of {GROUP} (one scale covers {GROUP} channels)",
    )
    wanted = [table.num_rows for table in engram_tables(config).values()]
    _require(
        list(rows) == wanted,
        "engram_num_embeddings",
        list(rows),
        f"the sums of the hash primes, {wanted}",
    )


def _check_dspark(config: "ModelConfig") -> None:
    blocks = config.num_nextn_predict_layers
    _require(blocks >= 0, "num_nextn_predict_layers", blocks, "0 (no drafter) or more")
    ids = config.dspark_target_layer_ids
    _require(bool(ids), "dspark_target_layer_ids", list(ids), "at least one layer")
    _check_ascending("dspark_target_layer_ids", ids, config.split_layer, config.num_hidden_layers)


def _check_ascending(key: str, ids: tuple[int, ...], low: int, high: int) -> None:
    """Ids must be distinct, ascending and in [low, high)."""
    legal = list(ids) == sorted(set(ids)) and all(low <= layer < high for layer in ids)
    _require(legal, key, list(ids), f"distinct ascending layer ids from {low} to {high - 1}")
