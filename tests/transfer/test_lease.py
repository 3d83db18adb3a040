import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from headrace.transfer.errors import InvalidRequestError
from headrace.transfer.lease import Gone, Held, LeaseTable


@pytest.fixture
def table():
    table = LeaseTable("life1")
    yield table
    table.check_integrity()


def grant(table, request_id="r1", generation=1, slot=0, now=100.0, lease_s=10.0) -> Held:
    return table.grant(request_id, generation, (1, 2), slot, now, lease_s)


def test_a_lease_is_alive_until_its_end(table):
    held = grant(table)
    assert held.expires_at == 110.0
    assert table.confirm(held.lease_id, "life1", "r1", 1, 109.9) is held
    assert isinstance(table.confirm(held.lease_id, "life1", "r1", 1, 110.0), Gone)
    assert table.held == (held,), "a confirm frees nothing"
    assert table.expire(109.9) == []
    assert table.expire(110.0) == [held]
    assert table.expire(110.0) == []
    assert table.release(held.lease_id, "life1", "r1", 1) is None


def test_release_frees_once(table):
    held = grant(table)
    assert table.release(held.lease_id, "life1", "r1", 1) is held
    assert table.release(held.lease_id, "life1", "r1", 1) is None
    assert isinstance(table.confirm(held.lease_id, "life1", "r1", 1, 101.0), Gone)
    assert table.expire(1000.0) == []
    assert (table.granted, table.released, table.expired) == (1, 1, 0)


@pytest.mark.parametrize(
    ("incarnation", "request_id", "generation", "reason"),
    [
        ("life0", "r1", 1, "life0"),
        ("life1", "r2", 1, "'r1' generation 1"),
        ("life1", "r1", 2, "'r1' generation 1"),
    ],
)
def test_a_foreign_claim_is_gone_and_frees_nothing(
    table, incarnation, request_id, generation, reason
):
    held = grant(table)
    answer = table.confirm(held.lease_id, incarnation, request_id, generation, 101.0)
    assert isinstance(answer, Gone)
    assert reason in answer.reason
    assert table.release(held.lease_id, incarnation, request_id, generation) is None
    assert table.held == (held,)


def test_a_request_is_offered_once_per_generation(table):
    grant(table)
    with pytest.raises(InvalidRequestError, match="'r1' generation 1"):
        grant(table, slot=1)
    second = grant(table, generation=2, slot=1)
    assert second.lease_id == "life1/2"


def test_revoke_frees_every_generation_of_the_request(table):
    first, second = grant(table), grant(table, generation=2, slot=1)
    other = grant(table, request_id="r2", slot=2)
    assert table.revoke("r1") == [first, second]
    assert table.revoke("r1") == []
    assert table.held == (other,)


class Leases(RuleBasedStateMachine):
    """Any order, any repetition: every lease comes back exactly once, and Gone is for ever."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable("life")
        self.now = 0.0
        self.free_slots = list(range(6))
        self.freed: set[str] = set()
        self.gone: set[str] = set()

    def take_back(self, leases: list[Held]) -> None:
        for held in leases:
            assert held.lease_id not in self.freed
            self.freed.add(held.lease_id)
            self.free_slots.append(held.slot)

    @rule(
        target=leases, request=st.integers(0, 4), generation=st.integers(0, 2), s=st.floats(0.1, 9)
    )
    def grant(self, request, generation, s):
        if not self.free_slots:
            return multiple()
        try:
            held = self.table.grant(
                f"r{request}", generation, (1,), self.free_slots[-1], self.now, s
            )
        except InvalidRequestError:
            return multiple()
        self.free_slots.pop()
        return held

    @rule(held=leases)
    def confirm(self, held):
        answer = self.table.confirm(
            held.lease_id, "life", held.request_id, held.generation, self.now
        )
        alive = held.lease_id not in self.freed and self.now < held.expires_at
        assert (answer == held) is alive
        assert isinstance(answer, Gone) is not alive
        if not alive:
            self.gone.add(held.lease_id)
        assert not (alive and held.lease_id in self.gone)

    @rule(held=leases)
    def release(self, held):
        freed = self.table.release(held.lease_id, "life", held.request_id, held.generation)
        assert (freed is None) is (held.lease_id in self.freed)
        self.take_back([freed] if freed else [])

    @rule(held=consumes(leases))
    def revoke(self, held):
        self.take_back(self.table.revoke(held.request_id))

    @rule(seconds=st.floats(0, 5))
    def sleep(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        freed = self.table.expire(self.now)
        assert all(held.expires_at <= self.now for held in freed)
        self.take_back(freed)
        assert all(held.expires_at > self.now for held in self.table.held)

    @invariant()
    def books_balance(self):
        self.table.check_integrity()
        assert len(self.free_slots) + len(self.table.held) == 6


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_leases_in_any_order = Leases.TestCase
