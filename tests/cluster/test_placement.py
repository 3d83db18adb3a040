"""Where instances go: literal nodes, literal bundles."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.cluster.config import ClusterConfig, load_cluster_config
from headrace.cluster.placement import Gang, Node, local_resources, node_list, plan_gangs
from headrace.transfer.errors import ConfigError


def config_of(tmp_path: Path, *overrides: str) -> ClusterConfig:
    return load_cluster_config("local", [f"model.checkpoint={tmp_path}", *overrides])


def node(address: str, labels: Mapping[str, str] | None = None, **resources: float) -> Node:
    return Node(address=address, resources=resources, labels=labels or {})


def message_of(config: ClusterConfig, *nodes: Node) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_gangs(config, nodes)
    return str(caught.value)


def test_one_bundle_per_rank_in_rank_order(tmp_path: Path) -> None:
    gangs = plan_gangs(config_of(tmp_path), [node("10.0.0.1", CPU=3)])
    assert gangs == (
        Gang(kind="decode", index=0, bundles=({"CPU": 1.0}, {"CPU": 1.0}), strategy="PACK"),
        Gang(kind="prefill", index=0, bundles=({"CPU": 1.0},), strategy="PACK"),
    )
    assert [gang.name for gang in gangs] == ["decode-0", "prefill-0"]


def test_too_few_cpus_say_what_is_left_for_whom(tmp_path: Path) -> None:
    assert message_of(config_of(tmp_path), node("10.0.0.1", CPU=2)) == (
        "prefill instance 0 needs 1 bundle of {CPU: 1} (PACK); there is room for 0. Left for it: 10.0.0.1 {CPU: 0}"
    )


def test_a_missing_custom_resource_is_named_with_the_command_that_adds_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "decode.placement.resources={decode: 1}")
    assert message_of(config, node("10.0.0.1", CPU=4), node("10.0.0.2", CPU=4, prefill=4)) == (
        "decode instance 0 needs 2 bundles of {CPU: 1, decode: 1} (PACK); no node offers decode: start nodes with "
        "`ray start --resources '{\"decode\": N}'`. Left for it: 10.0.0.1 {CPU: 4, decode: 0}, "
        "10.0.0.2 {CPU: 4, decode: 0}"
    )


def test_custom_resources_decide_which_nodes_count(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "prefill.placement.resources={prefill: 1}",
        "decode.placement.resources={decode: 1}",
    )
    decode, prefill = plan_gangs(config, [node("a", CPU=1, prefill=1), node("b", CPU=2, decode=2)])
    assert prefill.bundles == ({"CPU": 1.0, "prefill": 1.0},)
    assert decode.bundles == ({"CPU": 1.0, "decode": 1.0},) * 2


@pytest.mark.parametrize(
    ("strategy", "cpus", "fits"),
    [
        ("STRICT_PACK", (1, 1, 1), False),
        ("STRICT_PACK", (1, 2), True),
        ("PACK", (1, 1, 1), True),
        ("SPREAD", (3,), True),
        ("STRICT_SPREAD", (3,), False),
        ("STRICT_SPREAD", (2, 1), True),
    ],
)
def test_strategies(tmp_path: Path, strategy: str, cpus: tuple[int, ...], fits: bool) -> None:
    config = config_of(tmp_path, f"decode.placement.strategy={strategy}")
    nodes = [node(f"n{i}", CPU=count) for i, count in enumerate(cpus)]
    if fits:
        assert plan_gangs(config, nodes)[0].strategy == strategy
    else:
        assert f"({strategy})" in message_of(config, *nodes)


def test_an_instance_stays_inside_one_scale_up_domain(tmp_path: Path) -> None:
    config = config_of(tmp_path, "decode.placement.domain_label=rack", "decode.ranks=4")
    nodes = [
        node("a", CPU=4),
        node("b", {"rack": "r0"}, CPU=2),
        node("c", {"rack": "r1"}, CPU=2),
        node("d", {"rack": "r1"}, CPU=2),
    ]
    assert plan_gangs(config, nodes)[0].label_selector == {"rack": "r1"}
    assert message_of(config, *nodes[:3]) == (
        "decode instance 0 needs 4 bundles of {CPU: 1} (PACK, one rack); there is room for 2 in r0, 2 in r1. "
        "Left for it: a {CPU: 4}, b {CPU: 2}, c {CPU: 2}"
    )
    assert message_of(config, nodes[0]) == (
        "decode instance 0 needs 4 bundles of {CPU: 1} (PACK, one rack); no node has the label rack: start nodes with "
        "`ray start --labels rack=...`"
    )


def test_several_instances_do_not_share_room(tmp_path: Path) -> None:
    config = config_of(tmp_path, "decode.instances=2", "decode.placement.strategy=STRICT_PACK")
    nodes = [node("a", CPU=2), node("b", CPU=3)]
    assert [gang.name for gang in plan_gangs(config, nodes)] == [
        "decode-0",
        "decode-1",
        "prefill-0",
    ]
    assert "decode instance 1 needs 2 bundles" in message_of(
        config, node("a", CPU=3), node("b", CPU=1)
    )


def test_fractions_add_up(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, "prefill.placement.cpus=0.1", "decode.placement.cpus=0.1", "decode.ranks=2"
    )
    assert len(plan_gangs(config, [node("a", CPU=0.3)])) == 2
    assert local_resources(config) == {"CPU": pytest.approx(0.3)}


def test_no_node_at_all(tmp_path: Path) -> None:
    assert message_of(config_of(tmp_path)) == (
        "decode instance 0 needs 2 bundles of {CPU: 1} (PACK); no node offers CPU. Left for it: no node at all"
    )


def test_dead_nodes_do_not_count() -> None:
    alive = {
        "Alive": True,
        "NodeManagerAddress": "a",
        "Resources": {"CPU": 1.0},
        "Labels": {"rack": "r0"},
    }
    assert node_list([alive, {**alive, "Alive": False}]) == (node("a", {"rack": "r0"}, CPU=1.0),)
