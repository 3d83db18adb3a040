"""Launched work: order, results, errors, and the launch window."""

import threading

import pytest

from headrace.decode.stream import InlineStream, Stream, ThreadStream, launch_window
from headrace.transfer.errors import IntegrityError, RankError


@pytest.fixture(params=["inline", "thread"])
def stream(request):
    made: Stream = InlineStream() if request.param == "inline" else ThreadStream("test")
    yield made
    made.close()


def test_work_runs_in_the_order_of_its_launch(stream: Stream) -> None:
    seen: list[int] = []
    launched = [stream.launch(lambda n=n: seen.append(n) or n * n) for n in range(20)]
    assert [work.result() for work in launched] == [n * n for n in range(20)]
    assert seen == list(range(20))


def test_an_error_is_raised_where_the_result_is_wanted(stream: Stream) -> None:
    failed = stream.launch(lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()


def test_nothing_runs_after_work_that_failed() -> None:
    stream, ran = ThreadStream("test"), list[int]()
    stream.launch(lambda: 1 // 0)
    later = [stream.launch(lambda: ran.append(1)) for _ in range(2)]
    for work in later:
        with pytest.raises(ZeroDivisionError):
            work.result()
    assert not ran
    stream.close()


def test_nothing_may_wait_inside_a_launch_window() -> None:
    stream, gate = ThreadStream("test"), threading.Event()
    with launch_window():
        launched = stream.launch(lambda: gate.wait(10))
        with pytest.raises(IntegrityError, match="inside a launch window"):
            launched.result()
        assert InlineStream().launch(lambda: 1).result() == 1, "it is over, nothing waits"
        gate.set()
    assert launched.result() is True
    stream.close()


def test_launched_work_may_wait_for_work_before_it() -> None:
    stream = ThreadStream("test")
    first = stream.launch(lambda: 3)
    with launch_window():
        second = stream.launch(lambda: first.result() + 1)
    assert second.result() == 4
    stream.close()


def test_the_launcher_goes_on_while_the_work_runs() -> None:
    stream, gate = ThreadStream("test"), threading.Event()
    launched = stream.launch(lambda: gate.wait(10) and threading.current_thread().name)
    gate.set()
    assert launched.result() == "stream of test"
    stream.close()


def test_a_closed_stream_drops_what_waits() -> None:
    stream, gate, running = ThreadStream("test"), threading.Event(), threading.Event()
    first = stream.launch(lambda: running.set() or gate.wait(10))
    second = stream.launch(lambda: 2)
    assert running.wait(10)
    closer = threading.Thread(target=stream.close)
    closer.start()
    closer.join(0.3)  # it waits for what runs
    assert closer.is_alive()
    gate.set()
    closer.join()
    assert first.result() is True
    with pytest.raises(RankError, match="closed before this ran"):
        second.result()
    with pytest.raises(RankError, match="the stream is closed"):
        stream.launch(lambda: 3).result()
