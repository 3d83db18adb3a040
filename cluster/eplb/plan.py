"""The rebalancing plan of one instance: which experts get copies, and where every copy lies.

The aim is the lowest sum over steps of the busiest rank's rows, because a step takes as long as its busiest rank
(spec/engine.md 2.4 and 2.8). Layers are independent; threads take one after the other, as compiled code holds no lock.
"""

import functools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...transfer.errors import ConfigError
from .bound import layer_bound
from .measure import balance, check_rows, moved_slots, peak_over_mean
from .search import LayerSearch, Task

__all__ = ["PlanLimits", "Planned", "balance", "make_plan", "peak_over_mean", "warm_up"]

_MARGIN = 0.85
"""Part of the deadline that searches may use; the rest is for the start, the bound and the report."""
_STANDARD_WORK = 40 * (49 + 8) * (112 + 64)
"""Work of a try that one second is enough for on two cores: layers x swaps of two ranks x steps, with what is fixed."""
_MOST_EFFORT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """What a plan has to keep to.

    ``slots_per_rank`` is per layer. ``ranks_per_domain`` names the size of a scale-up domain: copies of an expert are
    then spread over domains where that costs little balance, so that more rows could find a copy at home; None takes
    all ranks as one domain. ``deadline_s`` bounds the search: what is best by then is returned; it also sets how many
    tries are made. ``move_cost`` is in rows: filling one slot must lower the sum over the given steps of the busiest
    rank's rows by more than that.
    """

    ranks: int
    slots_per_rank: int
    ranks_per_domain: int | None = None
    deadline_s: float = 1.0
    move_cost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ranks", "slots_per_rank", "ranks_per_domain"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("deadline_s", "move_cost"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be 0 or more, and finite"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """A plan.

    ``slots`` int32 [layers, ranks, slots_per_rank] holds experts, -1 for an empty slot. ``peak_over_mean`` is the sum
    of per-step peaks over the sum of means on the given rows, ``bound`` a proven lower bound of it for any plan,
    ``moved`` how many slots have to be filled (all without a present placement), ``seconds`` the time it took.
    """

    slots: NDArray[np.int32]
    peak_over_mean: float
    bound: float
    moved: int
    seconds: float


@functools.cache
def warm_up() -> None:
    """Compiles the kernels, or loads them from the cache, once a process: no plan's deadline pays for it."""
    rows = np.random.default_rng(0).integers(1, 9, (3, 1, 4)).astype(np.float64)
    task = Task(
        ranks=2,
        slots_per_rank=3,
        ranks_per_domain=1,
        move_cost=0.0,
        effort=0.01,
        until=float("inf"),
    )
    _search_layer(LayerSearch(rows[:, 0], task, None, 0))
    layer_bound(rows[:, 0], 2, 3)


def make_plan(
    rows: NDArray[np.generic], limits: PlanLimits, present: NDArray[np.integer] | None = None
) -> Planned:
    """The best placement found for ``rows`` by the deadline.

    Args:
        rows: [steps, layers, experts], rows of each expert; usually what ``forecast`` expects.
        limits: ranks, slots, deadline, price of a move.
        present: [layers, ranks, slots_per_rank], the placement in force. With a ``move_cost`` the search starts from it
            and changes what pays; slots whose expert stays keep it in place.

    Raises:
        ConfigError: rows are no counts, the slots cannot hold the experts, or ``present`` is for other rows or ranks.
    """
    warm_up()
    began = time.perf_counter()
    values = check_rows(rows)
    _, layers, experts = values.shape
    shape = layers, limits.ranks, limits.slots_per_rank
    if limits.ranks * limits.slots_per_rank < experts:
        raise ConfigError(
            f"{limits.ranks} ranks x {limits.slots_per_rank} slots cannot hold {experts} experts; add slots"
        )
    now = None if present is None else _checked(present, shape, experts)
    width = -(-values.shape[0] // 16) * 16
    work = layers * (limits.slots_per_rank**2 + 8) * (width + 64)
    task = Task(
        ranks=limits.ranks,
        slots_per_rank=limits.slots_per_rank,
        ranks_per_domain=limits.ranks_per_domain or limits.ranks,
        move_cost=limits.move_cost,
        effort=min(_MOST_EFFORT, limits.deadline_s * _STANDARD_WORK / work),
        until=began + _MARGIN * limits.deadline_s,
    )
    searches = [
        LayerSearch(values[:, layer], task, None if now is None else now[layer], layer)
        for layer in range(layers)
    ]
    with ThreadPoolExecutor(min(layers, os.cpu_count() or 1)) as pool:
        bounds = [
            pool.submit(layer_bound, values[:, layer], limits.ranks, limits.slots_per_rank)
            for layer in range(layers)
        ]
        list(pool.map(LayerSearch.start, searches))
        while any(list(pool.map(LayerSearch.go_on, searches))):  # every search, not up to the first
            pass
        least = sum(bound.result() for bound in bounds)
    slots = np.stack([search.best for search in searches])
    if now is not None:
        slots = _aligned(slots, now)
    mean = float(values.sum()) / limits.ranks
    return Planned(
        slots=slots,
        peak_over_mean=peak_over_mean(values, slots),
        bound=least / mean if mean > 0 else 1.0,
        moved=int((slots >= 0).sum()) if now is None else moved_slots(slots, now),
        seconds=time.perf_counter() - began,
    )


def _search_layer(search: LayerSearch) -> None:
    search.start()
    while search.go_on():
        pass


def _checked(
    present: NDArray[np.integer], shape: tuple[int, int, int], experts: int
) -> NDArray[np.int32]:
    if present.shape != shape:
        raise ConfigError(
            f"the present placement has shape {list(present.shape)}; rows and limits need {list(shape)}"
        )
    if present.min() < -1 or present.max() >= experts:
        raise ConfigError(f"the present placement names experts outside 0..{experts - 1}")
    for layer in range(shape[0]):
        held = np.sort(present[layer], axis=1)
        if ((held[:, 1:] == held[:, :-1]) & (held[:, 1:] >= 0)).any():
            raise ConfigError(
                f"the present placement has an expert twice on a rank in layer {layer}"
            )
        if np.unique(held[held >= 0]).size < experts:
            raise ConfigError(f"the present placement lacks an expert in layer {layer}")
    return present.astype(np.int32)


def _aligned(slots: NDArray[np.int32], present: NDArray[np.int32]) -> NDArray[np.int32]:
    """``slots`` in an order within every rank that leaves what stays where it is."""
    out = np.full_like(slots, -1)
    for layer, rank in np.ndindex(slots.shape[:2]):
        new, old = slots[layer, rank].tolist(), present[layer, rank].tolist()
        row = [e if e >= 0 and e in new else -1 for e in old]
        coming = [e for e in new if e >= 0 and e not in row]
        out[layer, rank] = [e if e >= 0 or not coming else coming.pop(0) for e in row]
    return out
