"""Mixture of experts: route, exchange rows with the ranks that hold the experts, combine (spec/model.md 4).

    dispatch our rows -> start the exchange -> shared expert -> rows have arrived -> our experts -> answers -> combine

Determinism: a row's product with an expert does not depend on the other rows, its expert outputs come back one
by one and are added in the order in which the router chose them, so neither neighbours nor ranks nor the replica
that computed change a bit of the sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.dispatch import Buffers, Replicas, combine, dispatch, serve
from ...kernels.moe import ExpertMath, Router, mixture, row_bits, shared_outputs
from ...transfer.errors import CheckpointError
from ..expert_store import ExpertStore
from ..experts_config import ExpertsConfig
from ..parallel import ExpertExchange
from ..placement import ExpertPlacement, check_layer
from .weights import LayerSettings, Weights

NOT_COUNTED = np.zeros(0, np.int32)
"""In place of counts, where rows of experts are not counted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertShare:
    """What the layers of one network on one rank have in common: who holds which experts, and how rows get there."""

    exchange: ExpertExchange
    placement: ExpertPlacement
    store: ExpertStore
    config: ExpertsConfig
    buffers: Buffers = field(default_factory=Buffers)


class SparseMoe:
    """Router, shared expert and this rank's slots of routed experts of one layer, number ``layer`` of the share."""

    def __init__(
        self, weights: Weights, settings: LayerSettings, share: ExpertShare, layer: int
    ) -> None:
        config = settings.config
        self._layer, self._share = layer, share
        self._num_experts, self._num_chosen = config.n_routed_experts, config.num_experts_per_tok
        router = weights.linear("gate", quantized=False)
        self._router = Router(
            panels=router.bits,
            temperature=np.float32(config.gate_temp),
            bias=weights.tensor("gate.bias").numpy(),
            bias_image=weights.tensor("gate.bias_vl").numpy(),
            scaling=np.float32(config.routed_scaling_factor),
        )
        self._math = ExpertMath(
            shape=share.store.shape,
            limit=np.float32(config.swiglu_limit),
            kind=settings.fmt.activation_kind,
            halves=share.config.combine == "bfloat16",
        )
        self._fp8 = share.config.dispatch == "fp8"
        shared = self._math.shape.pack(*_matrices(weights.below("shared_experts")))
        self._shared = row_bits(shared[None])
        slots = share.placement.slots[layer]
        for slot, expert in enumerate(slots[share.exchange.rank].tolist()):
            if expert >= 0:
                self._load(weights, slot, expert)
        self._experts = share.store.panels(layer)
        self._use(slots)

    def _load(self, weights: Weights, slot: int, expert: int) -> None:
        try:
            own = _matrices(weights.below(f"experts.{expert}"))
            self._share.store.load(self._layer, slot, *own)
        except ValueError as error:
            raise CheckpointError(f"layer {self._layer}, expert {expert}: {error}") from error

    def _use(self, slots: NDArray[np.int32]) -> None:
        """Find experts by ``slots`` [R, S] from now on; one assignment, so no pass sees half of it."""
        self._placed = slots, Replicas.of(slots, self._num_experts)

    def place(self, slots: NDArray[np.int32], staged: Mapping[int, int]) -> None:
        """Flip this layer to ``slots`` [R, S], between two passes; see ``ExpertStore.flip``. Raises PlacementError."""
        check_layer(slots, self._num_experts, self._layer)
        rank = self._share.exchange.rank
        self._share.store.flip(self._layer, self._placed[0][rank], slots[rank], staged)
        self._use(slots)

    def __call__(
        self, x: Tensor, image: Tensor, counts: NDArray[np.int32]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` [T, H], ``image`` bool [T]: (output [T, H], expert ids int64 [T, k], weights [T, k]).

        Adds the rows of every expert to ``counts`` int32 [E], or [0].
        """
        exchange, buffers = self._share.exchange, self._share.buffers
        replicas = self._placed[1]
        if exchange.size == 1:
            return mixture(
                x,
                image,
                self._router,
                self._num_chosen,
                replicas.where[1],
                self._experts,
                self._shared,
                self._math,
                counts,
            )
        sent = dispatch(
            x,
            image,
            self._router,
            self._num_chosen,
            exchange.rank,
            exchange.size,
            replicas,
            self._math,
            self._fp8,
            counts,
            buffers,
        )
        arrival = exchange.start(sent.parts)
        shared = shared_outputs(sent.rounded, self._shared, self._math)
        arrived = arrival.wait()
        answers = serve(arrived, self._num_chosen, self._experts, self._math, self._fp8, buffers)
        answered = exchange.all_to_all(answers)
        return (
            combine(answered, sent.place, shared, self._math, buffers),
            sent.ids,
            sent.weights,
        )

    def join_exchange(self) -> None:
        """Take part in the exchange of this layer, if there is one, without rows of our own."""
        if self._share.exchange.size > 1:
            none = torch.zeros(0, self._math.shape.hidden)
            self(none, torch.zeros(0, dtype=torch.bool), NOT_COUNTED)


def _matrices(expert: Weights) -> tuple[Tensor, Tensor]:
    """(gate_up [2 I, H], down [H, I]) of one expert."""
    gate_up = torch.cat((expert.tensor("w1.weight"), expert.tensor("w3.weight")))
    return gate_up, expert.tensor("w2.weight")
