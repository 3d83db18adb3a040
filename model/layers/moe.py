"""Mixture of experts: route, exchange rows with the ranks that hold the experts, combine (spec/model.md 4).

Determinism: an expert's product has a fixed shape per tile of rows, a row's expert outputs come back one by one and are
added in the order in which the router chose them, so neither neighbours nor ranks change a bit of the sum.
"""

import torch
from torch import Tensor

from ...kernels.reference.linear import matmul_rows, padded_rows
from ...kernels.reference.moe import clamped_swiglu, route
from ..parallel import ExpertExchange, owner_of_expert
from .weights import LayerSettings, Weights


class Experts:
    """The routed experts that this rank holds, by consecutive ids from ``first``."""

    def __init__(self, weights: Weights, ids: range, settings: LayerSettings) -> None:
        def stacked(expert: int) -> Tensor:
            own = weights.below(str(expert))
            return torch.cat((own.tensor("w1.weight"), own.tensor("w3.weight"))).t().contiguous()

        self.first = ids.start
        self._gate_up_t = [stacked(expert) for expert in ids]
        self._down_t = [weights.below(str(expert)).tensor("w2.weight").t().contiguous() for expert in ids]
        self._settings = settings

    def __call__(self, x: Tensor, experts: Tensor, scale: Tensor) -> Tensor:
        """Output of one local expert per row: rounded ``x`` [n, H], ``experts`` int64 [n], ``scale`` [n]: [n, H]."""
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=len(self._down_t)).tolist()
        tiled = self._settings.tiled
        sizes = [padded_rows(count) if tiled else count for count in counts]
        place = self._places(order, counts, sizes)
        grouped = x.new_zeros(sum(sizes), x.shape[1])
        grouped[place] = x
        weight = x.new_zeros(sum(sizes))
        weight[place] = scale
        gate_up = self._products(grouped, self._gate_up_t, sizes)
        hidden = clamped_swiglu(gate_up, self._settings.config.swiglu_limit) * weight.unsqueeze(1)
        return self._products(self._settings.fmt.activation(hidden), self._down_t, sizes)[place]

    @staticmethod
    def _places(order: Tensor, counts: list[int], sizes: list[int]) -> Tensor:
        """Row in the grouped arrangement of every given row."""
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        count = torch.tensor(counts)
        before = count.cumsum(0) - count
        rank = torch.arange(order.shape[0])
        group = torch.repeat_interleave(torch.arange(len(counts)), count)
        place = torch.empty_like(order)
        place[order] = starts[group] + rank - before[group]
        return place

    def _products(self, x: Tensor, weights_t: list[Tensor], sizes: list[int]) -> Tensor:
        parts = [
            matmul_rows(part, weight_t, self._settings.tiled)
            for part, weight_t in zip(x.split(sizes), weights_t, strict=True)
            if part.shape[0]
        ]
        return torch.cat(parts) if parts else x.new_zeros(0, weights_t[0].shape[1])


class SparseMoe:
    """Router, shared expert and this rank's share of the routed experts of one layer."""

    def __init__(self, weights: Weights, settings: LayerSettings, exchange: ExpertExchange) -> None:
        config = settings.config
        self._settings = settings
        self._exchange = exchange
        self._router = weights.linear("gate", quantized=False)
        self._bias = weights.tensor("gate.bias")
        self._bias_image = weights.tensor("gate.bias_vl")
        total = config.n_routed_experts
        self._owner = torch.tensor([owner_of_expert(e, total, exchange.size) for e in range(total)])
        own = torch.nonzero(self._owner == exchange.rank).flatten().tolist()
        self._experts = Experts(weights.below("experts"), range(own[0], own[-1] + 1), settings)
        shared = weights.below("shared_experts")
        self._shared_gate_up = shared.linear("w1", "w3", quantized=True)
        self._shared_down = shared.linear("w2", quantized=True)

    def __call__(self, x: Tensor, valid: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` [T, H], ``valid`` and ``image`` bool [T]: (output [T, H], expert ids [T, k], weights [T, k]).

        Rows that are not ``valid`` fill up a tile; they go to no expert.
        """
        config = self._settings.config
        bias = torch.where(image.unsqueeze(1), self._bias_image, self._bias)
        ids, weights = route(
            self._router(x) / config.gate_temp, bias, config.num_experts_per_tok, config.routed_scaling_factor
        )
        rounded = self._settings.fmt.activation(x)
        num_valid = int(valid.sum())
        routed = self._routed(rounded[:num_valid], ids[:num_valid], weights[:num_valid])
        output = self._shared_down(clamped_swiglu(self._shared_gate_up(x), config.swiglu_limit))
        output[:num_valid] += routed
        return output, ids, weights

    def join_exchange(self) -> None:
        """Take part in the exchange of this layer without rows of our own."""
        hidden = self._settings.config.hidden_size
        k = self._settings.config.num_experts_per_tok
        self._routed(torch.zeros(0, hidden), torch.zeros(0, k, dtype=torch.int64), torch.zeros(0, k))

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs: [T, H]."""
        rows, chosen = ids.shape
        source = torch.arange(rows).repeat_interleave(chosen)
        expert, scale = ids.flatten(), weights.flatten()
        if self._exchange.size == 1:
            outputs = self._experts(x[source], expert, scale)
        else:
            outputs = self._exchanged(x[source], expert, scale)
        per_choice = outputs.view(rows, chosen, x.shape[1])
        total = per_choice[:, 0]
        for slot in range(1, chosen):
            total = total + per_choice[:, slot]
        return total

    def _exchanged(self, x: Tensor, expert: Tensor, scale: Tensor) -> Tensor:
        """Dispatch (row, weight, expert id) to the owners, compute there, bring the outputs back in our order."""
        owner = self._owner[expert]
        order = torch.argsort(owner, stable=True)
        sizes = torch.bincount(owner, minlength=self._exchange.size).tolist()
        payload = torch.cat((x, scale.unsqueeze(1), expert.float().unsqueeze(1)), dim=1)
        received = self._exchange.all_to_all(payload[order].split(sizes))
        work = torch.cat(received)
        outputs = self._experts(
            work[:, :-2].contiguous(), work[:, -1].to(torch.int64) - self._experts.first, work[:, -2]
        )
        returned = self._exchange.all_to_all(outputs.split([part.shape[0] for part in received]))
        result = torch.empty_like(x)
        result[order] = torch.cat(returned)
        return result
