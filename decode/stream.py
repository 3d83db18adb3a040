"""The device's queue: work runs in the order of its launch, while the launcher goes on.

    launcher   launch(forward N+1)   handle results of N-1 ...   launch(sampling N+1)
    device     |---- sampling N ----|------- forward N+1 -------|---- sampling N+1 ---- ...

On CPU the device is a thread; its kernels run without the GIL. ``InlineStream`` runs everything at once and is what
the plain loop uses. Inside ``launch_window`` nothing may wait for the device: on a GPU a hidden synchronisation there
would undo the overlap.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from ..transfer.errors import IntegrityError, RankError

CLOSE_S = 2.0

T = TypeVar("T")

_window = threading.local()


@contextmanager
def launch_window() -> Generator[None]:
    """Within it, waiting for launched work raises IntegrityError, and on a GPU so does any implicit synchronisation."""
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.get_sync_debug_mode() if on_gpu else 0
    _window.open = True
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        _window.open = False
        if on_gpu:
            torch.cuda.set_sync_debug_mode(before)


class Launched(Generic[T]):
    """Work that was launched. Once it has run: ``seconds`` is how long that took, ``error`` what it raised."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: T | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0

    def run(self) -> None:
        """Do the work; what it raises is kept for ``result``."""
        began = time.perf_counter()
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it, whole
            self.error = error
        self.seconds = time.perf_counter() - began
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """End it without running it."""
        self.error = error
        self._done.set()

    def result(self) -> T:
        """Wait for the work and return, or raise, what it did. Raises IntegrityError inside a launch window."""
        if getattr(_window, "open", False) and not self._done.is_set():
            raise IntegrityError("waited for the device inside a launch window")
        self._done.wait()
        if self.error is not None:
            raise self.error
        return cast(T, self._result)


class Stream(Protocol):
    """Runs launched work in order."""

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """Queue ``work``; returns at once."""
        ...

    def close(self) -> None:
        """Drop what waits, and let what runs finish for up to CLOSE_S seconds."""
        ...


class InlineStream:
    """Runs work where it is launched."""

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        launched = Launched(work)
        launched.run()
        return launched

    def close(self) -> None:
        """Nothing waits."""


class ThreadStream:
    """Runs work on a thread of its own. ``name`` appears in thread lists.

    Work that raises is the last that runs, as on a GPU: what was launched after it counts on it, and a pass after one
    that failed would meet the passes of other ranks in the wrong place. Whatever follows fails with the same error.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Launched[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"stream of {name}", daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        launched = Launched(work)
        if self._closed:
            launched.fail(RankError("the stream is closed"))
        else:
            self._queue.put(launched)
        return launched

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (launched := self._queue.get()) is not None:
            if self._closed:
                launched.fail(RankError("the stream was closed before this ran"))
            elif self._error is not None:
                launched.fail(self._error)
            else:
                launched.run()
                self._error = launched.error
