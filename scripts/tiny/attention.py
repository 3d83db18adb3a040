"""Attention for training: window blocks and all compressed entries under one softmax with a sink (spec 2.3, 2.5-2.8).

Sequences are whole and start at position 0. Letters in shapes: B sequences, S tokens of one, h heads, d head width,
C compressed entries of one sequence. One latent is key and value of all heads, so heads are folded into the query rows.
"""

import math

import torch

CHUNK = 128  # queries handled at once against the compressed entries that the last of them may see


def rope_table(
    text_config: dict, length: int, compressed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [length, rd/2]; `compressed` layers use the large base with YaRN."""
    width = text_config["qk_rope_head_dim"]
    base = text_config["compress_rope_theta" if compressed else "rope_theta"]
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if compressed:
        scaling = text_config["rope_scaling"]

        def dimension(turns: float) -> float:
            return (
                width
                * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * turns))
                / (2 * math.log(base))
            )

        low = max(math.floor(dimension(scaling["beta_fast"])), 0)
        high = min(math.ceil(dimension(scaling["beta_slow"])), width - 1)
        ramp = (
            (torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
        ).clamp(0, 1)
        frequency = frequency / scaling["factor"] * ramp + frequency * (1 - ramp)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


class Rope(torch.autograd.Function):
    """Rotates neighbouring pairs of the last channels. x [..., width]; cos and sin broadcast to [..., rd/2]."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient):
        cos, sin = ctx.saved_tensors
        return rotate(gradient, cos, -sin), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`Rope` without gradients."""
    result = x.clone(memory_format=torch.contiguous_format)
    even, odd = x[..., -2 * cos.shape[-1] :: 2], x[..., 1 - 2 * cos.shape[-1] :: 2]
    result[..., -2 * cos.shape[-1] :: 2] = even * cos - odd * sin
    result[..., 1 - 2 * cos.shape[-1] :: 2] = even * sin + odd * cos
    return result


def window_mask(window: int, blocks: int) -> torch.Tensor:
    """Additive mask [blocks, window, 2*window]: block n's queries against the keys of blocks n-1 and n."""
    query, key = torch.arange(window)[:, None], torch.arange(2 * window)[None, :]
    visible = (key > query) & (key <= query + window)
    mask = torch.where(visible, 0.0, -torch.inf).repeat(blocks, 1, 1)
    mask[0, :, :window] = -torch.inf
    return mask


def with_previous(blocks: torch.Tensor) -> torch.Tensor:
    """[B, n, W, d] -> [B, n, 2W, d]: each block preceded by its predecessor (zeros before the first)."""
    return torch.cat((torch.nn.functional.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1], blocks), dim=2)


def compressed_mask(start: int, stop: int, entries: int, ratio: int) -> torch.Tensor:
    """Additive causal mask [stop-start, entries]: entry j is visible from position j*ratio + ratio - 1 on."""
    position, entry = torch.arange(start, stop)[:, None], torch.arange(entries)[None, :]
    return torch.where(position >= entry * ratio + ratio - 1, 0.0, -torch.inf)


class SinkAttention(torch.autograd.Function):
    """One softmax over window, compressed entries and sink.

    q [B, S, h, d], window latents [B, S, d], entries [B, C, d] or None, selected (bool [B, S, C]) or None,
    sink [h] -> [B, S, h, d].

    Without `selected` every visible entry takes part.
    """

    @staticmethod
    def forward(ctx, q, latents, entries, selected, sink, window, ratio):
        batch, length, heads, width = q.shape
        scale, blocks = width**-0.5, length // window
        rows = q.view(batch * blocks, window * heads, width)
        keys = with_previous(latents.view(batch, blocks, window, width)).view(
            batch * blocks, 2 * window, width
        )
        scores = torch.bmm(rows, keys.mT).mul_(scale).view(batch, blocks, window, heads, 2 * window)
        scores += window_mask(window, blocks)[:, :, None]
        scores = scores.view(batch, length * heads, 2 * window)
        far = [] if entries is None else far_scores(q, entries, selected, ratio)
        sinks = sink.repeat(length)
        bound = torch.maximum(scores.amax(-1), sinks)
        for (start, stop, _), part in far:
            span = slice(start * heads, stop * heads)
            bound[:, span] = torch.maximum(bound[:, span], part.amax(-1))
        scores.sub_(bound.unsqueeze(-1)).exp_()
        total = scores.sum(-1).add_((sinks - bound).exp_())
        for (start, stop, _), part in far:
            span = slice(start * heads, stop * heads)
            total[:, span] += part.sub_(bound[:, span].unsqueeze(-1)).exp_().sum(-1)
        scores.div_(total.unsqueeze(-1))
        output = torch.bmm(scores.view(batch * blocks, window * heads, 2 * window), keys).view(
            batch, length * heads, width
        )
        for (start, stop, count), part in far:
            span = slice(start * heads, stop * heads)
            output[:, span] += torch.bmm(
                part.div_(total[:, span].unsqueeze(-1)), entries[:, :count]
            )
        sink_share = (sinks - bound).exp_().div_(total)
        ctx.save_for_backward(q, keys, entries, scores, output, sink_share)
        ctx.far, ctx.window = far, window
        return output.view(q.shape)

    @staticmethod
    def backward(ctx, gradient):
        q, keys, entries, near, output, sink_share = ctx.saved_tensors
        batch, length, heads, width = q.shape
        scale, window = width**-0.5, ctx.window
        blocks = length // window
        gradient = gradient.reshape(batch, length * heads, width)
        delta = (gradient * output).sum(-1)
        d_sink = -(sink_share * delta).view(-1, heads).sum(0)

        shape = (batch * blocks, window * heads, -1)
        d_out, p, rows = gradient.view(*shape), near.view(*shape), q.view(*shape)
        d_score = torch.bmm(d_out, keys.mT).sub_(delta.view(*shape)).mul_(p).mul_(scale)
        d_q = torch.bmm(d_score, keys).view(batch, length * heads, width)
        d_keys = (
            torch.bmm(d_score.mT, rows).baddbmm_(p.mT, d_out).view(batch, blocks, 2, window, width)
        )
        d_latents = d_keys[:, :, 1].clone()
        d_latents[:, :-1] += d_keys[:, 1:, 0]

        d_entries = None if entries is None else torch.zeros_like(entries)
        for (start, stop, count), part in ctx.far:
            span = slice(start * heads, stop * heads)
            d_score = (
                torch.bmm(gradient[:, span], entries[:, :count].mT)
                .sub_(delta[:, span].unsqueeze(-1))
                .mul_(part)
                .mul_(scale)
            )
            d_q[:, span] += torch.bmm(d_score, entries[:, :count])
            d_entries[:, :count] += torch.bmm(
                d_score.mT, q[:, start:stop].reshape(batch, -1, width)
            ).baddbmm_(part.mT, gradient[:, span])
        return (
            d_q.view(q.shape),
            d_latents.view(batch, length, width),
            d_entries,
            None,
            d_sink,
            None,
            None,
        )


def far_scores(q, entries, selected, ratio):
    """Masked scores against compressed entries: ((first, end query, entries), [B, queries*h, entries]) a chunk."""
    batch, length, heads, width = q.shape
    parts = []
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        count = stop // ratio
        part = torch.bmm(q[:, start:stop].reshape(batch, -1, width), entries[:, :count].mT).mul_(
            width**-0.5
        )
        grid = part.view(batch, stop - start, heads, count)
        grid += compressed_mask(start, stop, count, ratio)[:, None]
        if selected is not None:
            grid.masked_fill_(~selected[:, start:stop, None, :count], -torch.inf)
        parts.append(((start, stop, count), part))
    return parts


@torch.no_grad()
def attention_share(q, latents, entries, sink, window, ratio, start, stop):
    """How queries start..stop-1 attend to compressed entries, heads summed: [B, stop-start, stop//ratio].

    The share that goes to the window and the sink is missing from the sums, so such a head counts little.
    """
    batch, _, heads, width = q.shape
    first, count, scale = max(0, start - window), stop // ratio, width**-0.5
    rows = q[:, start:stop].reshape(batch, -1, width)
    distance = torch.arange(start, stop)[:, None] - torch.arange(first, stop)[None, :]
    near_mask = torch.where((distance >= 0) & (distance < window), 0.0, -torch.inf)
    near = (
        torch.bmm(rows, latents[:, first:stop].mT).mul_(scale).view(batch, stop - start, heads, -1)
        + near_mask[:, None]
    )
    far = torch.bmm(rows, entries[:, :count].mT).mul_(scale).view(batch, stop - start, heads, -1)
    far += compressed_mask(start, stop, count, ratio)[:, None]
    sinks = sink.view(1, 1, heads, 1).expand(batch, stop - start, heads, 1)
    joint = torch.cat((near, far, sinks), dim=-1).softmax(-1)
    return joint[..., near.shape[-1] : -1].sum(2)


def index_scores(queries, head_weights, keys, start, stop, ratio):
    """Indexer scores of queries start..stop-1: [B, stop-start, stop//ratio], -inf where not visible.

    queries [B, S, ih, id], head_weights [B, S, ih], keys [B, C, id].
    """
    batch, _, heads, width = queries.shape
    count = stop // ratio
    dots = torch.bmm(queries[:, start:stop].reshape(batch, -1, width), keys[:, :count].mT).view(
        batch, stop - start, heads, count
    )
    score = (torch.relu(dots) * head_weights[:, start:stop].unsqueeze(-1)).sum(2)
    return score + compressed_mask(start, stop, count, ratio)


@torch.no_grad()
def select(queries, head_weights, keys, ratio, top_k, pool=None):
    """Selected entries as bool [B, S, C] and the scores [B, S, C]; `pool` (bool [B, S, C]) restricts the choice."""
    batch, length = queries.shape[:2]
    scores = torch.full((batch, length, keys.shape[1]), -torch.inf)
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        scores[:, start:stop, : stop // ratio] = index_scores(
            queries, head_weights, keys, start, stop, ratio
        )
    if pool is not None:
        scores.masked_fill_(~pool, -torch.inf)
    best = scores.topk(min(top_k, keys.shape[1]), dim=-1)
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, best.indices, True)
    return chosen & (scores > -torch.inf), scores


@torch.no_grad()
def candidate_pool(scores: torch.Tensor, block: int, blocks: int) -> torch.Tensor:
    """Entries in the best blocks, the newest among them. scores [B, S, C] of a ratio-1 layer -> bool [B, S, C]."""
    batch, length, entries = scores.shape
    padded = torch.nn.functional.pad(scores, (0, -entries % block), value=-torch.inf)
    best = padded.view(batch, length, -1, block).amax(-1)
    best.scatter_(
        -1, (torch.arange(length) // block).view(1, length, 1).expand(batch, -1, -1), torch.inf
    )
    kept = best.topk(min(blocks, best.shape[-1]), dim=-1)
    mask = torch.zeros(best.shape, dtype=torch.bool).scatter_(-1, kept.indices, True) & (
        best > -torch.inf
    )
    return mask.repeat_interleave(block, dim=-1)[..., :entries]
