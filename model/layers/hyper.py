"""The mix of one sublayer: how the residual streams are read, written and blended (spec/model.md 3)."""

import torch
from torch import Tensor

from ...kernels.reference.hyper import mix_weights
from ...kernels.reference.linear import matmul_rows
from .weights import LayerSettings, Weights


class Mix:
    """mHC weights of the attention or the MoE sublayer of a layer."""

    def __init__(self, weights: Weights, kind: str, settings: LayerSettings) -> None:
        self._fn_t = weights.tensor(f"hc_{kind}_fn").t().contiguous()
        self._base = weights.tensor(f"hc_{kind}_base")
        self._scale = weights.tensor(f"hc_{kind}_scale")
        self._settings = settings

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``streams`` [T, K, H] to pre [T, K] (for the next sublayer), post [T, K] and comb [T, K, K]."""
        config = self._settings.config
        flat = streams.flatten(1)
        root = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps)
        mixes = matmul_rows(flat, self._fn_t, self._settings.tiled) * root
        return mix_weights(
            mixes, self._scale, self._base, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps
        )
