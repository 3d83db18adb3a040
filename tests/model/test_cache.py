"""Byte layout of the caches, and the books of the id pools."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernels.reference.storage import PLAIN, RELEASED
from headrace.model.cache import Cache, IdPool, cache_layout, default_keep
from headrace.model.config import ModelConfig, config_from_dict, load_config
from headrace.transfer.errors import IntegrityError
from headrace.transfer.plan import plan_copies

DATA = Path(__file__).parents[1] / "data"
BUNDLED = Path(__file__).parents[2] / "configs" / "checkpoints" / "tiny-v41"


@pytest.fixture
def released_config() -> ModelConfig:
    return config_from_dict(json.loads((DATA / "released_config.json").read_text()))


@pytest.fixture
def micro_config() -> ModelConfig:
    return config_from_dict(
        json.loads((DATA / "golden/v41-spec-micro/checkpoint/config.json").read_text())
    )


def test_released_cache_bytes(released_config: ModelConfig) -> None:
    layout = cache_layout(released_config, RELEASED, 128, default_keep(released_config), "f")
    assert layout.bytes_per_token == 890
    assert layout.block_bytes == 113_920
    assert layout.ring_rows == layout.keep == 140
    assert layout.slot_bytes == 43 * 140 * 528 + 3 * 7 * 2 * 512 * 4 == 3_264_576
    assert layout.handoff_bytes(131_072) == 131_072 * 890 + 3_264_576 == 119_918_656


def test_micro_cache_bytes(micro_config: ModelConfig) -> None:
    assert cache_layout(micro_config, RELEASED, 128, 20, "f").bytes_per_token == 52.5


def test_views_of_a_cache_tile_its_bytes(micro_config: ModelConfig) -> None:
    for fmt in (RELEASED, PLAIN):
        layout = cache_layout(micro_config, fmt, 16, 20, "f")
        cache = Cache(micro_config, fmt, layout, num_blocks=3, num_slots=2)
        for view in (*cache.main.values(), *cache.index.values()):
            view.add_(1)
        assert bool((cache.blocks == 1).all())
        for number, view in enumerate(cache.window):
            view.fill_(number + 1)
        for number, view in enumerate(cache.window):
            assert bool((view == number + 1).all())
        for pairs in cache.pending.values():
            pairs.fill_(1.0)
        cache.clear_slot(1)
        assert not bool(cache.slots[1].any())
        assert bool(cache.slots[0].any())


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_pool_never_loses_or_doubles_an_id(steps: list[tuple[bool, int]]) -> None:
    pool = IdPool(16, "block")
    held: list[list[int]] = []
    for take, number in steps:
        if take:
            ids = pool.try_take(number)
            assert (ids is None) == (number > 15 - sum(map(len, held)))
            if ids is not None:
                held.append(ids)
        elif held:
            pool.give(held.pop(number % len(held)))
        pool.check_integrity()
        flat = [one for ids in held for one in ids]
        assert len(set(flat)) == len(flat) == pool.in_use
        assert 0 not in flat
        assert pool.free + pool.in_use == pool.capacity == 15


def test_pool_refuses_ids_that_are_not_in_use_and_changes_nothing() -> None:
    pool = IdPool(4, "slot")
    ids = pool.try_take(2)
    assert ids is not None
    for wrong in ([3], [0], [ids[0], ids[0]], [ids[0], 9]):
        with pytest.raises(IntegrityError, match="slot ids"):
            pool.give(wrong)
    assert pool.in_use == 2
    pool.give(ids)
    with pytest.raises(IntegrityError):
        pool.give(ids)
    pool.check_integrity()


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 127, 128, 129, 1999])
def test_a_handoff_of_the_bundled_model_moves_its_tokens_and_its_slot(num_tokens: int) -> None:
    config = load_config(BUNDLED)
    layout = cache_layout(config, RELEASED, 128, default_keep(config), "f")
    assert layout.bytes_per_token == 79.5
    blocks = tuple(range(1, 1 + -(-num_tokens // 128)))
    plan = plan_copies(layout, num_tokens, blocks, 1, blocks, 1)
    entries = 53 * (num_tokens // 2 + num_tokens)
    assert plan.total_bytes == entries + layout.slot_bytes == layout.handoff_bytes(num_tokens)
    if num_tokens % 2 == 0:
        assert plan.total_bytes == num_tokens * 79.5 + layout.slot_bytes
