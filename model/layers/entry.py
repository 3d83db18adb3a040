"""The first decoder layer as a rank sees it that holds the encoder layers only: its input and its compressor."""

from torch import Tensor

from ...kernels.hyper import collapse_norm
from .compressor import Compressor
from .weights import LayerSettings, Weights


class DecoderEntry:
    """Makes the global KV of layer ``number``, which depends on the encoder layers alone."""

    def __init__(
        self, weights: Weights, number: int, frequencies: Tensor, settings: LayerSettings
    ) -> None:
        self.compressor = Compressor(weights.below("attn"), number, frequencies, settings)
        self._norm = weights.tensor("attn_norm.weight")
        self._eps = settings.config.rms_norm_eps

    def attention_input(self, streams: Tensor, pre: Tensor) -> Tensor:
        """``streams`` [T, K, H] collapsed by ``pre`` [T, K] and normalised: [T, H]."""
        return collapse_norm(streams, pre, self._norm, self._eps)
