"""One rank's experts, as the cluster asks about them: what was routed, where experts lie, and plans to move them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.expert_plan import UNKNOWN, ExpertPlan
from ..model.network import Network
from ..model.rebalance import ExpertMover
from ..transfer.backend import TransferBackend
from ..transfer.errors import PlacementError


class RankExperts:
    """``mover`` moves experts between the ranks of the instance over ``peering``; None for a rank that keeps its own.

    ``series`` may be called from any thread, everything else from the loop's.
    """

    def __init__(
        self,
        network: Network,
        mover: ExpertMover | None = None,
        peering: TransferBackend | None = None,
    ) -> None:
        self._network = network
        self.mover = mover
        self.peering = peering

    def series(self, since: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Passes [n] from ``since`` on that are still known, and the rows [n, layers, experts] that we routed."""
        return self._network.expert_counts.series(since)

    def state(self) -> dict[str, Any]:
        """What ``ExpertMover.state`` tells; of a rank without a mover, that nothing ever moved."""
        if self.mover is not None:
            return self.mover.state()
        placement = self._network.placement
        return {
            "epoch": 0,
            "moving": False,
            "placement": placement.to_bytes(),
            "since": [0] * placement.layers,
            "staged_layers": 0,
            "moved_bytes": 0,
            "flips": 0,
            "abandoned": 0,
            "stall_s": 0.0,
            "reason": "",
            "checksums": np.full((placement.layers, placement.num_experts), UNKNOWN, np.int64),
            "expert_bytes": self._network.expert_store.expert_bytes,
        }

    def offer(self, plan: ExpertPlan) -> None:
        """Accept a plan. Raises StalePlanError or PlacementError; nothing is changed then."""
        if self.mover is None:
            raise PlacementError(
                "this rank does not move experts: set eplb.enabled = true for its pool, with ranks of at least 2"
            )
        self.mover.offer(plan)

    def stats(self) -> dict[str, Any]:
        """Counters of what moved, plain values."""
        return {} if self.mover is None else self.mover.stats()
