"""The text network: embedding, layers, output head, as forward passes over the caches (spec/model.md 2.1).

Shapes: T rows, K streams, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.hyper import collapse_norm, combine
from ..kernels.reference.norm import rope_frequencies, yarn_frequencies
from ..kernels.storage import KV_FORMATS
from ..transfer.errors import ConfigError
from .batch import Batch, Logits, Rows, Span
from .cache import Cache, cache_layout, default_keep
from .checkpoint import Checkpoint
from .config import ModelConfig
from .engram_tables import engram_tables
from .layers.attention import Attention, Selection
from .layers.engram import Engram
from .layers.hyper import Mix
from .layers.moe import SparseMoe
from .layers.weights import LayerSettings, Weights
from .parallel import ExpertExchange, LocalExchange
from .tokenizer import Tokenizer

Observer = Callable[[int, str, Tensor], None]
"""Told (layer, name, value) of intermediate values of a pass; for comparison with other implementations."""


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How a checkpoint is run on a rank.

    numerics: ``released`` rounds caches, index and inputs of products as the model was trained; ``plain`` is
        mathematics only. deterministic: a row's bits do not depend on its neighbours. block_tokens: tokens a block of
        global KV. num_blocks, num_slots: size of the caches, one of each reserved for padding. keep: prompt rows that
        run the decoder layers; None is a window plus back-tracking.
    """

    numerics: str = "released"
    deterministic: bool = True
    block_tokens: int = 128
    num_blocks: int = 65
    num_slots: int = 9
    keep: int | None = None

    def __post_init__(self) -> None:
        if self.numerics not in KV_FORMATS:
            raise ConfigError(
                f"numerics = {self.numerics!r}: allowed are {', '.join(sorted(KV_FORMATS))}"
            )
        if self.block_tokens < 2 or self.block_tokens % 2:
            raise ConfigError(
                f"block_tokens = {self.block_tokens}: must be an even number of at least 2"
            )
        for name, value in (("num_blocks", self.num_blocks), ("num_slots", self.num_slots)):
            if value < 2:
                raise ConfigError(
                    f"{name} = {value}: must be at least 2, the first is reserved for padding"
                )


class Layer:
    """One backbone layer: Engram where it has one, attention, mixture of experts, and their mHC mixes."""

    def __init__(
        self,
        weights: Weights,
        layer: int,
        frequencies: Tensor,
        settings: LayerSettings,
        exchange: ExpertExchange,
        engram: Engram | None,
    ) -> None:
        self.engram = engram
        self.attention = Attention(weights.below("attn"), layer, frequencies, settings)
        self.moe = SparseMoe(weights.below("ffn"), settings, exchange)
        self.mix_attention = Mix(weights, "attn", settings)
        self.mix_moe = Mix(weights, "ffn", settings)
        self.attention_norm = weights.tensor("attn_norm.weight")
        self.moe_norm = weights.tensor("ffn_norm.weight")


class Network:
    """A loaded checkpoint with its caches. ``forward`` is the one way to compute with it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: NetworkOptions,
        exchange: ExpertExchange,
    ) -> None:
        config = checkpoint.config
        fmt = KV_FORMATS[options.numerics]
        settings = LayerSettings(config=config, fmt=fmt, deterministic=options.deterministic)
        self.config: ModelConfig = config
        self.options = options
        keep = default_keep(config) if options.keep is None else options.keep
        if keep < config.sliding_window:
            raise ConfigError(
                f"keep = {keep}: must be at least the window, {config.sliding_window}"
            )
        layout = cache_layout(config, fmt, options.block_tokens, keep, checkpoint.fingerprint())
        self.cache = Cache(config, fmt, layout, options.num_blocks, options.num_slots)
        self.keep = keep
        weights = Weights(checkpoint, "", settings)
        self._embedding = weights.tensor("embed.weight")
        self._head = weights.linear("head", quantized=False)
        self._norm = weights.tensor("norm.weight")
        self._settings = settings
        token_map = Tokenizer(checkpoint.directory, config).engram_map
        self._token_map = (
            torch.arange(config.vocab_size) if token_map is None else torch.tensor(token_map)
        )
        tables = engram_tables(config)
        plain, yarn = _frequencies(config)
        self._layers: list[Layer] = []
        for layer in range(config.num_hidden_layers):
            own = weights.below(f"layers.{layer}")
            engram = (
                Engram(own.below("engram"), tables[layer], settings) if layer in tables else None
            )
            frequencies = yarn if config.ratio(layer) else plain
            self._layers.append(Layer(own, layer, frequencies, settings, exchange, engram))

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], observe: Observer | None = None) -> Tensor:
        """Compute the rows of ``spans``, write their caches, return logits float32 [wanted rows, V] in span order.

        Every rank of an instance calls this equally often; ``spans`` may be empty.
        """
        config = self.config
        batch = Batch(
            spans,
            window=config.sliding_window,
            ring_rows=self.cache.layout.ring_rows,
            pad_token_id=config.engram_pad_token_id,
            max_history=config.engram_max_ngram_size - 1,
        )
        grams, image = self._grams(batch.grams)
        streams = self._embedding[batch.token_ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre = torch.zeros(streams.shape[:2])
        pre[:, 0] = 1.0
        rows = batch.rows
        selection = Selection(rows, self.cache, self._settings)
        for number, layer in enumerate(self._layers):
            at_split = number == config.split_layer
            if rows.num_rows == 0 and not (at_split and batch.rows.num_rows):
                layer.moe.join_exchange()
                continue
            if layer.engram is not None:
                streams, gates = layer.engram(streams, grams, ~image)
                if observe:
                    observe(number, "engram_rows", layer.engram.table_rows(grams))
                    observe(number, "engram_gate", gates)
                    observe(number, "after_engram", streams)
            x = collapse_norm(streams, pre, layer.attention_norm, config.rms_norm_eps)
            if layer.attention.compressor is not None:
                latent = layer.attention.compressor.write(x, rows, self.cache)
                if observe:
                    observe(number, "latent", latent)
            if at_split:
                if batch.tail_of is not None:
                    x, streams, image = (
                        x[batch.tail_of],
                        streams[batch.tail_of],
                        image[batch.tail_of],
                    )
                rows = batch.tail
                selection = Selection(rows, self.cache, self._settings)
                if rows.num_rows == 0:
                    layer.moe.join_exchange()
                    continue
            streams, pre = self._sublayers(
                number, layer, x, streams, rows, image, selection, observe
            )
        if batch.logit_rows.shape[0] == 0:
            return torch.zeros(0, config.vocab_size)
        wanted = batch.logit_rows
        return self._head(
            collapse_norm(streams[wanted], pre[wanted], self._norm, config.rms_norm_eps)
        )

    def warm_up(self) -> None:
        """Compile what a step runs, so that no request waits for it; the first time on a machine takes a minute.

        Uses the reserved block and slot. Every rank of an instance calls this at the same time.
        """
        ids = (self.config.bos_token_id,) * min(40, self.options.block_tokens)
        half = len(ids) // 2
        prompt = Span(token_ids=ids[:-1], start=0, history=(), slot=0, blocks=(0,), tail_start=half)
        row = Span(
            token_ids=ids[-1:],
            start=len(ids) - 1,
            history=ids[:3],
            slot=0,
            blocks=(0,),
            tail_start=half,
            logits=Logits.LAST,
        )
        for spans in ((prompt,), (row,), (row, row), ()):
            self.forward(spans)
        self.cache.blocks[0].zero_()
        self.cache.clear_slot(0)

    def _sublayers(
        self,
        number: int,
        layer: Layer,
        x: Tensor,
        streams: Tensor,
        rows: Rows,
        image: Tensor,
        selection: Selection,
        observe: Observer | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention on normalised ``x``, then the experts: (streams [T, K, H], pre [T, K] for the next layer)."""
        pre, post, comb = layer.mix_attention(streams)
        y = layer.attention(x, rows, selection, self.cache)
        after = combine(streams, y, post, comb)
        if observe:
            observe(number, "attn_in", x)
            observe(number, "attn_out", y)
            observe(number, "after_attn", after)
            if number in selection.chosen:
                observe(number, "selected", selection.chosen[number])
        next_pre, post, comb = layer.mix_moe(after)
        x = collapse_norm(after, pre, layer.moe_norm, self.config.rms_norm_eps)
        y, experts, weights = layer.moe(x, image)
        result = combine(after, y, post, comb)
        if observe:
            observe(number, "ffn_in", x)
            observe(number, "ffn_out", y)
            observe(number, "expert_ids", experts)
            observe(number, "expert_weights", weights)
            observe(number, "after_ffn", result)
        return result, next_pre

    def _grams(self, token_grams: Tensor) -> tuple[Tensor, Tensor]:
        """(compressed n-grams [T, N], image mask [T]): from an image token on, backwards, everything is padding."""
        is_image = token_grams == self.config.image_token_id
        blocked = is_image.cumsum(dim=1) > 0
        pad = self._token_map[self.config.engram_pad_token_id]
        return torch.where(blocked, pad, self._token_map[token_grams]), is_image[:, 0].contiguous()


def _frequencies(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Rotary frequencies of window-only layers, and of layers with compressed entries."""
    scaling = config.rope_scaling
    return (
        rope_frequencies(config.qk_rope_head_dim, config.rope_theta),
        yarn_frequencies(
            config.qk_rope_head_dim,
            config.compress_rope_theta,
            scaling.factor,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.original_max_position_embeddings,
        ),
    )


def load_network(
    directory: Path, *, options: NetworkOptions, exchange: ExpertExchange | None = None
) -> Network:
    """Load what this rank needs of the checkpoint in ``directory``. Raises CheckpointError naming file and tensor."""
    return Network(Checkpoint(directory), options, exchange or LocalExchange())
