"""The training form of the text network: whole sequences, fp32, autograd (spec 2-5).

`Network.forward` follows section 2.1; quantisation and top-k selection are switched on by `Numerics`.
"""

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from . import attention, hyper, quantise
from .experts import RoutedExperts, Swiglu
from .quantise import straight_through

EXPERT_NAMES = ("w1", "w3", "w2")
INVISIBLE = -1e4  # finite, so that a query that sees no entry yields no NaN in the indexer loss


@dataclass(frozen=True)
class Numerics:
    """`quantised`: fake quantisation of activations and caches. `selected`: attention sees only the indexer's top-k."""

    quantised: bool
    selected: bool


@dataclass
class Trace:
    """What one forward pass leaves behind besides the hidden state."""

    index_loss: torch.Tensor | None = None
    counts: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> rows of every expert
    features: list[torch.Tensor] = field(
        default_factory=list
    )  # drafter inputs [N, H] of the target layers
    state: torch.Tensor | None = None  # [N, H] before the final norm


class Network:
    """`weights` maps checkpoint names to tensors; router biases are updated by the trainer, not by gradients."""

    def __init__(self, config: dict, weights: dict[str, torch.Tensor], max_length: int):
        self.text, self.weights = config["text_config"], weights
        self.layers = self.text["num_hidden_layers"]
        self.eps = self.text["rms_norm_eps"]
        self.tables = {
            compressed: attention.rope_table(self.text, max_length, compressed)
            for compressed in (False, True)
        }

    def forward(
        self,
        ids: torch.Tensor,
        engram_rows: dict[int, torch.Tensor],
        numerics: Numerics,
        index_chunk: int | None = None,
    ) -> tuple[torch.Tensor, Trace]:
        """ids [B, S], S a multiple of the window -> (normalised hidden state [B*S, H], trace).

        `index_chunk` names the chunk of queries whose indexer loss is computed (None: no loss).
        """
        text, trace = self.text, Trace()
        batch, length = ids.shape
        self.shape, self.numerics, self.index_chunk, self.trace = (
            (batch, length),
            numerics,
            index_chunk,
            trace,
        )
        h = (
            functional.embedding(ids.flatten(), self.weights["embed.weight"])
            .unsqueeze(1)
            .expand(-1, text["hc_mult"], -1)
            .contiguous()
        )
        pre = torch.zeros(batch * length, text["hc_mult"])
        pre[:, 0] = 1
        shared: dict = {"index_losses": []}
        for layer in range(self.layers):
            if layer in text["engram_layer_ids"]:
                h = self.engram(h, layer, engram_rows[layer])
            if layer in text["dspark_target_layer_ids"]:
                trace.features.append(h.mean(1))
            pre_a, post, comb = self.mix(h, layer, "attn")
            x = self.norm(hyper.collapse(h, pre), f"layers.{layer}.attn_norm")
            h = hyper.Combine.apply(h, self.attention(x, layer, shared), post, comb)
            pre, post, comb = self.mix(h, layer, "ffn")
            x = self.norm(hyper.collapse(h, pre_a), f"layers.{layer}.ffn_norm")
            h = hyper.Combine.apply(
                h,
                self.moe(x, f"layers.{layer}.ffn", text["num_experts_per_tok"], layer),
                post,
                comb,
            )
        self.finish_index_loss(shared)
        if shared["index_losses"]:
            trace.index_loss = torch.stack(shared["index_losses"]).mean()
        trace.state = hyper.collapse(h, pre)
        return self.norm(trace.state, "norm"), trace

    def mix(self, h, layer, sublayer):
        text = self.text
        return hyper.mix(
            h,
            self.weights,
            f"layers.{layer}.hc_{sublayer}",
            text["hc_sinkhorn_iters"],
            text["hc_eps"],
            self.eps,
        )

    def norm(self, x, name):
        return functional.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def linear(self, x, name):
        return functional.linear(x, self.weights[f"{name}.weight"])

    def round(self, x, rounding):
        return straight_through(x, rounding, self.numerics.quantised)

    def rope(self, x, compressed, ratio=1, inverse=False):
        """x [B, T, (h,) width] at positions 0, ratio, 2*ratio, ..."""
        cos, sin = (table[: x.shape[1] * ratio : ratio] for table in self.tables[compressed])
        if x.dim() == 4:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return attention.Rope.apply(x, cos, -sin if inverse else sin)

    def attention(self, x, layer, shared):
        """x [N, H] normalised -> [N, H]. `shared`: entries, index keys and selections of the source layers so far."""
        text, name = self.text, f"layers.{layer}.attn"
        batch, length = self.shape
        heads, width, ratio = (
            text["num_attention_heads"],
            text["head_dim"],
            text["compress_ratios"][layer],
        )
        x_in = self.round(x, quantise.fp8)
        bottleneck = self.norm(self.linear(x_in, f"{name}.wq_a"), f"{name}.q_norm")
        bottleneck_in = self.round(bottleneck, quantise.fp8)
        q = self.rope(
            self.linear(bottleneck_in, f"{name}.wq_b").view(batch, length, heads, width), ratio > 0
        )
        latents = self.norm(self.linear(x_in, f"{name}.wkv"), f"{name}.kv_norm").view(
            batch, length, width
        )
        latents = self.round(self.rope(latents, ratio > 0), quantise.fp8)
        entries = selected = None
        if ratio:
            if layer in text["kv_source_layer_ids"]:
                self.compress(x, name, ratio, shared)
            entries = shared["entries"]
            if layer in text["index_source_layer_ids"]:
                self.index(x, bottleneck_in, layer, ratio, shared)
            selected = shared["selected"]
            if self.index_chunk is not None:
                start = self.index_chunk * attention.CHUNK
                shared["shares"].append(
                    attention.attention_share(
                        q,
                        latents,
                        entries,
                        self.weights[f"{name}.attn_sink"],
                        text["sliding_window"],
                        ratio,
                        start,
                        start + attention.CHUNK,
                    )
                )
        o = attention.SinkAttention.apply(
            q,
            latents,
            entries,
            selected,
            self.weights[f"{name}.attn_sink"],
            text["sliding_window"],
            max(ratio, 1),
        )
        o = self.rope(o, ratio > 0, inverse=True)
        groups = text["o_groups"]
        o = self.round(o.reshape(batch * length, groups, -1), quantise.fp8)
        wo_a = self.weights[f"{name}.wo_a.weight"].view(groups, text["o_lora_rank"], -1)
        u = torch.bmm(o.transpose(0, 1), wo_a.mT).transpose(0, 1).reshape(batch * length, -1)
        return self.linear(self.round(u, quantise.fp8), f"{name}.wo_b")

    def compress(self, x, name, ratio, shared):
        """Makes the global entries [B, S/ratio, d] and the index keys [B, S/ratio, id] of a KV source layer."""
        batch, length = self.shape
        values = self.linear(x, f"{name}.compressor.wkv").view(batch, length // ratio, ratio, -1)
        if ratio > 1:
            share = self.linear(x, f"{name}.compressor.wgate").view(values.shape).softmax(2)
            values = values * share
        latent = self.norm(values.sum(2), f"{name}.compressor.norm")
        keys = self.norm(
            self.linear(latent.detach(), f"{name}.indexer.wk"), f"{name}.indexer.k_norm"
        )
        shared["keys"] = self.round(self.rope(keys, True, ratio), quantise.fp4_mx)
        shared["entries"] = self.round(self.rope(latent, True, ratio), quantise.fp4_nv)

    def index(self, x, bottleneck, layer, ratio, shared):
        """Publishes the selection of an index source layer, and its scores on the chunk whose loss is wanted."""
        text, name = self.text, f"layers.{layer}.attn.indexer"
        batch, length = self.shape
        heads, width = text["index_n_heads"], text["index_head_dim"]
        self.finish_index_loss(shared)
        queries = self.rope(
            self.linear(bottleneck.detach(), f"{name}.wq_b").view(batch, length, heads, width), True
        )
        queries = self.round(queries, quantise.fp4_mx)
        head_weights = (
            self.linear(x.detach(), f"{name}.weights_proj").view(batch, length, heads)
            * (width * heads) ** -0.5
        )
        shared["selected"] = None
        if self.numerics.selected:
            pool = shared["pool"] if layer > text["candidate_source_layer_id"] else None
            shared["selected"], scores = attention.select(
                queries, head_weights, shared["keys"], ratio, text["index_topk"], pool
            )
            if layer == text["candidate_source_layer_id"]:
                shared["pool"] = attention.candidate_pool(
                    scores, text["candidate_block_size"], text["candidate_topk_blocks"]
                )
        if self.index_chunk is not None:
            start = self.index_chunk * attention.CHUNK
            shared["scores"] = attention.index_scores(
                queries, head_weights, shared["keys"], start, start + attention.CHUNK, ratio
            )
        shared["shares"] = []

    def finish_index_loss(self, shared):
        """KL of the indexer's softmax from the attention of the layers that used its selection."""
        if shared.get("scores") is None:
            return
        target = torch.stack(shared["shares"]).sum(0)
        target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
        log_p = shared.pop("scores").clamp_min(INVISIBLE).log_softmax(-1)
        shared["index_losses"].append((torch.xlogy(target, target) - target * log_p).sum(-1).mean())

    def moe(self, x, name, top_k, layer):
        """x [N, H] -> [N, H]."""
        text = self.text
        score = functional.softplus(
            functional.linear(x, self.weights[f"{name}.gate.weight"])
        ).sqrt()
        chosen = (score.detach() + self.weights[f"{name}.gate.bias"]).topk(top_k, dim=-1).indices
        weight = score.gather(1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * text["routed_scaling_factor"]
        self.trace.counts[layer] = torch.bincount(chosen.flatten(), minlength=score.shape[1])
        x = self.round(x, quantise.fp8)
        limit = text["swiglu_limit"]
        routed = RoutedExperts.apply(
            x,
            weight,
            chosen,
            *(self.weights[f"{name}.experts.{part}"] for part in EXPERT_NAMES),
            limit,
            self.numerics.quantised,
        )
        hidden = Swiglu.apply(
            self.linear(x, f"{name}.shared_experts.w1"),
            self.linear(x, f"{name}.shared_experts.w3"),
            limit,
        )
        return routed + self.linear(self.round(hidden, quantise.fp8), f"{name}.shared_experts.w2")

    def engram(self, h, layer, rows):
        """h [N, K, H], rows [B, S, 24] table rows -> h with the gated memory added to every stream."""
        name = f"layers.{layer}.engram"
        tokens, streams, hidden = h.shape
        memory = functional.embedding(
            rows.view(tokens, -1), self.weights[f"{name}.embed.weight"]
        ).view(tokens, -1)
        kv = self.linear(self.round(memory, quantise.fp8), f"{name}.wkv")
        key, value = (
            kv[:, : streams * hidden].view(tokens, streams, hidden),
            kv[:, streams * hidden :],
        )
        scale = self.weights[f"{name}.q_weight"] * self.weights[f"{name}.k_weight"]
        norms = (h.square().mean(-1) + self.eps).rsqrt() * (
            key.square().mean(-1) + self.eps
        ).rsqrt()
        d = (h * key * scale).sum(-1) * norms * hidden**-0.5
        gate = torch.sigmoid(d.sign() * d.abs().clamp_min(1e-6).sqrt())
        return h + gate.unsqueeze(-1) * value.unsqueeze(1)
