"""Where the instances go: from a configuration and what the nodes offer to bundles. Pure.

One instance is one gang: a placement group with one bundle per rank, bundle r for rank r. The decision checks that the
nodes can hold every gang at all, and chooses the scale-up domain where one is asked for; which nodes of it serve is
Ray's choice, made when the group is created.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..transfer.errors import ConfigError
from .config import ClusterConfig, PlacementSection, PoolConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the Ray cluster: all that it offers, free or not."""

    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """One instance's placement group. ``label_selector`` holds for every bundle; empty selects every node."""

    kind: str
    index: int
    bundles: tuple[Mapping[str, float], ...]
    strategy: str
    label_selector: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """Name of the instance: ``prefill-0``."""
        return f"{self.kind}-{self.index}"


def rank_resources(placement: PlacementSection) -> dict[str, float]:
    """What one rank asks Ray for, zeros left out."""
    wanted = {"CPU": placement.cpus, "GPU": placement.gpus, **placement.resources}
    return {name: amount for name, amount in wanted.items() if amount}


def local_resources(config: ClusterConfig) -> dict[str, float]:
    """What a node must offer to hold every rank: the sum over both pools."""
    total: dict[str, float] = {}
    for _, pool in _pools(config):
        for name, amount in rank_resources(pool.placement).items():
            total[name] = total.get(name, 0.0) + amount * pool.instances * pool.ranks
    return total


def plan_gangs(config: ClusterConfig, nodes: Sequence[Node]) -> tuple[Gang, ...]:
    """A gang per instance, in the order in which they should be placed: the largest first, since it fits worst.

    Raises ConfigError that says what is missing where.
    """
    free = [dict(node.resources) for node in nodes]
    wanted = [
        (kind, index, pool) for kind, pool in _pools(config) for index in range(pool.instances)
    ]
    wanted.sort(key=lambda each: each[2].ranks, reverse=True)
    return tuple(_plan_gang(kind, index, pool, nodes, free) for kind, index, pool in wanted)


def _pools(config: ClusterConfig) -> tuple[tuple[str, PoolConfig], ...]:
    return ("prefill", config.prefill), ("decode", config.decode)


def _plan_gang(
    kind: str, index: int, pool: PoolConfig, nodes: Sequence[Node], free: list[dict[str, float]]
) -> Gang:
    """One gang; what it takes is subtracted from ``free``."""
    bundle = rank_resources(pool.placement)
    strategy = pool.placement.strategy
    room: dict[str, int] = {}
    for domain, members in _domains(pool.placement.domain_label, nodes).items():
        fits = {i: _count_fits(bundle, free[i]) for i in members}
        shares = _share_out(pool.ranks, strategy, fits)
        if sum(shares.values()) == pool.ranks:
            for i, count in shares.items():
                for name, amount in bundle.items():
                    free[i][name] = free[i].get(name, 0.0) - amount * count
            selector = {pool.placement.domain_label: domain} if pool.placement.domain_label else {}
            bundles = tuple(dict(bundle) for _ in range(pool.ranks))
            return Gang(
                kind=kind, index=index, bundles=bundles, strategy=strategy, label_selector=selector
            )
        room[domain] = sum(shares.values())
    raise ConfigError(_why_not(kind, index, pool, bundle, room, nodes, free))


def _domains(label: str | None, nodes: Sequence[Node]) -> dict[str, list[int]]:
    """Domain -> its nodes, in the nodes' order; without a label all nodes are one domain."""
    domains: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        if label is None:
            domains.setdefault("", []).append(i)
        elif label in node.labels:
            domains.setdefault(node.labels[label], []).append(i)
    return domains


def _count_fits(bundle: Mapping[str, float], free: Mapping[str, float]) -> int:
    """How many bundles fit; the small term forgives sums of fractions such as 3 x 0.1."""
    return min(int(free.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items())


def _share_out(num: int, strategy: str, fits: Mapping[int, int]) -> dict[int, int]:
    """Bundles per node for as many of ``num`` as the strategy allows; full nodes are filled first."""
    fullest_last = sorted(fits, key=lambda i: fits[i])
    if strategy == "STRICT_PACK":
        for i in fullest_last:
            if fits[i] >= num:
                return {i: num}
        return {i: fits[i] for i in fullest_last[-1:]}
    limit = 1 if strategy == "STRICT_SPREAD" else num
    shares: dict[int, int] = {}
    for i in fullest_last:
        shares[i] = min(fits[i], limit, num - sum(shares.values()))
    return shares


def _why_not(
    kind: str,
    index: int,
    pool: PoolConfig,
    bundle: Mapping[str, float],
    room: Mapping[str, int],
    nodes: Sequence[Node],
    free: Sequence[Mapping[str, float]],
) -> str:
    plural = "bundle" if pool.ranks == 1 else "bundles"
    label = pool.placement.domain_label
    text = f"{kind} instance {index} needs {pool.ranks} {plural} of {_amounts(bundle)} ({pool.placement.strategy}"
    text += f", one {label})" if label else ")"
    if label and not room:
        return f"{text}; no node has the label {label}: start nodes with `ray start --labels {label}=...`"
    absent = [name for name in bundle if not any(node.resources.get(name) for node in nodes)]
    if absent:
        text += f"; no node offers {' or '.join(absent)}"
        if absent[0] not in ("CPU", "GPU"):
            text += f": start nodes with `ray start --resources '{{\"{absent[0]}\": N}}'`"
    elif label:
        text += "; there is room for " + ", ".join(
            f"{count} in {domain}" for domain, count in room.items()
        )
    else:
        text += f"; there is room for {sum(room.values())}"
    left = ", ".join(
        f"{node.address} {_amounts({name: here.get(name, 0.0) for name in bundle})}"
        for node, here in zip(nodes[:8], free, strict=False)
    )
    more = f" and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    return f"{text}. Left for it: {left or 'no node at all'}{more}"


def _amounts(resources: Mapping[str, float]) -> str:
    return "{" + ", ".join(_amount(item) for item in resources.items()) + "}"


def _amount(item: tuple[str, float]) -> str:
    return f"{item[0]}: {item[1]:g}"


def node_list(nodes: Iterable[Mapping[str, object]]) -> tuple[Node, ...]:
    """The alive nodes among what ``ray.nodes()`` returns."""
    found: list[Node] = []
    for node in nodes:
        if node["Alive"]:
            resources, labels = node["Resources"], node.get("Labels") or {}
            assert isinstance(resources, dict)
            assert isinstance(labels, dict)
            found.append(
                Node(address=str(node["NodeManagerAddress"]), resources=resources, labels=labels)
            )
    return tuple(found)
