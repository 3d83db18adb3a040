"""Deployment files: what they become, and how each mistake reads."""

from pathlib import Path

import pytest
import yaml

from headrace.cluster.config import PACKAGE_ROOT, ClusterConfig, checkpoint_dir, load_cluster_config
from headrace.cluster.strict import build_section, plain
from headrace.transfer.errors import ConfigError

MINIMAL = """
model: {checkpoint: model}
prefill: {num_blocks: 16, num_slots: 4}
decode: {ranks: 2, num_blocks: 32, num_slots: 8}
"""

DECODE_KEYS = (
    "confirm_timeout_s, eplb, experts, grammar, host_cache_mib, instances, max_batch, num_blocks, num_slots, "
    "num_tails, overlap, placement, profile_s, ranks, recompute_tokens, rendezvous_port, speculation, tail_tokens, "
    "transfer_timeout_s"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    path = tmp_path / "deployment.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def message_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_cluster_config(file, overrides)
    return str(caught.value).removeprefix(f"{file}: ")


def test_defaults_are_filled_in_and_the_result_loads_again(file: Path) -> None:
    config = load_cluster_config(file)
    assert (config.prefill.instances, config.prefill.ranks, config.decode.ranks) == (1, 1, 2)
    assert config.num_ranks == 3
    assert config.split == "classic"
    assert config.decode.max_batch == 64
    assert build_section(ClusterConfig, yaml.safe_load(config.resolved())) == config
    assert build_section(ClusterConfig, plain(config)) == config


def test_a_checkpoint_beside_the_file_becomes_absolute(file: Path) -> None:
    config = load_cluster_config(file)
    assert config.model.checkpoint == str(file.parent / "model")
    assert checkpoint_dir(config) == file.parent / "model"


def test_a_packaged_checkpoint_stays_relative_because_nodes_install_elsewhere(file: Path) -> None:
    config = load_cluster_config(file, ["model.checkpoint=."])
    assert config.model.checkpoint == str(file.parent)
    config = load_cluster_config("local", ["model.checkpoint=."])
    assert config.model.checkpoint == "."
    assert checkpoint_dir(config) == PACKAGE_ROOT / "configs"


def test_overrides_are_yaml_and_come_before_the_checks(file: Path) -> None:
    config = load_cluster_config(
        file, ["decode.ranks=4", "prefill.placement.resources={prefill: 0.5}", "split=classic"]
    )
    assert config.decode.ranks == 4
    assert config.prefill.placement.resources == {"prefill": 0.5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "decode.rank=2",
            f"decode.rank is not a known key: the nearest key is decode.ranks; allowed are {DECODE_KEYS}",
        ),
        (
            "ray.local.num_cpu=2",
            (
                "ray.local.num_cpu is not a known key: the nearest key is ray.local.num_cpus; "
                "allowed are num_cpus, object_store_mib"
            ),
        ),
        ("decode.ranks=two", "decode.ranks = 'two' is not allowed: an integer"),
        ("decode.ranks=2.0", "decode.ranks = 2.0 is not allowed: an integer"),
        ("decode.ranks=true", "decode.ranks = True is not allowed: an integer"),
        ("decode.ranks=0", "decode.ranks = 0 is not allowed: an integer of at least 1"),
        ("decode.max_batch=0", "decode.max_batch = 0 is not allowed: an integer of at least 1"),
        ("model.numerics=fp8", "model.numerics = 'fp8' is not allowed: one of released, plain"),
        ("model.keep=many", "model.keep = 'many' is not allowed: an integer or null"),
        (
            "model.block_tokens=7",
            "model.block_tokens = 7 is not allowed: an even integer of at least 2",
        ),
        ("split=seams", "split = 'seams' is not allowed: one of classic, seam"),
        (
            "transfer.backend=loopback",
            (
                "transfer.backend = 'loopback' is not allowed: nixl (loopback joins ranks of one process; "
                "the ranks of a Ray cluster are processes)"
            ),
        ),
        (
            "prefill.placement.resources={prefill: 0}",
            "prefill.placement.resources.prefill = 0.0 is not allowed: a number above 0",
        ),
        (
            "prefill.placement.resources={GPU: 1}",
            "prefill.placement.resources.GPU is not a custom resource: use cpus or gpus",
        ),
        (
            "prefill.placement.strategy=SPREAD_OUT",
            "prefill.placement.strategy = 'SPREAD_OUT' is not allowed: one of STRICT_PACK, PACK, SPREAD, STRICT_SPREAD",
        ),
        ("timeouts.load_s=0", "timeouts.load_s = 0.0 is not allowed: a number above 0"),
        ("prefill=3", "prefill = 3 is not allowed: a mapping of keys"),
        (
            "model.checkpoint=nowhere",
            (
                "model.checkpoint = 'nowhere' is not a directory beside the file or in the packaged configs; "
                "give an absolute path, or one relative to the file"
            ),
        ),
        ("decode.ranks", "override 'decode.ranks' is not allowed: dotted.key=value"),
        ("decode.ranks.x=1", "override 'decode.ranks.x=1' is not allowed: ranks holds 2"),
    ],
)
def test_a_mistake_names_path_value_and_what_is_allowed(
    file: Path, override: str, message: str
) -> None:
    assert message_of(file, override) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {checkpoint: model}\nmodel: {}\n",
            "line 2: key 'model' is written twice; keep one of them",
        ),
        ("- a\n", "holds list, not a mapping of keys"),
        (
            MINIMAL.replace("num_slots: 8", "slots: 8"),
            f"decode.slots is not a known key: the nearest key is decode.num_slots; allowed are {DECODE_KEYS}",
        ),
        (MINIMAL.replace(", num_slots: 8", ""), "decode.num_slots is missing: an integer"),
    ],
)
def test_a_broken_file_says_where(file: Path, text: str, message: str) -> None:
    file.write_text(text, encoding="utf-8")
    assert message_of(file) == message


def test_bad_yaml_is_a_config_error(file: Path) -> None:
    file.write_text("model: [", encoding="utf-8")
    assert message_of(file).startswith("not valid YAML: ")


def test_an_unknown_file_lists_the_packaged_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^nowhere is not a file; the packaged configurations are local, local_ep4, p4_d64$",
    ):
        load_cluster_config("nowhere")


@pytest.mark.parametrize(
    ("name", "ranks"), [("local", 3), ("p4_d64", 68), ("configs/local.yaml", 3)]
)
def test_packaged_configurations_load(name: str, ranks: int, tmp_path: Path) -> None:
    assert load_cluster_config(name, [f"model.checkpoint={tmp_path}"]).num_ranks == ranks
