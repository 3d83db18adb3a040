"""The pool of blocks that remembers prefixes, against a naive one; and the keys that name them."""

import random
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.prefill.prefix import PrefixPool
from headrace.tests.transfer.layouts import SMALL
from headrace.transfer.errors import IntegrityError
from headrace.transfer.tiers.keys import KEY_BYTES, block_keys, root_key

ROOT = root_key(SMALL, replay="exact")


def test_a_published_block_is_found_after_its_owner_has_gone_and_until_memory_is_wanted() -> None:
    pool, keys = PrefixPool(4, "block"), block_keys(ROOT, range(6), 2)
    blocks = pool.try_take(3)
    assert blocks is not None
    assert pool.found(keys) == []
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    assert pool.found(keys) == blocks
    pool.give(blocks)
    assert (pool.free, pool.num_cached) == (3, 3)
    pool.own(pool.found(keys[:1]))
    assert (pool.free, pool.num_cached) == (2, 2)
    assert pool.try_take(3) is None
    (taken,) = pool.try_take(1) or []
    assert taken == blocks[2], "the last block of a prompt goes first"
    assert pool.found(keys) == blocks[:2]
    pool.check_owned([blocks[0], taken])


def test_several_owners_share_a_block_and_equal_content_is_found_once() -> None:
    pool, keys = PrefixPool(5, "block"), block_keys(ROOT, range(2), 2)
    first, second = pool.try_take(1) or [], pool.try_take(1) or []
    pool.publish(first[0], keys[0])
    pool.publish(second[0], keys[0])
    assert pool.found(keys) == first
    pool.own(first)
    assert pool.shared([*first, *second]) == set(first)
    pool.give(first)
    assert pool.found(keys) == first and pool.num_cached == 0
    pool.give(first)
    pool.give(second)
    assert (pool.num_cached, pool.free) == (1, 4)
    pool.forget()
    assert pool.found(keys) == [] and pool.free == 4
    pool.check_owned([])


def test_wrong_ids_are_refused_and_change_nothing() -> None:
    pool = PrefixPool(4, "block")
    (block,) = pool.try_take(1) or []
    for wrong in ([0], [block, block], [block, 3]):
        with pytest.raises(IntegrityError, match="were given back but are not in use"):
            pool.give(wrong)
    with pytest.raises(IntegrityError, match="was published but belongs to nobody"):
        pool.publish(3, b"key")
    with pytest.raises(IntegrityError, match="has 1 owners, 0 are known"):
        pool.check_owned([])
    pool.check_owned([block])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 9))
def test_any_course_keeps_the_books_and_never_gives_away_what_is_owned(
    seed: int, num_blocks: int
) -> None:
    """Prompts over an alphabet of two find, compute, publish and give; contents are checked against their keys."""
    rng, pool = random.Random(seed), PrefixPool(num_blocks, "block")
    content: dict[int, bytes | None] = {}
    running: dict[int, tuple[list[int], list[bytes]]] = {}
    for number, _ in zip(count(), range(60), strict=False):
        keys = block_keys(ROOT, [rng.randrange(2) for _ in range(rng.randrange(9))], 2)
        found = pool.found(keys)
        assert [content[block] for block in found] == keys[: len(found)]
        more = len(keys) - len(found)
        fits = more <= pool.free - pool.num_unowned(found)
        if rng.random() < 0.6 and fits:
            pool.own(found)
            taken = pool.try_take(more)
            assert taken is not None
            owned = {block for blocks, _ in running.values() for block in blocks}
            assert not owned & set(taken) and not set(found) & set(taken)
            content.update(dict.fromkeys(taken))
            running[number] = (found + taken, keys)
        elif running:
            name = rng.choice(list(running))
            blocks, wanted = running[name]
            done = len(blocks) if rng.random() < 0.7 else rng.randrange(len(blocks) + 1)
            for block, key in zip(blocks[:done], wanted, strict=False):
                pool.publish(block, key)
                content[block] = content[block] or key
            if rng.random() < 0.6:
                pool.give(blocks)
                del running[name]
        pool.check_owned([block for blocks, _ in running.values() for block in blocks])
    for blocks, _ in running.values():
        pool.give(blocks)
    pool.check_owned([])
    assert pool.free == pool.capacity


@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.integers(0, 2), max_size=12),
    st.integers(1, 3),
)
def test_equal_keys_are_equal_prefixes(left: list[int], right: list[int], size: int) -> None:
    keys = block_keys(ROOT, left, size), block_keys(ROOT, right, size)
    assert [len(each) for each in keys] == [len(left) // size, len(right) // size]
    for n, (a, b) in enumerate(zip(*keys, strict=False), start=1):
        assert (a == b) == (left[: n * size] == right[: n * size])


def test_keys_depend_on_model_format_block_replay_and_salt() -> None:
    roots = {
        ROOT,
        root_key(SMALL, replay="window"),
        root_key(SMALL, replay="exact", salt="tenant"),
        root_key(SMALL, replay="exactt", salt="enant"),
        root_key(replace(SMALL, model_fingerprint="other"), replay="exact"),
        root_key(replace(SMALL, kv_format="plain2"), replay="exact"),
    }
    assert len(roots) == 6
    keys = {block_keys(root, range(8), 8)[0] for root in roots}
    assert len(keys) == 6 and {len(key) for key in keys} == {KEY_BYTES}
