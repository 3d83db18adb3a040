"""Initial weights of backbone layers and drafter blocks, under their checkpoint names (spec 8.2)."""

import torch


def initial_weights(config: dict, seed: int) -> dict[str, torch.Tensor]:
    """All backbone weights by checkpoint name; the experts of a layer are stacked as `...experts.w1` [E, I, H]."""
    generator = torch.Generator().manual_seed(seed)
    text = config["text_config"]
    hidden, width, rank = text["hidden_size"], text["head_dim"], text["q_lora_rank"]
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        weights[name] = torch.randn(*shape, generator=generator) * gain * shape[-1] ** -0.5

    def ones(name: str, *shape: int) -> None:
        weights[name] = torch.ones(*shape)

    weights["embed.weight"] = torch.randn(text["vocab_size"], hidden, generator=generator) * 0.5
    matrix("head.weight", text["vocab_size"], hidden, gain=0.2)
    ones("norm.weight", hidden)
    for layer, ratio in enumerate(text["compress_ratios"][: text["num_hidden_layers"]]):
        name = f"layers.{layer}"
        add_block(weights, name, layer, text, matrix, ones, text["n_routed_experts"])
        if layer in text["kv_source_layer_ids"]:
            matrix(f"{name}.attn.compressor.wkv.weight", width, hidden)
            if ratio > 1:
                matrix(f"{name}.attn.compressor.wgate.weight", width, hidden)
            ones(f"{name}.attn.compressor.norm.weight", width)
            matrix(f"{name}.attn.indexer.wk.weight", text["index_head_dim"], width)
            ones(f"{name}.attn.indexer.k_norm.weight", text["index_head_dim"])
        if layer in text["index_source_layer_ids"]:
            matrix(
                f"{name}.attn.indexer.wq_b.weight",
                text["index_n_heads"] * text["index_head_dim"],
                rank,
            )
            matrix(f"{name}.attn.indexer.weights_proj.weight", text["index_n_heads"], hidden)
        if layer in text["engram_layer_ids"]:
            rows = text["engram_num_embeddings"][text["engram_layer_ids"].index(layer)]
            columns = (
                (text["engram_max_ngram_size"] - 1)
                * text["engram_n_heads"]
                * text["engram_head_dim"]
            )
            weights[f"{name}.engram.embed.weight"] = (
                torch.randn(rows, text["engram_head_dim"], generator=generator) * 0.3
            )
            matrix(f"{name}.engram.wkv.weight", (text["hc_mult"] + 1) * hidden, columns)
            ones(f"{name}.engram.q_weight", text["hc_mult"], hidden)
            ones(f"{name}.engram.k_weight", text["hc_mult"], hidden)
    return weights


def add_block(weights, name, index, text, matrix, ones, experts) -> None:
    """The tensors that every block has, drafter blocks included: attention, MoE, norms, mHC."""
    hidden, heads, width = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    rank, groups, out_rank = text["q_lora_rank"], text["o_groups"], text["o_lora_rank"]
    inner, streams = text["moe_intermediate_size"], text["hc_mult"]
    for norm, size in (
        ("attn_norm", hidden),
        ("ffn_norm", hidden),
        ("attn.q_norm", rank),
        ("attn.kv_norm", width),
    ):
        ones(f"{name}.{norm}.weight", size)
    matrix(f"{name}.attn.wq_a.weight", rank, hidden)
    matrix(f"{name}.attn.wq_b.weight", heads * width, rank)
    matrix(f"{name}.attn.wkv.weight", width, hidden)
    matrix(f"{name}.attn.wo_a.weight", groups * out_rank, heads * width // groups)
    matrix(f"{name}.attn.wo_b.weight", hidden, groups * out_rank, gain=0.1)
    weights[f"{name}.attn.attn_sink"] = torch.zeros(heads)
    matrix(f"{name}.ffn.gate.weight", experts, hidden, gain=0.5)
    weights[f"{name}.ffn.gate.bias"] = torch.zeros(experts)
    for part, shape, gain in (
        ("w1", (inner, hidden), 1.0),
        ("w3", (inner, hidden), 1.0),
        ("w2", (hidden, inner), 0.1),
    ):
        matrix(f"{name}.ffn.experts.{part}", experts, *shape, gain=gain)
        matrix(f"{name}.ffn.shared_experts.{part}.weight", *shape, gain=gain)
    for sublayer in ("attn", "ffn"):
        prefix = f"{name}.hc_{sublayer}"
        matrix(f"{prefix}_fn", streams * (streams + 2), streams * hidden, gain=0.3)
        weights[f"{prefix}_scale"] = torch.full((3,), 0.3)
        pre = torch.full((streams,), -1.0)
        pre[index % streams] = 1.5
        comb = torch.full((streams, streams), -2.0).fill_diagonal_(2.0)
        weights[f"{prefix}_base"] = torch.cat((pre, torch.zeros(streams), comb.flatten()))
