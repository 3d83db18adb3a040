"""The text network: embedding, layers, output head, as forward passes over the caches (spec/model.md 2.1).

Shapes: T rows, K streams, H hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.hyper import collapse_norm
from ..kernels.moe import ExpertShape
from ..kernels.reference.norm import rope_frequencies, yarn_frequencies
from ..kernels.storage import KV_FORMATS
from ..transfer.errors import ConfigError, PlacementError
from .batch import Batch, Logits, Rows, Span
from .cache import Cache, cache_layout, default_keep
from .checkpoint import Checkpoint
from .config import ModelConfig
from .drafter import Drafter, DraftSpan
from .engram_tables import engram_tables
from .expert_counts import ExpertCounts
from .expert_store import ExpertStore
from .layers.attention import Selection
from .layers.engram import Engram
from .layers.entry import DecoderEntry
from .layers.layer import Layer, Observer
from .layers.moe import ExpertShare
from .layers.weights import LayerSettings, Weights
from .network_options import NetworkOptions
from .parallel import ExpertExchange, LocalExchange
from .parts import Crew, Order, cut_spans, take_rows
from .placement import ExpertPlacement, slots_per_rank
from .tokenizer import Tokenizer


@dataclass(slots=True)
class _Flow:
    """What goes from layer to layer: streams [T, K, H], their weights [T, K], image mask [T], rows, selection."""

    streams: Tensor
    pre: Tensor
    image: Tensor
    rows: Rows
    selection: Selection


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
        settings = LayerSettings(config=config, fmt=fmt)
        self.config: ModelConfig = config
        self.options = options
        keep = default_keep(config) if options.keep is None else options.keep
        if keep < config.sliding_window:
            raise ConfigError(
                f"keep = {keep}: must be at least the window, {config.sliding_window}"
            )
        layout = cache_layout(
            config,
            fmt,
            options.block_tokens,
            keep,
            checkpoint.fingerprint(),
            seam=options.part != "whole",
        )
        num_tails = options.num_slots if options.part == "encoder" else options.num_tails
        self.cache = Cache(config, fmt, layout, options.num_blocks, options.num_slots, num_tails)
        self.keep = keep
        weights = Weights(checkpoint, "", settings)
        self._embedding = weights.tensor("embed.weight")
        self._settings = settings
        self.tokenizer = Tokenizer(checkpoint.directory, config)
        token_map = self.tokenizer.engram_map
        self._token_map = (
            torch.arange(config.vocab_size) if token_map is None else torch.tensor(token_map)
        )
        tables = engram_tables(config)
        plain, yarn = _frequencies(config)
        num_layers = config.split_layer if options.part == "encoder" else config.num_hidden_layers
        self._share = _share(config, options, exchange, num_layers)
        self._placement = self._share.placement
        self.expert_store = self._share.store
        self.expert_counts = ExpertCounts(
            num_layers, config.n_routed_experts, options.experts.window
        )
        self.step = 0
        """Forward passes since the warm-up; the same on all ranks of an instance."""
        self._layers: list[Layer] = []
        for layer in range(num_layers):
            own = weights.below(f"layers.{layer}")
            engram = (
                Engram(own.below("engram"), tables[layer], settings) if layer in tables else None
            )
            frequencies = yarn if config.ratio(layer) else plain
            self._layers.append(
                Layer(own, layer, frequencies, settings, self._share, layer, engram)
            )
        self._crew = Crew() if exchange.size == 1 else None
        """Threads; ranks that exchange rows keep to one, so that their exchanges stay in step."""
        self._entry: DecoderEntry | None = None
        self.drafter: Drafter | None = None
        if options.part == "encoder":
            own = weights.below(f"layers.{num_layers}")
            self._entry = DecoderEntry(own, num_layers, yarn, settings)
            return
        self._head = weights.linear("head", quantized=False)
        self._norm = weights.tensor("norm.weight")
        if config.num_nextn_predict_layers:
            self.drafter = Drafter(
                weights, plain, settings, self.cache, self._embedding, self._head
            )

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], observe: Observer | None = None) -> Tensor:
        """Compute the rows of ``spans``, write their caches, return logits float32 [wanted rows, V] in span order.

        Every rank of an instance calls this equally often; ``spans`` may be empty. Many rows are shared by as many
        threads as torch is set to use. Counts the rows of every expert as those of pass ``step``.
        """
        logits = self._pass(spans, observe)
        self.expert_counts.end_step(self.step)
        self.step += 1
        return logits

    def _pass(self, spans: Sequence[Span], observe: Observer | None) -> Tensor:
        if self._crew is None or observe is not None:
            return self._forward(spans, None, None, observe)
        parts = cut_spans(spans, torch.get_num_threads())
        steps = len(self._layers) + 1
        orders = [None, *(self._order(*pair, steps) for pair in pairwise(parts)), None]
        work = [
            partial(self._forward, part, orders[i], orders[i + 1], None)
            for i, part in enumerate(parts)
        ]
        logits = self._crew.run(work)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @staticmethod
    def _order(earlier: Sequence[Span], later: Sequence[Span], num_steps: int) -> Order | None:
        """What ``later`` must wait for: nothing, unless a request has rows in both."""
        return Order(num_steps) if earlier[-1].slot == later[0].slot else None

    def _forward(
        self,
        spans: Sequence[Span],
        earlier: Order | None,
        later: Order | None,
        observe: Observer | None,
    ) -> Tensor:
        """One part of a pass, which follows ``earlier`` from layer to layer, and is followed by ``later``."""
        failed = True
        try:
            with torch.inference_mode():
                logits = self._run(spans, earlier, later, observe)
            failed = False
            return logits
        finally:
            if later is not None:
                later.end(failed)

    def _run(
        self,
        spans: Sequence[Span],
        earlier: Order | None,
        later: Order | None,
        observe: Observer | None,
    ) -> Tensor:
        config = self.config
        counts = self.expert_counts.new_part()
        batch = Batch(
            spans,
            window=config.sliding_window,
            ring_rows=self.cache.layout.ring_rows,
            pad_token_id=config.engram_pad_token_id,
            max_history=config.engram_max_ngram_size - 1,
        )
        grams, image = self._grams(batch.grams)
        embedded = self._embedding.numpy()[batch.token_ids.numpy(), None]
        streams = torch.from_numpy(np.repeat(embedded, config.hc_mult, axis=1))
        pre = torch.zeros(streams.shape[:2])
        pre[:, 0] = 1.0
        flow = _Flow(streams, pre, image, batch.rows, self._select(batch.rows))
        x = streams
        features: list[Tensor] = []
        for number, layer in enumerate(self._layers):
            if later is not None and number:
                later.finish(number - 1)
            if earlier is not None:
                earlier.wait(number)
            if number == config.split_layer:
                x = self._cross(layer, batch, flow, observe)
            elif flow.rows.num_rows:
                if layer.engram is not None:
                    flow.streams, gates = layer.engram(flow.streams, grams, ~image)
                    if observe:
                        observe(number, "engram_rows", layer.engram.table_rows(grams))
                        observe(number, "engram_gate", gates)
                        observe(number, "after_engram", flow.streams)
                x = layer.attention_input(flow.streams, flow.pre)
                self._compress(layer, number, x, flow.rows, observe)
            if flow.rows.num_rows == 0:
                layer.moe.join_exchange()
                continue
            if self.drafter is not None and number in config.dspark_target_layer_ids:
                features.append(self.drafter.feature(flow.streams))
            flow.streams, flow.pre = layer.sublayers(
                x,
                flow.streams,
                flow.rows,
                flow.image,
                flow.selection,
                self.cache,
                counts[number],
                observe,
            )
        self.expert_counts.add(counts)
        if earlier is not None:
            earlier.wait(len(self._layers))
        if self._entry is not None:
            self._leave_tails(self._entry, batch, flow)
        if self.drafter is not None and features:
            self.drafter.write_context(features, flow.rows)
        if later is not None:
            later.finish(len(self._layers))
        wanted = batch.logit_rows
        if self._entry is not None or wanted.shape[0] == 0:
            return torch.zeros(0, config.vocab_size)
        streams, pre = flow.streams, flow.pre
        if wanted.shape[0] < streams.shape[0]:
            streams, pre = take_rows(streams, wanted), take_rows(pre, wanted)
        return self._head(collapse_norm(streams, pre, self._norm, config.rms_norm_eps))

    def _select(self, rows: Rows) -> Selection:
        return Selection(rows, self.cache, self._settings)

    def _compress(
        self, layer: Layer, number: int, x: Tensor, rows: Rows, observe: Observer | None
    ) -> None:
        if layer.attention.compressor is not None:
            latent = layer.attention.compressor.write(x, rows, self.cache)
            if observe:
                observe(number, "latent", latent)

    def _cross(self, layer: Layer, batch: Batch, flow: "_Flow", observe: Observer | None) -> Tensor:
        """From the encoder to the decoder layers, of which ``layer`` is the first; returns its input [T, H].

        All rows leave their global KV. Those of the tails go on, and late ones join them.
        """
        x = torch.zeros(0, self.config.hidden_size)
        if flow.rows.num_rows:
            x = layer.attention_input(flow.streams, flow.pre)
            self._compress(layer, self.config.split_layer, x, flow.rows, observe)
            if batch.tail_of is not None:
                x, flow.streams, flow.image = (
                    take_rows(values, batch.tail_of) for values in (x, flow.streams, flow.image)
                )
        incoming = batch.incoming()
        if incoming is not None:
            streams, pre = self.cache.take_tails(incoming)
            x = torch.cat((x, layer.attention_input(streams, pre)))
            flow.streams = torch.cat((flow.streams, streams))
            flow.image = torch.cat((flow.image, batch.late_ids == self.config.image_token_id))
        if batch.tail is not batch.rows:
            flow.rows, flow.selection = batch.tail, self._select(batch.tail)
        return x

    def _leave_tails(self, entry: DecoderEntry, batch: Batch, flow: "_Flow") -> None:
        """The end of a pass through the encoder layers: global KV of the first decoder layer, and the tails."""
        if flow.rows.num_rows == 0:
            return
        x = entry.attention_input(flow.streams, flow.pre)
        entry.compressor.write(x, flow.rows, self.cache)
        streams, pre = flow.streams, flow.pre
        if batch.tail_of is not None:
            streams, pre = take_rows(streams, batch.tail_of), take_rows(pre, batch.tail_of)
        if streams.shape[0]:
            self.cache.put_tails(batch.outgoing(), streams, pre)

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
        if self.drafter is not None:
            anchor = DraftSpan(token_id=ids[0], position=len(ids), slot=0, floor=half)
            self.drafter.draft((anchor,), lambda _place, _logits: ids[:1])
        self.cache.blocks[0].zero_()
        self.cache.clear_slot(0)
        self.expert_counts.clear()
        self.step = 0

    @property
    def placement(self) -> ExpertPlacement:
        """Where experts lie now."""
        return self._placement

    def set_layer_placement(
        self, layer: int, slots: NDArray[np.int32], staged: Mapping[int, int] | None = None
    ) -> None:
        """Flip ``layer`` to ``slots`` [ranks, S] between two passes; every rank does so between the same two.

        ``staged`` names the staging row of every slot of ours whose expert came from another rank. Raises
        PlacementError, with nothing changed, for a placement that cannot serve or weights that are not here.
        """
        placement = self._placement.with_layer(layer, slots)
        self._layers[layer].moe.place(placement.slots[layer], staged or {})
        self._placement = placement

    def _grams(self, token_grams: Tensor) -> tuple[Tensor, Tensor]:
        """(compressed n-grams [T, N], image mask [T]): from an image token on, backwards, everything is padding."""
        is_image = token_grams == self.config.image_token_id
        blocked = is_image.cumsum(dim=1) > 0
        pad = self._token_map[self.config.engram_pad_token_id]
        return torch.where(blocked, pad, self._token_map[token_grams]), is_image[:, 0].contiguous()


def _share(
    config: ModelConfig, options: NetworkOptions, exchange: ExpertExchange, layers: int
) -> ExpertShare:
    """Room for this rank's experts in all its layers, and where they lie. Raises PlacementError."""
    experts = config.n_routed_experts
    placement = options.placement
    if placement is None:
        placement = ExpertPlacement.initial(
            layers=layers,
            num_experts=experts,
            ranks=exchange.size,
            slots_per_rank=slots_per_rank(experts, exchange.size, options.experts.redundant),
        )
    found = placement.layers, placement.ranks, placement.num_experts
    if found != (layers, exchange.size, experts):
        raise PlacementError(
            f"a placement of {found[2]} experts in {found[0]} layers over {found[1]} ranks: this instance has"
            f" {experts} experts in {layers} layers over {exchange.size} ranks"
        )
    shape = ExpertShape(config.hidden_size, config.moe_intermediate_size)
    store = ExpertStore(layers=layers, slots_per_rank=placement.slots_per_rank, shape=shape)
    return ExpertShare(exchange=exchange, placement=placement, store=store, config=options.experts)


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
