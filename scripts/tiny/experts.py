"""Routed experts for training: rows sorted by expert, one matrix product an expert, gradients by hand (spec 4)."""

import torch

from .quantise import fp8


def activation(
    gate: torch.Tensor, up: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clamped SwiGLU: (clamped gate, clamped up, sigmoid of the clamped gate)."""
    clamped = gate.clamp(max=limit)
    return clamped, up.clamp(-limit, limit), torch.sigmoid(clamped)


class Swiglu(torch.autograd.Function):
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""

    @staticmethod
    def forward(ctx, gate, up, limit):
        g, u, sigmoid = activation(gate, up, limit)
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        return g * sigmoid * u

    @staticmethod
    def backward(ctx, gradient):
        return *swiglu_gradient(gradient, *ctx.saved_tensors, ctx.limit), None


def swiglu_gradient(gradient, gate, up, limit):
    """Gradients by gate and up; a clamped value gets none."""
    g, u, sigmoid = activation(gate, up, limit)
    silu = g * sigmoid
    by_up = (gradient * silu).masked_fill_(up.abs() > limit, 0)
    by_gate = (
        torch.addcmul(sigmoid + silu, silu, sigmoid, value=-1)
        .mul_(u)
        .mul_(gradient)
        .masked_fill_(gate > limit, 0)
    )
    return by_gate, by_up


class RoutedExperts(torch.autograd.Function):
    """sum over chosen experts of w2(weight * swiglu(w1 x, w3 x)).

    x [N, H] (already quantised when `quantised`), weight and chosen [N, k], w1 and w3 [E, I, H],
    w2 [E, H, I] -> [N, H].
    """

    @staticmethod
    def forward(ctx, x, weight, chosen, w1, w3, w2, limit, quantised):
        order = torch.argsort(chosen.flatten(), stable=True)
        token = order // chosen.shape[1]
        counts = torch.bincount(chosen.flatten(), minlength=w1.shape[0]).tolist()
        rows = x.index_select(0, token)
        gate, up = (torch.empty(len(token), w1.shape[1]) for _ in range(2))
        spans = spans_of(counts)
        for expert, a, b in spans:
            torch.mm(rows[a:b], w1[expert].T, out=gate[a:b])
            torch.mm(rows[a:b], w3[expert].T, out=up[a:b])
        g, u, sigmoid = activation(gate, up, limit)
        row_weight = weight.flatten().index_select(0, order).unsqueeze(1)
        plain = g * sigmoid * u
        hidden = plain * row_weight
        hidden = fp8(hidden) if quantised else hidden
        result = torch.empty(len(token), x.shape[1])
        for expert, a, b in spans:
            torch.mm(hidden[a:b], w2[expert].T, out=result[a:b])
        ctx.save_for_backward(order, token, rows, gate, up, row_weight, plain, hidden, w1, w3, w2)
        ctx.spans, ctx.limit, ctx.shape = spans, limit, x.shape
        return torch.zeros_like(x).index_add_(0, token, result)

    @staticmethod
    def backward(ctx, gradient):
        order, token, rows, gate, up, row_weight, plain, hidden, w1, w3, w2 = ctx.saved_tensors
        d_result = gradient.index_select(0, token)
        d_hidden, d_rows = torch.empty_like(hidden), torch.empty_like(rows)
        d_w1, d_w3, d_w2 = (torch.zeros_like(w) for w in (w1, w3, w2))
        for expert, a, b in ctx.spans:
            torch.mm(d_result[a:b], w2[expert], out=d_hidden[a:b])
            torch.mm(d_result[a:b].T, hidden[a:b], out=d_w2[expert])
        d_weight = torch.empty(len(token))
        d_weight[order] = (d_hidden * plain).sum(1)
        d_gate, d_up = swiglu_gradient(d_hidden.mul_(row_weight), gate, up, ctx.limit)
        for expert, a, b in ctx.spans:
            torch.mm(d_gate[a:b], w1[expert], out=d_rows[a:b])
            d_rows[a:b].addmm_(d_up[a:b], w3[expert])
            torch.mm(d_gate[a:b].T, rows[a:b], out=d_w1[expert])
            torch.mm(d_up[a:b].T, rows[a:b], out=d_w3[expert])
        d_x = torch.zeros(ctx.shape).index_add_(0, token, d_rows)
        return d_x, d_weight.view(ctx.shape[0], -1), None, d_w1, d_w3, d_w2, None, None


def spans_of(counts: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows, in sorted order."""
    spans, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, start, start + count))
        start += count
    return spans
