"""The mix of one sublayer: how the residual streams are read, written and blended (spec/model.md 3)."""

from torch import Tensor

from ...kernels.hyper import mix_streams
from .weights import LayerSettings, Weights


class Mix:
    """mHC weights of the attention or the MoE sublayer of a layer."""

    def __init__(self, weights: Weights, kind: str, settings: LayerSettings) -> None:
        self._panels = weights.linear_of(f"hc_{kind}_fn", quantized=False).bits
        self._base = weights.tensor(f"hc_{kind}_base")
        self._scale = weights.tensor(f"hc_{kind}_scale")
        self._settings = settings

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``streams`` [T, K, H] to pre [T, K] (for the next sublayer), post [T, K] and comb [T, K, K]."""
        config = self._settings.config
        return mix_streams(
            streams,
            self._panels,
            self._scale,
            self._base,
            config.hc_sinkhorn_iters,
            config.hc_eps,
            config.rms_norm_eps,
        )
