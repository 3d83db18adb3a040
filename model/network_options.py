"""How a checkpoint is run on a rank."""

from dataclasses import dataclass, field
from typing import Literal

from ..kernels.storage import KV_FORMATS
from ..transfer.errors import ConfigError
from .experts_config import ExpertsConfig
from .placement import ExpertPlacement

Part = Literal["whole", "encoder", "decoder"]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """How a checkpoint is run on a rank.

    numerics: ``released`` rounds caches, index and inputs of products as the model was trained; ``plain`` is
        mathematics only. deterministic: a row's bits do not depend on its neighbours. block_tokens: tokens a block of
        global KV. num_blocks, num_slots: size of the caches, one of each reserved for padding. keep: prompt rows that
        run the decoder layers; None is a window plus back-tracking. experts: how ranks share them. placement: where
        they lie at first, the same on every rank; None is ``ExpertPlacement.initial``. part: ``whole``; or, where the
        network is cut between the pools, ``encoder`` for a rank that holds what comes before the decoder layers, and
        ``decoder`` for one that takes over there (it holds all layers, since generated tokens run through all).
        num_tails: prompts whose tails a ``decoder`` has room for; an ``encoder`` has one a slot.
    """

    numerics: str = "released"
    deterministic: bool = True
    block_tokens: int = 128
    num_blocks: int = 65
    num_slots: int = 9
    keep: int | None = None
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    placement: ExpertPlacement | None = None
    part: Part = "whole"
    num_tails: int = 0

    def __post_init__(self) -> None:
        if self.numerics not in KV_FORMATS:
            raise ConfigError(
                f"numerics = {self.numerics!r}: allowed are {', '.join(sorted(KV_FORMATS))}"
            )
        if self.block_tokens < 2 or self.block_tokens % 2:
            raise ConfigError(
                f"block_tokens = {self.block_tokens}: must be an even number of at least 2"
            )
        if self.experts.dispatch == "fp8" and self.numerics != "released":
            raise ConfigError(
                f"dispatch = 'fp8' with numerics = {self.numerics!r}: rows are rounded to FP8 by released numerics"
                " only; use dispatch = 'float32'"
            )
        if (self.num_tails > 0) != (self.part == "decoder"):
            raise ConfigError(
                f"num_tails = {self.num_tails} with part = {self.part!r}: a decoder part needs at least 1, the others"
                " have none to give"
            )
        for name, value in (("num_blocks", self.num_blocks), ("num_slots", self.num_slots)):
            if value < 2:
                raise ConfigError(
                    f"{name} = {value}: must be at least 2, the first is reserved for padding"
                )
