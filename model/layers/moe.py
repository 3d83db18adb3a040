"""Mixture of experts: route, exchange rows with the ranks that hold the experts, combine (spec/model.md 4).

Determinism: a row's product with an expert does not depend on the other rows, its expert outputs come back one
by one and are added in the order in which the router chose them, so neither neighbours nor ranks change a bit
of the sum.
"""

import numpy as np
import torch
from torch import Tensor

from ...kernels.linear import pack_weight, panel_bits
from ...kernels.moe import Router, add_choices, expert_outputs, mixture, route
from ...transfer.errors import ConfigError
from ..parallel import ExpertExchange, owner_of_expert
from .weights import LayerSettings, Weights


class Experts:
    """Experts of one width that this rank holds, by consecutive numbers."""

    def __init__(self, each: list[Weights], settings: LayerSettings) -> None:
        def gate_up(own: Weights) -> Tensor:
            return torch.cat((own.tensor("w1.weight"), own.tensor("w3.weight")))

        self.panels = (
            panel_bits(pack_weight(torch.stack([gate_up(own) for own in each]))),
            panel_bits(pack_weight(torch.stack([own.tensor("w2.weight") for own in each]))),
        )
        self._limit = settings.config.swiglu_limit
        self._kind = settings.fmt.activation_kind

    def __call__(self, x: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
        """Outputs of the local experts ``ids`` int64 [n, k] of rounded ``x`` [n, H] times ``scale`` [n, k]: [n,
        k, H].
        """
        return expert_outputs(x, ids, scale, *self.panels, self._limit, self._kind)


class SparseMoe:
    """Router, shared expert and this rank's share of the routed experts of one layer."""

    def __init__(self, weights: Weights, settings: LayerSettings, exchange: ExpertExchange) -> None:
        config = settings.config
        self._settings = settings
        self._exchange = exchange
        self._router = weights.linear("gate", quantized=False)
        self._bias = weights.tensor("gate.bias")
        self._bias_image = weights.tensor("gate.bias_vl")
        self._route_by = Router(
            panels=self._router.bits,
            temperature=np.float32(config.gate_temp),
            bias=self._bias.numpy(),
            bias_image=self._bias_image.numpy(),
            scaling=np.float32(config.routed_scaling_factor),
        )
        total = config.n_routed_experts
        if exchange.size > total:
            raise ConfigError(
                f"an instance of {exchange.size} ranks cannot share {total} experts: give it at most {total} ranks"
            )
        self._owner = torch.tensor([owner_of_expert(e, total, exchange.size) for e in range(total)])
        own = torch.nonzero(self._owner == exchange.rank).flatten().tolist()
        self._first = own[0]
        self._experts = Experts(
            [weights.below(f"experts.{expert}") for expert in range(own[0], own[-1] + 1)], settings
        )
        self._shared = Experts([weights.below("shared_experts")], settings)

    def __call__(self, x: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` [T, H], ``image`` bool [T]: (output [T, H], expert ids int64 [T, k], weights [T, k])."""
        config, fmt = self._settings.config, self._settings.fmt
        if self._exchange.size == 1:
            return mixture(
                x,
                image,
                self._route_by,
                config.num_experts_per_tok,
                self._experts.panels,
                self._shared.panels,
                config.swiglu_limit,
                fmt.activation_kind,
            )
        logits = self._router(x)
        if config.gate_temp != 1.0:
            logits /= config.gate_temp
        ids, weights = route(
            logits,
            self._bias,
            self._bias_image,
            image,
            config.num_experts_per_tok,
            config.routed_scaling_factor,
        )
        rounded = fmt.activation(x)
        routed = self._routed(rounded, ids, weights)
        alone = torch.zeros((x.shape[0], 1), dtype=torch.int64)
        shared = self._shared(rounded, alone, torch.ones((x.shape[0], 1)))
        return add_choices(routed, shared.squeeze(1)), ids, weights

    def join_exchange(self) -> None:
        """Take part in the exchange of this layer, if there is one, without rows of our own."""
        if self._exchange.size == 1:
            return
        hidden = self._settings.config.hidden_size
        k = self._settings.config.num_experts_per_tok
        self._routed(
            torch.zeros(0, hidden), torch.zeros(0, k, dtype=torch.int64), torch.zeros(0, k)
        )

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Outputs of the chosen experts: [T, k, H]."""
        source = torch.arange(ids.shape[0]).repeat_interleave(ids.shape[1])
        outputs = self._exchanged(x[source], ids.flatten(), weights.flatten())
        return outputs.view(*ids.shape, x.shape[1])

    def _exchanged(self, x: Tensor, expert: Tensor, scale: Tensor) -> Tensor:
        """Dispatch (row, weight, expert id) to the owners, compute there, bring the outputs back in our order."""
        owner = self._owner[expert]
        order = torch.argsort(owner, stable=True)
        sizes = torch.bincount(owner, minlength=self._exchange.size).tolist()
        payload = torch.cat((x, scale.unsqueeze(1), expert.float().unsqueeze(1)), dim=1)
        received = self._exchange.all_to_all(payload[order].split(sizes))
        work = torch.cat(received)
        local = work[:, -1:].to(torch.int64) - self._first
        outputs = self._experts(work[:, :-2].contiguous(), local, work[:, -2:-1].contiguous())
        returned = self._exchange.all_to_all(
            outputs.squeeze(1).split([part.shape[0] for part in received])
        )
        result = torch.empty_like(x)
        result[order] = torch.cat(returned)
        return result
