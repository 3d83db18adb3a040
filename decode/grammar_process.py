"""The rank's end of the grammar worker: its process, its frames, its end."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from .grammar_wire import Frames, Hello, Job, Verdict, frame

_EXIT_S: Final = 2.0
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The last thing that is heard of a worker."""

    worker: "WorkerProcess"
    exit_code: int


class WorkerProcess:
    """A running worker. It ends when its input is closed, so also when the rank dies."""

    def __init__(self, hear: Callable[[Verdict | WorkerGone], None]) -> None:
        """Start it. hear: called on a thread of its own with every verdict, and at the end with WorkerGone."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.decode.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._hear = hear
        threading.Thread(target=self._listen, name="grammar verdicts", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Hello | Job) -> None:
        """Hand over a message. A worker that is gone says so through ``hear``."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(frame(message))
            self._process.stdin.flush()

    def close(self) -> None:
        """End it, by force if it does not hear."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._reap()

    def _listen(self) -> None:
        output = self._process.stdout
        assert output is not None
        frames = Frames()
        with contextlib.suppress(msgspec.MsgspecError, OSError):
            while data := os.read(output.fileno(), _READ_BYTES):
                frames.push(data)
                for verdict in frames.take_all(Verdict):
                    self._hear(verdict)
        self._hear(WorkerGone(self, self._reap()))

    def _reap(self) -> int:
        try:
            return self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(_EXIT_S)
