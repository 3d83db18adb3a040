import json
import subprocess
import sys

import pytest

from headrace.cluster.bench.handoff import NUM_BLOCKS, bench_layout, payload
from headrace.cluster.bench.transfer import parse_size
from headrace.transfer.errors import ConfigError


@pytest.mark.parametrize(("text", "size"), [("64K", 65_536), ("4M", 4_194_304), ("1000", 1000)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "4G", "1.5M", "4m", "900M"])
def test_other_sizes_are_refused_with_what_is_allowed(text):
    with pytest.raises(ConfigError, match="64K or 4M"):
        parse_size(text)


@pytest.mark.parametrize("size", [1, 113_920, 113_921, 64 << 20])
@pytest.mark.parametrize("turn", [0, 1, 57])
def test_a_payload_is_scattered_blocks_inside_the_arena(size, turn):
    copies = payload(size, turn)
    end = NUM_BLOCKS * bench_layout().block_bytes
    assert sum(copy.num_bytes for copy in copies) == size
    assert len({copy.target_offset for copy in copies}) == len(copies)
    for copy in copies:
        assert 0 <= copy.source_offset <= end - copy.num_bytes
        assert 0 <= copy.target_offset <= end - copy.num_bytes


def test_the_command_prints_one_document():
    command = [sys.executable, "-m", "headrace.cluster.cli", "bench", "transfer"]
    options = ["--json", "--sizes", "64K", "1M", "--repeats", "1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"environment", "results"}
    assert [row["bytes"] for row in document["results"]] == [65_536, 1_048_576]
    for row in document["results"]:
        for name in (
            "nixl_gb_per_s",
            "memcpy_gb_per_s",
            "ray_object_store_gb_per_s",
            "checksum_gb_per_s",
            "nixl_over_memcpy",
            "nixl_over_ray_object_store",
            "fixed_cost_ms",
        ):
            assert row[name] > 0, name
        assert row["best"]["nixl_gb_per_s"] >= row["nixl_gb_per_s"]
