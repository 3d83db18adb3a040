"""The loop of a rank and its host, without Ray: turns, commands, refusals, and what is left when it dies."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.config import ClusterConfig, load_cluster_config
from headrace.cluster.fake_rank import FakeBuilder, FakeExchange, Faults, fake_answer
from headrace.cluster.rank_host import RankHost, RankId
from headrace.cluster.rank_loop import Event, RankLoop, Refused
from headrace.model.expert_flip import Flip
from headrace.model.parallel import ThreadExchange, ThreadHub
from headrace.transfer.errors import (
    CheckpointError,
    DeadlineError,
    IntegrityError,
    PromptTooLongError,
    RankError,
)
from headrace.transfer.request import Request, SamplingParams

WAIT_S = 10.0


class Recorder:
    """A rank that takes ``work`` steps and notes its thread."""

    def __init__(self, work: int = 0) -> None:
        self.work = work
        self.num_steps = 0
        self.threads: set[str] = set()
        self.submitted: list[str] = []

    @property
    def outlook(self) -> tuple[float]:
        return (float(self.work > 0),)

    def submit(self, request: Request) -> None:
        if len(request.prompt_ids) > 3:
            raise PromptTooLongError("prompt of 4 tokens is too long")
        self.submitted.append(request.request_id)

    def cancel(self, request_id: str) -> None:
        self.submitted.remove(request_id)

    def pump(self) -> None:
        self.threads.add(threading.current_thread().name)

    def step(
        self, outlooks: Sequence[Sequence[float]], flips: Sequence[Flip] = ()
    ) -> Sequence[Event]:
        assert any(outlook[0] for outlook in outlooks)
        self.work -= 1
        self.num_steps += 1
        return [Refused(request_id=f"step {self.num_steps}", error=RankError("only a marker"))]

    def close(self) -> None:
        """Nothing was started."""

    def check_integrity(self) -> None:
        if self.submitted:
            raise IntegrityError("something is left")

    def stats(self) -> Mapping[str, Any]:
        return {"steps": self.num_steps}


def request_of(request_id: str, num_prompt: int = 2, max_tokens: int = 3) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=tuple(range(1, num_prompt + 1)),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def loops() -> Iterator[Callable[[str], RankLoop]]:
    made: list[RankLoop] = []

    def make(name: str = "decode-0.0") -> RankLoop:
        made.append(RankLoop(name))
        return made[-1]

    yield make
    for loop in made:
        assert loop.stop(WAIT_S)


def test_commands_and_turns_run_on_one_thread(loops: Callable[[], RankLoop]) -> None:
    loop = loops()
    rank = Recorder(work=2)
    assert (
        loop.call(lambda: threading.current_thread().name, WAIT_S, "naming") == "loop of decode-0.0"
    )
    loop.begin(rank, FakeExchange())
    wait_for(lambda: rank.num_steps == 2)
    events = loop.collect(WAIT_S)
    while len(events) < 2:
        events += loop.collect(WAIT_S)
    assert [event.request_id for event in events] == ["step 1", "step 2"]
    assert rank.threads == {"loop of decode-0.0"}
    assert loop.stats(WAIT_S) == {"steps": 2}
    assert loop.collect(0.01) == []


def test_a_refusal_is_the_event_of_its_request_and_hurts_nobody_else(
    loops: Callable[[], RankLoop],
) -> None:
    loop = loops()
    rank = Recorder()
    loop.begin(rank, FakeExchange())
    loop.submit_many([(request_of("a"),), (request_of("b", num_prompt=4),), (request_of("c"),)])
    (event,) = loop.collect(WAIT_S)
    assert isinstance(event, Refused)
    assert (event.request_id, str(event.error)) == ("b", "prompt of 4 tokens is too long")
    wait_for(lambda: rank.submitted == ["a", "c"])
    with pytest.raises(IntegrityError, match="something is left"):
        loop.check_integrity(WAIT_S)
    loop.cancel(["a", "c"])
    loop.check_integrity(WAIT_S)


def test_what_a_call_raises_is_the_callers_and_the_loop_lives(
    loops: Callable[[], RankLoop],
) -> None:
    loop = loops()
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0, WAIT_S, "dividing")
    with pytest.raises(DeadlineError, match=r"^decode-0\.0: waiting took longer than 0\.01 s$"):
        loop.call(lambda: time.sleep(0.1), 0.01, "waiting")
    assert loop.call(lambda: 4, WAIT_S, "counting") == 4


def test_ranks_of_an_instance_step_together_even_without_work(
    loops: Callable[[str], RankLoop],
) -> None:
    hub = ThreadHub(2, WAIT_S)
    busy, idle = Recorder(work=5), Recorder()
    for name, rank, number in (("decode-0.0", busy, 0), ("decode-0.1", idle, 1)):
        loop = loops(name)
        exchange = ThreadExchange(hub, number)
        loop.on_close(exchange.close)
        loop.begin(rank, exchange)
    wait_for(lambda: busy.num_steps == 5 and idle.num_steps == 5)
    assert (busy.num_steps, idle.num_steps) == (5, 5), "no step without work"


def test_a_dead_loop_delivers_its_events_and_then_the_cause_for_ever(
    loops: Callable[[], RankLoop],
) -> None:
    class Broken(Recorder):
        def step(
            self, outlooks: Sequence[Sequence[float]], flips: Sequence[Flip] = ()
        ) -> Sequence[Event]:
            if self.num_steps == 1:
                raise ValueError("no such expert")
            return super().step(outlooks)

    loop = loops()
    closed: list[str] = []
    loop.on_close(lambda: closed.append("exchange"))
    loop.on_close(lambda: closed.append("backend"))
    loop.begin(Broken(work=9), FakeExchange())
    wait_for(lambda: bool(closed[1:]))
    assert closed == ["backend", "exchange"]
    assert [event.request_id for event in loop.collect(WAIT_S)] == ["step 1"]
    cause = r"^decode-0\.0 cannot go on: ValueError: no such expert$"
    for use in (
        lambda: loop.collect(WAIT_S),
        lambda: loop.submit_many([(request_of("a"),)]),
        lambda: loop.stats(WAIT_S),
        lambda: loop.collect(WAIT_S),
    ):
        with pytest.raises(RankError, match=cause):
            use()


def test_a_call_that_waits_when_the_loop_dies_is_told(loops: Callable[[], RankLoop]) -> None:
    class Slow(Recorder):
        def step(
            self, outlooks: Sequence[Sequence[float]], flips: Sequence[Flip] = ()
        ) -> Sequence[Event]:
            time.sleep(0.1)
            raise ValueError("late")

    loop = loops()
    loop.begin(Slow(work=1), FakeExchange())
    time.sleep(0.02)
    with pytest.raises(RankError, match="cannot go on: ValueError: late"):
        loop.stats(WAIT_S)


def test_a_stopped_loop_wakes_whoever_collects(loops: Callable[[], RankLoop]) -> None:
    loop = loops()
    loop.begin(Recorder(), FakeExchange())
    caught: list[str] = []

    def collect() -> None:
        try:
            loop.collect(WAIT_S)
        except RankError as error:
            caught.append(str(error))

    collector = threading.Thread(target=collect)
    collector.start()
    assert loop.stop(WAIT_S)
    collector.join(WAIT_S)
    assert caught == ["decode-0.0 is shut down"]
    with pytest.raises(RankError, match=r"^decode-0\.0 is shut down$"):
        loop.submit_many([])


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    return load_cluster_config("local", [f"model.checkpoint={tmp_path}", "decode.ranks=1"])


def host_of(config: ClusterConfig, kind: str, faults: Faults) -> RankHost:
    return RankHost(RankId(kind=kind, index=0, rank=0, size=1), config, FakeBuilder(faults))


def test_a_host_goes_through_its_stages_and_serves(config: ClusterConfig) -> None:
    request = request_of("a")
    prefill, decode = (host_of(config, kind, Faults()) for kind in ("prefill", "decode"))
    for host in (prefill, decode):
        host.check()
        host.join("")
        assert host.load().context_tokens == 4096
        host.pair([b"fake"])
        host.begin()
    prefill.submit_many([(request,)])
    (offered,) = prefill.collect(WAIT_S)
    decode.submit_many([(request, offered.handoff)])  # type: ignore[attr-defined]
    ids: list[int] = []
    while len(ids) < 3:
        for tokens in decode.collect(WAIT_S):
            ids += tokens.ids  # type: ignore[attr-defined]
    assert tuple(ids) == fake_answer(request) == (3, 10, 17)
    for host in (prefill, decode):
        host.check_integrity()
        assert host.shutdown()


def test_a_host_refuses_stages_out_of_order_and_keeps_the_type_of_errors(
    config: ClusterConfig,
) -> None:
    host = host_of(config, "decode", Faults(bad_checkpoint=frozenset({"decode-0.0"})))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated$"):
        host.check()
    with pytest.raises(RankError, match=r"^decode-0\.0 must join its instance before it loads$"):
        host.load()
    with pytest.raises(RankError, match=r"^decode-0\.0 must join its instance before it begins$"):
        host.begin()
    with pytest.raises(RankError, match=r"^decode-0\.0 does not serve yet: it is still starting$"):
        host.stats()
    assert host.shutdown()


def test_a_port_in_use_is_named_with_its_key(config: ClusterConfig) -> None:
    host = host_of(config, "decode", Faults())
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            RankError,
            match=rf"^port {port} of host .* cannot be used \(Address already in use\): give ",
        ):
            host.take_port(port)
    assert host.take_port(0) > 0
    assert host.shutdown()
