"""The DSpark drafter of the tiny checkpoint: initial weights (spec 6.1)."""

import torch

from .network import add_block


def initial_weights(config: dict, backbone: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """All `mtp.*` weights. The final norm starts as the backbone's, whose head the drafter shares."""
    generator = torch.Generator().manual_seed(seed)
    text = config["text_config"]
    hidden, blocks, rank = text["hidden_size"], text["num_nextn_predict_layers"], text["dspark_markov_rank"]
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        weights[name] = torch.randn(*shape, generator=generator) * gain * shape[-1] ** -0.5

    def ones(name: str, *shape: int) -> None:
        weights[name] = torch.ones(*shape)

    for block in range(blocks):
        add_block(weights, f"mtp.{block}", block, text, matrix, ones, text["dspark_n_routed_experts"])
    matrix("mtp.0.main_proj.weight", hidden, len(text["dspark_target_layer_ids"]) * hidden)
    ones("mtp.0.main_norm.weight", hidden)
    last = f"mtp.{blocks - 1}"
    weights[f"{last}.norm.weight"] = backbone["norm.weight"].detach().clone()
    matrix(f"{last}.markov_head.embed.weight", text["vocab_size"], rank)
    matrix(f"{last}.markov_head.head.weight", text["vocab_size"], rank, gain=0.02)
    matrix(f"{last}.confidence_head.proj.weight", 1, hidden + rank, gain=0.1)
    return weights
