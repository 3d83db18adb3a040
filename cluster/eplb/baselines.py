"""The two published algorithms that the planner is measured against, written from their descriptions.

Both ignore the present placement. Neither forbids two copies of one expert on a rank, and so a plan of theirs may hold
such a pair; it is measured as it stands. Shapes as in ``measure``.
"""

import numpy as np
from numpy.typing import NDArray

from ...transfer.errors import ConfigError

__all__ = ["contiguous", "deepinfer", "deepseek"]

Slots = NDArray[np.int32]


def contiguous(layers: int, experts: int, ranks: int, slots_per_rank: int) -> Slots:
    """No plan at all: experts in their order, spare slots filled with experts 0, 1, 2 ... on ranks that lack them."""
    slots = np.full((ranks, slots_per_rank), -1, np.int32)
    used = [0] * ranks
    for e in range(experts):
        rank = e * ranks // experts
        slots[rank, used[rank]] = e
        used[rank] += 1
    e = 0
    for rank in range(ranks):
        while used[rank] < min(slots_per_rank, experts):
            if e % experts not in slots[rank]:
                slots[rank, used[rank]] = e % experts
                used[rank] += 1
            e += 1
    return np.repeat(slots[None], layers, 0)


def deepseek(
    rows: NDArray[np.generic],
    ranks: int,
    slots_per_rank: int,
    *,
    domains: int = 1,
    groups: int = 0,
) -> Slots:
    """DeepSeek's public EPLB on the rows summed over the steps.

    Global (``domains`` 1): each spare slot goes to the expert with the highest load per copy; the copies are packed
    heaviest first onto the least loaded rank with room. Hierarchical: groups of neighbouring experts are packed onto
    domains first, then every domain copies and packs its own experts; it needs ``groups`` (0: one an expert)
    and the ranks to divide by ``domains``.
    """
    total = rows.sum(0).astype(np.float64)
    layers, experts = total.shape
    if domains == 1:
        return _copy_and_pack(total, ranks, slots_per_rank)
    groups = groups or experts
    if groups % domains or ranks % domains or experts % groups:
        raise ConfigError(
            f"{experts} experts in {groups} groups on {ranks} ranks do not divide over {domains} domains"
        )
    size = experts // groups
    grouped = total.reshape(layers, groups, size)
    home = _pack(grouped.sum(2), domains, groups // domains)  # [L, D, groups of a domain]
    layer = np.arange(layers)[:, None]
    found: list[Slots] = []
    for domain in range(domains):
        mine = (home[:, domain, :, None] * size + np.arange(size)).reshape(layers, -1)
        local = _copy_and_pack(total[layer, mine], ranks // domains, slots_per_rank)
        found.append(mine[layer[..., None], local].astype(np.int32))
    return np.concatenate(found, 1)


def _copy_and_pack(total: NDArray[np.float64], ranks: int, slots_per_rank: int) -> Slots:
    layers, experts = total.shape
    layer = np.arange(layers)
    copies = np.ones((layers, experts))
    owner = np.empty((layers, ranks * slots_per_rank), np.int64)
    owner[:, :experts] = np.arange(experts)
    for slot in range(experts, ranks * slots_per_rank):
        chosen = (total / copies).argmax(1)
        copies[layer, chosen] += 1
        owner[:, slot] = chosen
    load = np.take_along_axis(total / copies, owner, 1)
    packed = _pack(load, ranks, slots_per_rank)
    return (
        np.take_along_axis(owner, packed.reshape(layers, -1), 1)
        .reshape(packed.shape)
        .astype(np.int32)
    )


def _pack(load: NDArray[np.float64], bins: int, room: int) -> NDArray[np.int64]:
    """Items heaviest first, each into the least loaded bin with room: [L, bins, room] of item numbers."""
    layers, items = load.shape
    layer = np.arange(layers)
    order = (-load).argsort(1, kind="stable")
    packed = np.full((layers, bins, room), -1, np.int64)
    filled = np.zeros((layers, bins), np.int64)
    weight = np.zeros((layers, bins))
    for i in range(items):
        item = order[:, i]
        chosen = np.where(filled < room, weight, np.inf).argmin(1)
        packed[layer, chosen, filled[layer, chosen]] = item
        filled[layer, chosen] += 1
        weight[layer, chosen] += load[layer, item]
    return packed


def deepinfer(rows: NDArray[np.generic], ranks: int, slots_per_rank: int) -> Slots:
    """DeepInfer's greedy (spec/engine.md 2.4) on the series of steps.

    Each spare slot goes to the expert whose extra copy lowers ``sum over steps of max over experts (rows / copies)``
    most. Copies by falling sum go to the rank with room that keeps ``sum over steps of max over ranks`` lowest.
    """
    _, layers, experts = rows.shape
    series = rows.astype(np.float64)
    slots = np.empty((layers, ranks, slots_per_rank), np.int32)
    for layer in range(layers):
        copies = _copies_by_peak(series[:, layer], ranks * slots_per_rank - experts)
        slots[layer] = _place_by_peak(series[:, layer] / copies, copies, ranks, slots_per_rank)
    return slots


def _copies_by_peak(x: NDArray[np.float64], spare: int) -> NDArray[np.int64]:
    steps, experts = x.shape
    copies = np.ones(experts, np.int64)
    step = np.arange(steps)
    for _ in range(spare):
        share = x / copies
        first = share.argmax(1)
        peak = share[step, first].copy()
        share[step, first] = -1.0
        second = share.max(1)
        # only an expert that is the peak of a step can lower that step
        lowered = peak - np.maximum(second, x[step, first] / (copies[first] + 1))
        gain = np.bincount(first, lowered, experts)
        copies[gain.argmax()] += 1
    return copies


def _place_by_peak(
    share: NDArray[np.float64], copies: NDArray[np.int64], ranks: int, slots_per_rank: int
) -> Slots:
    owner = np.repeat(np.arange(copies.size), copies)
    order = owner[(-share.sum(0)[owner]).argsort(kind="stable")]
    load = np.zeros((ranks, share.shape[0]))
    peak = np.zeros(share.shape[0])
    filled = np.zeros(ranks, np.int64)
    slots = np.full((ranks, slots_per_rank), -1, np.int32)
    columns = np.ascontiguousarray(share.T)
    for e in order:
        cost = np.maximum(load + columns[e], peak).sum(1)
        cost[filled >= slots_per_rank] = np.inf
        rank = int(cost.argmin())
        slots[rank, filled[rank]] = e
        filled[rank] += 1
        load[rank] += columns[e]
        np.maximum(peak, load[rank], out=peak)
    return slots
