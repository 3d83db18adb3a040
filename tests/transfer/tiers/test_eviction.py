"""Every policy names what is there, forgets what was removed, and does what its name says."""

import random

import pytest

from headrace.transfer.errors import ConfigError
from headrace.transfer.tiers.eviction import DEFAULT_POLICY, POLICIES, make_policy
from headrace.transfer.tiers.store import Policy


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def fill(policy: Policy, *numbers: int) -> None:
    for number in numbers:
        policy.insert(key(number), 1.0, 1)


def drain(policy: Policy) -> list[int]:
    """The order in which everything goes."""
    order: list[int] = []
    while (victim := policy.victim()) is not None:
        assert policy.victim() == victim, "asking changes nothing"
        policy.remove(victim)
        order.append(int.from_bytes(victim, "little"))
    return order


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_a_victim_is_always_there_and_everything_goes_once(name: str, seed: int) -> None:
    rng, policy, there = random.Random(seed), make_policy(name), set[int]()
    for number in range(400):
        if there and rng.random() < 0.5:
            policy.touch(key(rng.choice(sorted(there))))
        if there and rng.random() < 0.2:
            gone = rng.choice(sorted(there))
            policy.remove(key(gone))
            there.discard(gone)
        if len(there) >= 40:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
            there.remove(int.from_bytes(victim, "little"))
        new = number if rng.random() < 0.7 else rng.randrange(60)
        if new not in there:
            policy.insert(key(new), rng.random(), 1 + rng.randrange(3))
            there.add(new)
    policy.remove(b"unknown")
    assert sorted(drain(policy)) == sorted(there)
    assert policy.victim() is None


def test_lru_goes_by_the_last_use() -> None:
    policy = make_policy("lru")
    fill(policy, 1, 2, 3)
    policy.touch(key(1))
    assert drain(policy) == [2, 3, 1]


def test_lfu_goes_by_uses_and_old_uses_fade() -> None:
    policy = make_policy("lfu")
    fill(policy, 1, 2)
    for _ in range(5):
        policy.touch(key(1))
    assert policy.victim() == key(2)
    for number in range(3, 30):
        victim = policy.victim()
        assert victim is not None
        policy.remove(victim)
        fill(policy, number)
        policy.touch(key(number))
    assert 1 not in drain(policy), "five uses of long ago are worth less than two of now"


def test_names() -> None:
    assert DEFAULT_POLICY in POLICIES
    with pytest.raises(ConfigError, match=r"policy = 'mru' is not allowed: one of lru, lfu$"):
        make_policy("mru")
