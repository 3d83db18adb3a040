"""mHC for training: the mix of a state into (pre, post, comb) and its application, gradients by hand (spec 3)."""

import torch


class Sinkhorn(torch.autograd.Function):
    """Row softmax, then alternating column and row normalisation. logits and result: [K, K, N] (row, column, token)."""

    @staticmethod
    def forward(ctx, logits, iterations, eps):
        soft = torch.softmax(logits, dim=1)
        c = soft + eps
        outputs, sums = [], []
        for step in range(2 * iterations - 1):
            axis = step % 2  # 0: columns (sum over rows), 1: rows
            total = c.sum(axis, keepdim=True).add_(eps)
            c = c / total
            outputs.append(c)
            sums.append(total)
        ctx.saved = soft, outputs, sums
        return (
            c.clone()
        )  # a result kept in `ctx` would tie the graph into a cycle that is never freed

    @staticmethod
    def backward(ctx, gradient):
        soft, outputs, sums = ctx.saved
        for step in range(len(outputs) - 1, -1, -1):
            inner = (gradient * outputs[step]).sum(step % 2, keepdim=True)
            gradient = (gradient - inner).div_(sums[step])
        return soft * (gradient - (gradient * soft).sum(1, keepdim=True)), None, None


class Combine(torch.autograd.Function):
    """h'[n] = post[n] * y + sum_m comb[m, n] * h[m]. h [N, K, H], y [N, H], post [N, K], comb [N, K, K]."""

    @staticmethod
    def forward(ctx, h, y, post, comb):
        ctx.save_for_backward(h, y, post, comb)
        return torch.baddbmm(post.unsqueeze(-1) * y.unsqueeze(1), comb.mT, h)

    @staticmethod
    def backward(ctx, gradient):
        h, y, post, comb = ctx.saved_tensors
        return (
            torch.bmm(comb, gradient),
            torch.bmm(post.unsqueeze(1), gradient).squeeze(1),
            torch.bmm(gradient, y.unsqueeze(-1)).squeeze(-1),
            torch.bmm(h, gradient.mT),
        )


class Project(torch.autograd.Function):
    """m = (z @ fn.T) * r with r = 1 / rms(z). z [N, K*H], fn [K*(K+2), K*H] -> [N, K*(K+2)]."""

    @staticmethod
    def forward(ctx, z, fn, eps):
        r = (torch.linalg.vector_norm(z, dim=1, keepdim=True).square_() / z.shape[1] + eps).rsqrt_()
        m = (z @ fn.T) * r
        ctx.save_for_backward(z, fn, m, r)
        return m

    @staticmethod
    def backward(ctx, gradient):
        z, fn, m, r = ctx.saved_tensors
        scaled = gradient * r
        shrink = -(gradient * m).sum(1, keepdim=True) * r.square() / z.shape[1]
        return torch.addmm(z * shrink, scaled, fn), scaled.T @ z, None


def mix(
    h: torch.Tensor,
    weights: dict[str, torch.Tensor],
    prefix: str,
    iterations: int,
    eps: float,
    norm_eps: float,
):
    """State h [N, K, H] -> (pre [N, K], post [N, K], comb [N, K, K]) from `{prefix}_fn`, `_base`, `_scale`."""
    tokens, streams, _ = h.shape
    scale, base = weights[f"{prefix}_scale"], weights[f"{prefix}_base"]
    widths = torch.tensor([streams, streams, streams * streams])
    m = (
        Project.apply(h.reshape(tokens, -1), weights[f"{prefix}_fn"], norm_eps)
        * scale.repeat_interleave(widths)
        + base
    )
    pre, post, comb = m.split(widths.tolist(), dim=1)
    comb = Sinkhorn.apply(comb.T.reshape(streams, streams, tokens), iterations, eps)
    return torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), comb.permute(2, 0, 1).contiguous()


def collapse(h: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_k pre[k] * h[k]: [N, K, H], [N, K] -> [N, H]."""
    return torch.bmm(pre.unsqueeze(1), h).squeeze(1)
