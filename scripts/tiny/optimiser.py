"""Muon for the matrices, AdamW for everything else, both scaled by one schedule factor a step."""

import torch

from .quantise import storage_format

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 4
MUON_RATE, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.1
BATCH = 128  # matrices orthogonalised at once: their temporaries fit the cache
ADAM_BETAS, ADAM_EPS, ADAM_CLIP = (0.9, 0.95), 1e-8, 1.0
ADAM_RATES = {  # first match of the name's ending
    "embed.weight": 0.01,
    "head.weight": 0.004,
    "engram.embed.weight": 0.01,
    "gate.weight": 0.003,
    "weights_proj.weight": 0.003,
    "_fn": 0.002,
    "_base": 0.01,
    "_scale": 0.005,
    "attn_sink": 0.01,
    "": 0.004,
}


def is_matrix(name: str) -> bool:
    """True for the weights that Muon trains."""
    return storage_format(name) in ("fp8_block", "fp4") or name.endswith(
        ("compressor.wkv.weight", "compressor.wgate.weight", "indexer.wk.weight")
    )


def orthogonalise(x: torch.Tensor) -> torch.Tensor:
    """Nearest semi-orthogonal matrices, roughly. x [n, rows, columns] with rows <= columns."""
    a, b, c = NEWTON_SCHULZ
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-12)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Optimiser:
    """Steps `masters` in place from the gradients of `weights` (the same tensors, or their quantised copies)."""

    def __init__(self, masters: dict[str, torch.Tensor]):
        self.masters = {
            name: w
            for name, w in masters.items()
            if not name.endswith(("gate.bias", "gate.bias_vl"))
        }
        self.momentum = {name: torch.zeros_like(w) for name, w in self.masters.items()}
        self.second = {
            name: torch.zeros_like(w) for name, w in self.masters.items() if not is_matrix(name)
        }
        self.rates = {
            name: next(rate for ending, rate in ADAM_RATES.items() if name.endswith(ending))
            for name in self.second
        }
        self.steps = 0

    @torch.no_grad()
    def step(self, weights: dict[str, torch.Tensor], factor: float) -> float:
        """One update; returns the gradient norm of the AdamW part before clipping."""
        self.steps += 1
        gradients = {
            name: weights[name].grad for name in self.second if weights[name].grad is not None
        }
        norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        correct_1, correct_2 = (1 - beta**self.steps for beta in ADAM_BETAS)
        for name, gradient in gradients.items():
            gradient.mul_(min(1.0, ADAM_CLIP / (norm + 1e-12)))
            mean, square = self.momentum[name].lerp_(gradient, 1 - ADAM_BETAS[0]), self.second[name]
            square.mul_(ADAM_BETAS[1]).addcmul_(gradient, gradient, value=1 - ADAM_BETAS[1])
            self.masters[name].addcdiv_(
                mean,
                (square / correct_2).sqrt_().add_(ADAM_EPS),
                value=-factor * self.rates[name] / correct_1,
            )
        self.muon(
            {
                name: weights[name].grad
                for name in self.masters
                if is_matrix(name) and weights[name].grad is not None
            },
            factor,
        )
        return norm

    def muon(self, gradients: dict[str, torch.Tensor], factor: float) -> None:
        groups: dict[tuple[int, int], list[tuple[str, torch.Tensor]]] = {}
        for name, gradient in gradients.items():
            momentum = self.momentum[name].lerp_(gradient, 1 - MUON_MOMENTUM)
            update = gradient.lerp(momentum, MUON_MOMENTUM)
            update = update.view(-1, *update.shape[-2:])
            update = update if update.shape[1] <= update.shape[2] else update.mT
            groups.setdefault(tuple(update.shape[1:]), []).append((name, update))
        for members in groups.values():
            stacked = torch.cat([update for _, update in members])
            done = torch.cat([orthogonalise(part) for part in stacked.split(BATCH)])
            sizes = [len(update) for _, update in members]
            for (name, _), result in zip(members, done.split(sizes), strict=True):
                master = self.masters[name]
                rows, columns = master.shape[-2:]
                result = (result if rows <= columns else result.mT).reshape(master.shape)
                rate = factor * MUON_RATE
                master.mul_(1 - rate * MUON_DECAY).add_(
                    result, alpha=-rate * max(1.0, rows / columns) ** 0.5
                )

    def state(self) -> dict:
        return {"momentum": self.momentum, "second": self.second, "steps": self.steps}

    def load(self, state: dict) -> None:
        self.momentum, self.second, self.steps = state["momentum"], state["second"], state["steps"]
