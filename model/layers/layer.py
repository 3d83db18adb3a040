"""One layer: Engram where it has one, attention, mixture of experts, and their mHC mixes (spec/model.md 2.1)."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.hyper import collapse_norm, combine
from ..batch import Rows
from ..cache import Cache
from .attention import Attention, Selection
from .engram import Engram
from .hyper import Mix
from .moe import ExpertShare, SparseMoe
from .weights import LayerSettings, Weights

Observer = Callable[[int, str, Tensor], None]
"""Told (layer, name, value) of intermediate values of a pass; for comparison with other implementations."""


class Layer:
    """A backbone layer or a drafter block. ``number`` is its window's place in a slot, drafter blocks last.

    Its experts are those of layer ``share_layer`` of ``share``.
    """

    def __init__(
        self,
        weights: Weights,
        number: int,
        frequencies: Tensor,
        settings: LayerSettings,
        share: ExpertShare,
        share_layer: int,
        engram: Engram | None,
    ) -> None:
        self.number = number
        self.engram = engram
        self.attention = Attention(weights.below("attn"), number, frequencies, settings)
        self.moe = SparseMoe(weights.below("ffn"), settings, share, share_layer)
        self.mix_attention = Mix(weights, "attn", settings)
        self.mix_moe = Mix(weights, "ffn", settings)
        self.attention_norm = weights.tensor("attn_norm.weight")
        self.moe_norm = weights.tensor("ffn_norm.weight")
        self._eps = settings.config.rms_norm_eps

    def attention_input(self, streams: Tensor, pre: Tensor) -> Tensor:
        """``streams`` [T, K, H] collapsed by ``pre`` [T, K] and normalised: [T, H]."""
        return collapse_norm(streams, pre, self.attention_norm, self._eps)

    def sublayers(
        self,
        x: Tensor,
        streams: Tensor,
        rows: Rows,
        image: Tensor,
        selection: Selection,
        cache: Cache,
        counts: NDArray[np.int32],
        observe: Observer | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention on normalised ``x``, then the experts: (streams [T, K, H], pre [T, K] for the next layer).

        ``image`` bool [T]. Writes the window rows of ``rows`` into ``cache``, and adds the rows of every expert to
        ``counts`` int32 [E], unless that is empty.
        """
        number = self.number
        pre, post, comb = self.mix_attention(streams)
        y = self.attention(x, rows, selection, cache)
        after = combine(streams, y, post, comb)
        if observe:
            observe(number, "attn_in", x)
            observe(number, "attn_out", y)
            observe(number, "after_attn", after)
            if number in selection.chosen:
                observe(number, "selected", selection.chosen[number])
        next_pre, post, comb = self.mix_moe(after)
        x = collapse_norm(after, pre, self.moe_norm, self._eps)
        y, experts, weights = self.moe(x, image, counts)
        result = combine(after, y, post, comb)
        if observe:
            observe(number, "ffn_in", x)
            observe(number, "ffn_out", y)
            observe(number, "expert_ids", experts)
            observe(number, "expert_weights", weights)
            observe(number, "after_ffn", result)
        return result, next_pre
