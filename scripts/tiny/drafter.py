"""The DSpark drafter of the tiny checkpoint: initial weights, training form and loss (spec 6).

Letters in shapes: A anchors, G drafts an anchor (block size), W window, h heads, d head width.
"""

import torch
from torch.nn import functional

from . import attention, hyper, quantise
from .network import Network
from .weights import add_block


def initial_weights(
    config: dict, backbone: dict[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """All `mtp.*` weights. The final norm starts as the backbone's, whose head the drafter shares."""
    generator = torch.Generator().manual_seed(seed)
    text = config["text_config"]
    hidden, blocks, rank = (
        text["hidden_size"],
        text["num_nextn_predict_layers"],
        text["dspark_markov_rank"],
    )
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        weights[name] = torch.randn(*shape, generator=generator) * gain * shape[-1] ** -0.5

    def ones(name: str, *shape: int) -> None:
        weights[name] = torch.ones(*shape)

    for block in range(blocks):
        add_block(
            weights, f"mtp.{block}", block, text, matrix, ones, text["dspark_n_routed_experts"]
        )
    matrix("mtp.0.main_proj.weight", hidden, len(text["dspark_target_layer_ids"]) * hidden)
    ones("mtp.0.main_norm.weight", hidden)
    last = f"mtp.{blocks - 1}"
    weights[f"{last}.norm.weight"] = backbone["norm.weight"].detach().clone()
    matrix(f"{last}.markov_head.embed.weight", text["vocab_size"], rank)
    matrix(f"{last}.markov_head.head.weight", text["vocab_size"], rank, gain=0.02)
    matrix(f"{last}.confidence_head.proj.weight", 1, hidden + rank, gain=0.1)
    return weights


class Drafter:
    """The drafter's blocks on top of a frozen backbone; `network.weights` holds the `mtp.*` weights too."""

    def __init__(self, network: Network):
        self.network, self.text, self.weights = network, network.text, network.weights
        self.blocks = self.text["num_nextn_predict_layers"]
        self.size = self.text["dspark_block_size"]

    def context(self, features: list[torch.Tensor], batch: int) -> list[torch.Tensor]:
        """Main features, one [N, H] a target layer -> context latents [B, S, d] of every block."""
        net = self.network
        c = net.norm(
            net.linear(net.round(torch.cat(features, dim=-1), quantise.fp8), "mtp.0.main_proj"),
            "mtp.0.main_norm",
        )
        c = net.round(c, quantise.fp8)
        latents = [
            net.norm(net.linear(c, f"mtp.{i}.attn.wkv"), f"mtp.{i}.attn.kv_norm").view(
                batch, -1, self.text["head_dim"]
            )
            for i in range(self.blocks)
        ]
        return [net.round(net.rope(latent, compressed=False), quantise.fp8) for latent in latents]

    def states(
        self, ids: torch.Tensor, context: list[torch.Tensor], row: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """z [A*G, H] for anchors that follow position `last` [A] of sequence `row` [A] of `ids` [B, S]."""
        anchors, net = len(row), self.network
        tokens = torch.full((anchors, self.size), self.text["dspark_noise_token_id"])
        tokens[:, 0] = ids[row, last + 1]
        positions = last[:, None] + 1 + torch.arange(self.size)
        h = (
            functional.embedding(tokens.flatten(), self.weights["embed.weight"])
            .unsqueeze(1)
            .expand(-1, self.text["hc_mult"], -1)
            .contiguous()
        )
        pre = torch.zeros(h.shape[:2])
        pre[:, 0] = 1
        for block in range(self.blocks):
            name = f"mtp.{block}"
            pre_a, post, comb = self.mix(h, f"{name}.hc_attn")
            x = net.norm(hyper.collapse(h, pre), f"{name}.attn_norm")
            h = hyper.Combine.apply(
                h,
                self.attention(x, f"{name}.attn", context[block], row, last, positions),
                post,
                comb,
            )
            pre, post, comb = self.mix(h, f"{name}.hc_ffn")
            x = net.norm(hyper.collapse(h, pre_a), f"{name}.ffn_norm")
            h = hyper.Combine.apply(
                h,
                net.moe(x, f"{name}.ffn", self.text["dspark_num_experts_per_tok"], name),
                post,
                comb,
            )
        return hyper.collapse(h, pre)

    def mix(self, h, prefix):
        return hyper.mix(
            h,
            self.weights,
            prefix,
            self.text["hc_sinkhorn_iters"],
            self.text["hc_eps"],
            self.network.eps,
        )

    def attention(self, x, name, context, row, last, positions):
        """x [A*G, H] -> [A*G, H]: every draft sees the window that ends at `last` and all drafts of its anchor."""
        net, text = self.network, self.text
        anchors, heads, width, window = (
            len(row),
            text["num_attention_heads"],
            text["head_dim"],
            text["sliding_window"],
        )
        cos, sin = (table[positions] for table in net.tables[False])
        x_in = net.round(x, quantise.fp8)
        bottleneck = net.round(
            net.norm(net.linear(x_in, f"{name}.wq_a"), f"{name}.q_norm"), quantise.fp8
        )
        q = net.linear(bottleneck, f"{name}.wq_b").view(anchors, self.size, heads, width)
        q = attention.Rope.apply(q, cos.unsqueeze(2), sin.unsqueeze(2)).reshape(anchors, -1, width)
        own = net.norm(net.linear(x_in, f"{name}.wkv"), f"{name}.kv_norm").view(
            anchors, self.size, width
        )
        own = net.round(attention.Rope.apply(own, cos, sin), quantise.fp8)
        seen = last[:, None] - window + 1 + torch.arange(window)
        keys = torch.cat((context[row[:, None], seen.clamp_min(0)], own), dim=1)
        scores = torch.bmm(q, keys.mT) * width**-0.5
        scores = scores + functional.pad(
            torch.where(seen >= 0, 0.0, -torch.inf), (0, self.size)
        ).unsqueeze(1)
        sinks = (
            self.weights[f"{name}.attn_sink"]
            .repeat(self.size)
            .view(1, -1, 1)
            .expand(anchors, -1, 1)
        )
        share = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        o = torch.bmm(share, keys).view(anchors, self.size, heads, width)
        o = attention.Rope.apply(o, cos.unsqueeze(2), -sin.unsqueeze(2))
        groups = text["o_groups"]
        o = net.round(o.reshape(anchors * self.size, groups, -1), quantise.fp8)
        u = torch.bmm(
            o.transpose(0, 1),
            self.weights[f"{name}.wo_a.weight"].view(groups, text["o_lora_rank"], -1).mT,
        )
        return net.linear(
            net.round(u.transpose(0, 1).reshape(anchors * self.size, -1), quantise.fp8),
            f"{name}.wo_b",
        )

    def loss(
        self,
        ids: torch.Tensor,
        features: list[torch.Tensor],
        target_logits: torch.Tensor,
        row: torch.Tensor,
        last: torch.Tensor,
        heat: torch.Tensor,
        noise: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, mean acceptance of every draft [G]) on `ids` [B, S] (spec 6.8), both at temperatures `heat` [A].

        `target_logits` [A, G, V] are the backbone's at the drafts' places. Under the Gumbel `noise` [A, G, V] that
        draft and target share, a draft is accepted when both choose the same token: that is what confidences learn.
        """
        end = f"mtp.{self.blocks - 1}"
        z = self.states(ids, self.context(features, len(ids)), row, last)
        steps = last[:, None] + 1 + torch.arange(self.size)
        previous, following = ids[row[:, None], steps], ids[row[:, None], steps + 1]
        markov = functional.embedding(
            previous.flatten(), self.weights[f"{end}.markov_head.embed.weight"]
        )
        logits = functional.linear(
            self.network.norm(z, f"{end}.norm"), self.weights["head.weight"]
        ) + self.network.linear(markov, f"{end}.markov_head.head")
        cool = 1 / heat.repeat_interleave(self.size).unsqueeze(1)
        target_logits, noise = target_logits.flatten(0, 1) * cool, noise.flatten(0, 1)
        log_p = (logits * cool).log_softmax(-1)
        distance = (log_p.exp() - target_logits.softmax(-1)).abs().sum(-1).view(-1, self.size)
        agreed = (log_p.detach() + noise).argmax(-1) == (target_logits + noise).argmax(-1)
        confidence = self.network.linear(
            torch.cat((z, markov), dim=-1), f"{end}.confidence_head.proj"
        ).view(-1, self.size)
        weight = torch.exp(-torch.arange(self.size) / self.size)
        accepted = agreed.float().view(-1, self.size)
        loss = (
            0.1 * functional.nll_loss(log_p, following.flatten())
            + 0.9 * (distance * weight).sum(-1).mean()
        )
        return loss + functional.binary_cross_entropy_with_logits(
            confidence, accepted
        ), accepted.mean(0)
