"""Experts move between real ranks while these answer: no token changes, and what goes wrong is given up or ends all."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.cluster.rank_loop import RankLoop
from headrace.decode.events import Tokens
from headrace.model.expert_store import ExpertStore
from headrace.model.network import Network
from headrace.model.placement import ExpertPlacement
from headrace.model.rebalance import ExpertMover
from headrace.prefill.events import Offered
from headrace.tests.cluster.moving_instance import WAIT_S, Breakage, Instance, start_instance
from headrace.tests.pools import Pool, start_pool
from headrace.transfer.errors import RankError
from headrace.transfer.loopback import LoopbackBackend, LoopbackHub, LoopbackRead
from headrace.transfer.messages import Handoff
from headrace.transfer.plan import Copy
from headrace.transfer.request import Request, SamplingParams

END_S = 10.0
"""Within this time every rank learns that one is dead."""
Answers = dict[str, tuple[int, ...]]


def requests() -> list[Request]:
    """Prompts of random ids; every other one is sampled with its own seed."""
    draw = random.Random(20261203)
    found: list[Request] = []
    for number, length in enumerate((3, 33, 64, 130, 40, 5)):
        sampling = SamplingParams(
            max_tokens=140,
            temperature=0.9 if number % 2 else 0.0,
            top_p=0.95 if number % 4 == 1 else 1.0,
            seed=number,
            ignore_eos=True,
        )
        ids = (0, *(draw.randrange(3, 4000) for _ in range(length - 1)))
        found.append(Request(request_id=f"r{number}", prompt_ids=ids, sampling=sampling))
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def caches() -> LoopbackHub:
    return LoopbackHub()


@pytest.fixture(scope="module")
def prefill(caches: LoopbackHub) -> Iterator[Pool]:
    pool = start_pool("prefill", 1, 64, lambda name, arenas: LoopbackBackend(caches, name, arenas))
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def expected(caches: LoopbackHub, prefill: Pool) -> Answers:
    """The tokens of two ranks whose experts stay where they are."""
    instance = start_instance(2, caches, overlap=True)
    answers = answer(instance, prefill)
    assert all(state["flips"] == 0 for state in instance.states())
    instance.pool.stop()
    return answers


def handoffs(prefill: Pool, asked: Sequence[Request]) -> list[Handoff]:
    """Of every request, in order."""
    prefill.loops[0].submit_many([(request,) for request in asked])
    found: dict[str, Handoff] = {}
    deadline = time.monotonic() + WAIT_S
    while len(found) < len(asked):
        assert time.monotonic() < deadline
        for event in prefill.loops[0].collect(0.1):
            assert isinstance(event, Offered), event
            found[event.request_id] = event.handoff
    return [found[request.request_id] for request in asked]


def answer(
    instance: Instance,
    prefill: Pool,
    meanwhile: Callable[[Answers], None] = lambda answers: None,
    answers: Answers | None = None,
) -> Answers:
    """What all requests get, spread over the ranks; ``meanwhile`` is called again and again with what they have."""
    asked, loops = requests(), instance.pool.loops
    instance.pool.connect(prefill)
    prefill.connect(instance.pool)
    answers = {} if answers is None else answers
    answers.update((request.request_id, ()) for request in asked)
    for number, item in enumerate(zip(asked, handoffs(prefill, asked), strict=True)):
        loops[number % len(loops)].submit_many([item])
    unfinished = set(answers)
    deadline = time.monotonic() + WAIT_S
    while unfinished:
        assert time.monotonic() < deadline, f"unanswered: {sorted(unfinished)}"
        for loop in loops:
            for event in loop.collect(0.001):
                assert isinstance(event, Tokens), event
                answers[event.request_id] += event.ids
                if event.finish_reason is not None:
                    unfinished.discard(event.request_id)
        meanwhile(answers)
    return answers


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_no_token_changes_while_plans_follow_each_other(
    size: int, overlap: bool, caches: LoopbackHub, prefill: Pool, expected: Answers
) -> None:
    instance = start_instance(size, caches, overlap=overlap)
    epoch = 0
    flips: list[int] = []
    """That had run when there were more tokens than before."""
    num_tokens = 0

    def move(answers: Answers) -> None:
        nonlocal epoch, num_tokens
        state = instance.ask(0, ExpertMover.state)
        found = sum(map(len, answers.values()))
        if found > num_tokens:
            num_tokens = found
            flips.append(state["flips"])
        overtaken = epoch % 3 == 2 and state["staged_layers"] > 0
        if overtaken or not state["moving"]:
            epoch += 1
            instance.offer(instance.plan(epoch))

    assert answer(instance, prefill, move) == expected
    states = instance.wait_for(lambda state: not state["moving"])
    assert epoch >= 3
    assert flips[-1] > flips[0]
    assert len(set(flips)) > 3, "flips and tokens alternated"
    assert all(state["moved_bytes"] > 0 for state in states)
    assert (
        len({(state["flips"], state["placement"], tuple(state["since"])) for state in states}) == 1
    )
    placement = ExpertPlacement.from_bytes(states[0]["placement"])
    for network in instance.networks:
        assert (network.placement.slots == placement.slots).all()
    instance.pool.stop()


def test_a_corrupted_read_gives_the_plan_up_and_the_answers_go_on(
    caches: LoopbackHub, prefill: Pool, expected: Answers
) -> None:
    instance = start_instance(2, caches, overlap=True)
    instance.experts.faults.corrupt_next_copies = 10**9

    def move(answers: Answers) -> None:
        if not instance.states()[0]["epoch"] and any(answers.values()):
            instance.offer(instance.plan(1))

    assert answer(instance, prefill, move) == expected
    states = instance.wait_for(lambda state: state["abandoned"] == 1)
    assert any("checksum" in state["reason"] for state in states)
    assert [state["flips"] for state in states] == [0, 0]
    instance.experts.faults.corrupt_next_copies = 0
    instance.offer(instance.plan(2))
    states = instance.wait_for(lambda state: not state["moving"] and state["flips"] > 0)
    assert answer(instance, prefill) == expected
    instance.pool.stop()


class NetworkThatBreaks:
    """The third layer that it shall change is one too many."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._num_flips = 0

    @property
    def placement(self) -> ExpertPlacement:
        return self._network.placement

    @property
    def expert_store(self) -> ExpertStore:
        return self._network.expert_store

    @property
    def step(self) -> int:
        return self._network.step

    def set_layer_placement(
        self, layer: int, slots: NDArray[np.int32], staged: Mapping[int, int]
    ) -> None:
        self._num_flips += 1
        if self._num_flips == 3:
            raise ValueError("this layer will not change")
        self._network.set_layer_placement(layer, slots, staged)


class BackendThatBreaks(LoopbackBackend):
    """The twentieth read is one too many."""

    num_reads = 0

    def start_read(self, peer: str, copies: Sequence[Copy]) -> LoopbackRead:
        self.num_reads += 1
        if self.num_reads == 20:
            raise ValueError("this transport is broken")
        return super().start_read(peer, copies)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("breakage", "cause"),
    [
        (Breakage(network=NetworkThatBreaks), "this layer will not change"),
        (Breakage(backend=BackendThatBreaks), "this transport is broken"),
    ],
    ids=["flip", "backend"],
)
def test_a_rank_that_dies_in_a_move_ends_all_and_no_token_is_wrong(
    breakage: Breakage,
    cause: str,
    overlap: bool,
    caches: LoopbackHub,
    prefill: Pool,
    expected: Answers,
) -> None:
    instance = start_instance(2, caches, overlap=overlap, breakage=breakage)
    answers: Answers = {}
    offered = 0.0

    def move(found: Answers) -> None:
        nonlocal offered
        if not offered and all(found.values()):
            offered = time.monotonic()
            instance.offer(instance.plan(1))

    with pytest.raises(RankError):
        answer(instance, prefill, move, answers)
    causes = [death_of(loop, answers) for loop in instance.pool.loops]
    assert offered and time.monotonic() - offered < END_S
    assert cause in causes[1]
    assert "decode.0 cannot go on" in causes[0]
    for request_id, tokens in answers.items():
        assert tokens == expected[request_id][: len(tokens)]
    for loop in instance.pool.loops:
        assert loop.stop(END_S)


def death_of(loop: RankLoop, answers: Answers) -> str:
    """Take the last events of a loop; why it died."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        try:
            events = loop.collect(0.1)
        except RankError as error:
            return str(error)
        for event in events:
            assert isinstance(event, Tokens), event
            answers[event.request_id] += event.ids
    raise AssertionError("the loop lives on")
