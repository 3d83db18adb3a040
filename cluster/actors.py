"""Ray actors of the two kinds of rank: shells around RankHost, which does the work and knows no Ray.

Ray carries admission, results, health and placement; never a step. Several threads serve the calls, so that a long
``collect`` holds up nobody; the sender (``link.RankLink``) has one delivery under way at a time, which keeps its order.
"""

import os
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .config import ClusterConfig
from .placement import rank_resources
from .rank_host import RankBuilder, RankHost, RankId

_THREADS = 8


class _Shell(RankHost):
    def __init__(self, who: RankId, config: ClusterConfig, builder: RankBuilder | None) -> None:
        # Before torch and UCX read them. A runtime_env would say the same, and cost a fresh worker process.
        os.environ.update(rank_env(who, config))
        super().__init__(who, config, builder)

    def hello(self) -> tuple[int, str, str]:
        """The process is up: its id, and its node's address and id."""
        return os.getpid(), ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()


class PrefillActor(_Shell):
    """A prefill rank."""


class DecodeActor(_Shell):
    """A decode rank."""


def create_actor(
    who: RankId,
    config: ClusterConfig,
    builder: RankBuilder | None,
    group: PlacementGroup,
    name: str,
) -> Any:
    """Ask Ray for the actor of one rank, in its bundle, known in this job as ``name``; returns the handle at once."""
    actor_class, pool = (
        (PrefillActor, config.prefill) if who.kind == "prefill" else (DecodeActor, config.decode)
    )
    wanted = rank_resources(pool.placement)
    options: dict[str, Any] = {
        "num_cpus": wanted.pop("CPU", 0),
        "num_gpus": wanted.pop("GPU", 0),
        "resources": wanted,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=who.rank
        ),
        "name": name,
        "max_concurrency": _THREADS,
        "max_restarts": 0,
    }
    return ray.remote(actor_class).options(**options).remote(who, config, builder)


def rank_env(who: RankId, config: ClusterConfig) -> dict[str, str]:
    """Environment of a rank's process: as many arithmetic threads as CPUs were asked for, then the user's variables."""
    pool = config.prefill if who.kind == "prefill" else config.decode
    threads = str(max(1, int(pool.placement.cpus)))
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **config.ray.env}
