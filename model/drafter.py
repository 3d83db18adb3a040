"""DSpark: a few blocks over the backbone's features that guess the next tokens (spec/model.md 6).

    context        floor .. position - 1    keys written by every main pass, from the features of its rows
    anchor         position                 the newest token: decided, not yet computed by the backbone
    drafts 0..G-1  position + 1 ..          one pass over [anchor, noise, noise, ...], then a Markov step each

Shapes: R requests, G drafts a block, T = R * G rows, K streams, H hidden, V vocabulary, W window.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..kernels.hyper import collapse
from ..kernels.moe import ExpertShape
from ..kernels.norm import rms_norm
from ..transfer.errors import CheckpointError
from .batch import Rows
from .cache import Cache
from .config import ModelConfig
from .expert_store import ExpertStore
from .experts_config import ExpertsConfig
from .layers.attention import Selection
from .layers.layer import Layer
from .layers.linear import Linear
from .layers.moe import NOT_COUNTED, ExpertShare
from .layers.weights import LayerSettings, Weights
from .parallel import LocalExchange
from .placement import ExpertPlacement

TEMPERATURES_FILE = "dspark_sts.json"
"""Optional, beside the weights: {"temperatures": [one a draft]}, which calibrate the confidences."""

Choose = Callable[[int, Tensor], Sequence[int]]
"""Told (i, logits float32 [R, V]) of draft i of every request; returns their ids [R]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpan:
    """Where drafts of one request begin.

    ``token_id`` at ``position`` is the anchor; the rows before it, from ``floor`` on, left their context in ``slot``.
    """

    token_id: int
    position: int
    slot: int
    floor: int = 0


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """``ids`` int64 [R, n]; ``confidences`` float32 [R, n]: probability that a draft is right if those before are."""

    ids: Tensor
    confidences: Tensor


class DraftRows(Rows):
    """Rows that see the whole window before their anchor and each other, and leave nothing behind."""

    def __init__(
        self, spans: Sequence[DraftSpan], block_size: int, window: int, ring_rows: int
    ) -> None:
        super().__init__(
            starts=np.array([span.position for span in spans], dtype=np.int64),
            counts=np.full(len(spans), block_size, dtype=np.int64),
            floors=np.array([max(span.floor, 0) for span in spans], dtype=np.int64),
            known=np.zeros(len(spans), dtype=np.int64),
            slots=np.array([span.slot for span in spans], dtype=np.int64),
            tables=np.zeros((len(spans), 1), dtype=np.int64),
            window=window,
            ring_rows=ring_rows,
        )
        nothing = torch.zeros(0, dtype=torch.int64)
        self.ring_source, self.ring_slot, self.ring_row = nothing, nothing, nothing

    def _window_plan(
        self,
        span_of: np.ndarray,
        offset: np.ndarray,
        floors: np.ndarray,
        window: int,
        ring_rows: int,
    ) -> None:
        """W ring rows before each anchor, then its G rows; the same keys for all G of them."""
        number = len(floors)
        prior = self.starts.numpy()[:, None] + np.arange(-window, 0)
        self.prior_row = torch.from_numpy((np.maximum(prior, 0) % ring_rows).reshape(-1))
        self.prior_slot = torch.from_numpy(np.repeat(self.slots.numpy(), window))
        places = np.arange(number * window).reshape(number, window)
        places[prior < floors[:, None]] = -1
        own = number * window + np.arange(len(offset)).reshape(number, -1)
        self.window_index = torch.from_numpy(np.concatenate((places, own), axis=1)[span_of])


class Drafter:
    """The drafter of a loaded network. Its experts lie whole on every rank, so a rank drafts or not as it likes."""

    def __init__(
        self,
        weights: Weights,
        frequencies: Tensor,
        settings: LayerSettings,
        cache: Cache,
        embedding: Tensor,
        head: Linear,
    ) -> None:
        config = settings.config
        narrow = replace(
            config,
            n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )
        self._settings = replace(settings, config=narrow)
        self._cache, self._embedding, self._head = cache, embedding, head
        number = config.num_nextn_predict_layers
        share = _whole_experts(narrow, number)
        self._blocks = [
            Layer(
                weights.below(f"mtp.{block}"),
                config.num_hidden_layers + block,
                frequencies,
                self._settings,
                share,
                block,
                None,
            )
            for block in range(number)
        ]
        first, last = weights.below("mtp.0"), weights.below(f"mtp.{number - 1}")
        self._main_project = first.linear("main_proj", quantized=True)
        self._main_norm = first.tensor("main_norm.weight")
        self._norm = last.tensor("norm.weight")
        self._markov_embedding = last.tensor("markov_head.embed.weight")
        self._markov_head = last.linear("markov_head.head", quantized=False)
        self._confidence = last.linear("confidence_head.proj", quantized=False)
        self._temperatures = draft_temperatures(weights.directory, config)
        self.block_size = config.dspark_block_size
        """Most drafts that one call gives: G."""

    def feature(self, streams: Tensor) -> Tensor:
        """What the drafter takes from ``streams`` [T, K, H] at the entry of a target layer: [T, H]."""
        share = torch.full(streams.shape[:2], 1 / streams.shape[1])
        return collapse(streams, share)

    def write_context(self, features: Sequence[Tensor], rows: Rows) -> None:
        """Write the context keys of ``rows`` into every block's window; ``features`` [T, H] of each target layer."""
        x = self._main_project(torch.cat(list(features), dim=1))
        x = rms_norm(x, self._main_norm, self._settings.config.rms_norm_eps)
        for block in self._blocks:
            block.attention.write_window(x, rows, self._cache)

    @torch.inference_mode()
    def draft(
        self, anchors: Sequence[DraftSpan], choose: Choose, num_drafts: int | None = None
    ) -> Drafts:
        """``num_drafts`` guesses (None: ``block_size``) of what follows each anchor; R may be 0.

        A request's drafts depend on its own context and on ``choose`` only, and fewer drafts are the first of more.
        Reads the windows of the anchors' slots, writes nothing. Raises ValueError for ``num_drafts`` out of range or
        when ``choose`` gives another number of ids.
        """
        number = self.block_size if num_drafts is None else num_drafts
        if not 1 <= number <= self.block_size:
            raise ValueError(f"num_drafts = {number}: must be 1 to {self.block_size}")
        if not anchors:
            return Drafts(
                ids=torch.zeros((0, number), dtype=torch.int64), confidences=torch.zeros(0, number)
            )
        z = self._states(anchors).view(len(anchors), self.block_size, -1)
        z = z[:, :number].transpose(0, 1).contiguous()
        eps = self._settings.config.rms_norm_eps
        base = self._head(rms_norm(z.flatten(0, 1), self._norm, eps)).view(number, len(anchors), -1)
        previous = torch.tensor([anchor.token_id for anchor in anchors])
        ids: list[Tensor] = []
        confidences: list[Tensor] = []
        for place in range(number):
            markov = self._markov_embedding[previous]
            chosen = choose(place, base[place] + self._markov_head(markov))
            if len(chosen) != len(anchors):
                raise ValueError(f"choose gave {len(chosen)} ids for {len(anchors)} requests")
            raw = self._confidence(torch.cat((z[place], markov), dim=1)).squeeze(1)
            confidences.append(torch.sigmoid(raw / self._temperatures[place]))
            previous = torch.as_tensor(chosen, dtype=torch.int64)
            ids.append(previous)
        return Drafts(ids=torch.stack(ids, dim=1), confidences=torch.stack(confidences, dim=1))

    def _states(self, anchors: Sequence[DraftSpan]) -> Tensor:
        """z [T, H]: the collapsed streams that leave the last block."""
        config, layout = self._settings.config, self._cache.layout
        rows = DraftRows(anchors, self.block_size, config.sliding_window, layout.ring_rows)
        ids = torch.full((len(anchors), self.block_size), config.dspark_noise_token_id)
        ids[:, 0] = torch.tensor([anchor.token_id for anchor in anchors])
        streams = self._embedding[ids.flatten()].unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre = torch.zeros(streams.shape[:2])
        pre[:, 0] = 1.0
        image = torch.zeros(rows.num_rows, dtype=torch.bool)
        selection = Selection(rows, self._cache, self._settings)
        for block in self._blocks:
            x = block.attention_input(streams, pre)
            streams, pre = block.sublayers(
                x, streams, rows, image, selection, self._cache, NOT_COUNTED
            )
        return collapse(streams, pre)


def _whole_experts(config: ModelConfig, blocks: int) -> ExpertShare:
    """All experts of all blocks, here."""
    experts = config.n_routed_experts
    shape = ExpertShape(config.hidden_size, config.moe_intermediate_size)
    return ExpertShare(
        exchange=LocalExchange(),
        placement=ExpertPlacement.initial(
            layers=blocks, num_experts=experts, ranks=1, slots_per_rank=experts
        ),
        store=ExpertStore(layers=blocks, slots_per_rank=experts, shape=shape),
        config=ExpertsConfig(),
    )


def draft_temperatures(directory: Path, config: ModelConfig) -> tuple[float, ...]:
    """Sequential temperature scaling, one factor a draft: of ``dspark_sts.json`` in ``directory``, or all 1.

    Raises CheckpointError for a file that is not {"temperatures": [dspark_block_size positive numbers]}.
    """
    path, number = directory / TEMPERATURES_FILE, config.dspark_block_size
    if not path.exists():
        return (1.0,) * number
    try:
        document: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as JSON ({error}); mend or delete it"
        ) from error
    values = (
        cast(dict[str, object], document).get("temperatures")
        if isinstance(document, dict)
        else None
    )
    listed = cast(list[object], values) if isinstance(values, list) else []
    good = [
        float(value) for value in listed if isinstance(value, int | float) and value is not True
    ]
    if len(good) != number or len(listed) != number or not all(0 < v < math.inf for v in good):
        raise CheckpointError(
            f"{path}: temperatures = {values!r}: must be a list of {number} positive numbers, one a draft;"
            " fit them again with scripts.fit_sts, or delete the file"
        )
    return tuple(good)
