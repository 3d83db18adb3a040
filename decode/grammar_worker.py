"""The process that tries grammars out before a rank uses them: ``python -m headrace.decode.grammar_worker``.

It loads XGrammar once and forks a child for every grammar. The child has a limit of memory and a niceness, compiles,
takes a walk under the masks to see how long they take, and reports; the parent kills it when its time is over. So a
hostile grammar ends a child, never a rank, and others wait for it a second at most: `workers` children run at a time,
but one that is older than that no longer counts.

    rank --stdin--> Hello, Job ...      (end of stdin: kill all children and leave)
         <-stdout-- Verdict ...         one for each Job, in the order in which they end
"""

import os
import random
import re
import resource
import selectors
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from .grammar_build import Vocabularies, build, open_vocabularies, readable
from .grammar_wire import Frames, Hello, Job, Verdict, frame

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

NICENESS: Final = 10
_YOUNG_S: Final = 1.0
_MAX_CHILDREN: Final = 6
_WALK_TOKENS: Final = 48
_STACK_BYTES: Final = 4 << 20  # a rank's threads have twice as much
_READ_BYTES: Final = 1 << 20
_WARNING: Final = re.compile(r"Warning: (.*)")


@dataclass(slots=True, kw_only=True)
class _Child:
    job: Job
    pid: int
    born: float
    is_killed: bool = False
    data: Frames = field(default_factory=Frames)


class _Worker:
    """The parent of the children. One thread, and the only one that runs no foreign grammar."""

    def __init__(self, hello: Hello, requests: int, replies: int) -> None:
        self._limits = hello
        self._vocabularies = open_vocabularies(hello.pieces, hello.stop_ids)
        self._requests, self._replies = requests, replies
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._waiting: deque[tuple[float, Job]] = deque()
        self._children: dict[int, _Child] = {}

    def run(self, frames: Frames) -> None:
        """Work until the rank closes its end."""
        while True:
            now = time.monotonic()
            self._expire(now)
            for job in frames.take_all(Job):
                self._waiting.append((now, job))
            while self._waiting and self._has_room(now):
                self._start(self._waiting.popleft()[1])
            for key, _ in self._selector.select(self._pause_s()):
                data = os.read(key.fd, _READ_BYTES)
                if key.fd == self._requests:
                    if not data:
                        self._kill_all()
                        return
                    frames.push(data)
                elif data:
                    self._children[key.fd].data.push(data)
                else:
                    self._bury(key.fd)

    def _has_room(self, now: float) -> bool:
        young = sum(now - child.born < _YOUNG_S for child in self._children.values())
        return young < self._limits.workers and len(self._children) < _MAX_CHILDREN

    def _pause_s(self) -> float | None:
        """Until a child is too old, or old enough to make room; None while nothing is going on."""
        return 0.05 if self._children else None

    def _expire(self, now: float) -> None:
        limits = self._limits
        for child in self._children.values():
            if not child.is_killed and now - child.born > limits.compile_timeout_s:
                os.kill(child.pid, signal.SIGKILL)
                child.is_killed = True
        while self._waiting and now - self._waiting[0][0] > limits.queue_timeout_s:
            job = self._waiting.popleft()[1]
            reason = f"waited longer than {limits.queue_timeout_s:g} s for the compiler"
            self._reply(Verdict(job.number, reason, timed_out=True))

    def _start(self, job: Job) -> None:
        readable_end, writable_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                verdict = Verdict(job.number, _try_out(self._limits, self._vocabularies, job))
                os.write(writable_end, frame(verdict))
            finally:
                os._exit(0)
        os.close(writable_end)
        self._selector.register(readable_end, selectors.EVENT_READ)
        self._children[readable_end] = _Child(job=job, pid=pid, born=time.monotonic())

    def _bury(self, end: int) -> None:
        child = self._children.pop(end)
        self._selector.unregister(end)
        os.close(end)
        _, status = os.waitpid(child.pid, 0)
        verdict = child.data.take(Verdict)
        if verdict is None:
            number = child.job.number
            if child.is_killed:
                limit = f"{self._limits.compile_timeout_s:g} s"
                verdict = Verdict(number, f"took longer than {limit}", timed_out=True)
            else:
                code = os.waitstatus_to_exitcode(status)
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                verdict = Verdict(number, f"made the compiler crash ({how})")
        self._reply(verdict)

    def _reply(self, verdict: Verdict) -> None:
        os.write(self._replies, frame(verdict))

    def _kill_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def _try_out(limits: Hello, vocabularies: Vocabularies, job: Job) -> str | None:
    """In the child: why the grammar is refused, or None."""
    virtual_pages = int(open("/proc/self/statm").read().split()[0])  # noqa: PTH123, SIM115
    most = virtual_pages * resource.getpagesize() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    processor_s = int(limits.compile_timeout_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s))
    too_big = f"needs more than {limits.memory_bytes >> 20} MiB"
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            compiled = build(vocabularies, job.kind, job.text)
            warnings = list(_warnings(said.fileno()))
            return readable(warnings[0]) if warnings else _walk(compiled, limits)
        except MemoryError:
            return too_big
        except Exception as error:  # noqa: BLE001 - whatever a foreign text can cause
            return too_big if "bad_alloc" in str(error) else readable(error)


def _warnings(file: int) -> Iterator[str]:
    """What the compiler said it ignores; of oneOf the schema check knows more."""
    text = os.pread(file, _READ_BYTES, 0).decode(errors="replace")
    return (said for said in _WARNING.findall(text) if "oneOf" not in said)


def _walk(compiled: "CompiledGrammar", limits: Hello) -> str | None:
    """A random answer under the masks: whether there is one, and whether masks take longer than they may."""
    from xgrammar import GrammarMatcher

    matcher = GrammarMatcher(compiled)
    mask = np.zeros((1, -(-len(limits.pieces) // 32)), np.int32)
    chance = random.Random(0)
    began = time.process_time()
    for length in range(_WALK_TOKENS):
        matcher.fill_next_token_bitmask(mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(limits.pieces))
        allowed = bits.nonzero()[0].tolist()
        if not allowed and length == 0:
            return "no text of this vocabulary belongs to it"
        spent_s = time.process_time() - began
        if spent_s > limits.mask_s * (length + 1) + 5 * limits.mask_s:
            took, most = 1e3 * spent_s / (length + 1), 1e3 * limits.mask_s
            return f"is too ambiguous: a mask takes {took:.0f} ms, allowed are {most:.0f} ms"
        going_on = [token for token in allowed if token not in limits.stop_ids]
        if not going_on or not matcher.accept_token(chance.choice(going_on)):
            return None
    return None


def main() -> None:
    """Serve the rank at the other end of stdin and stdout."""
    os.nice(NICENESS)
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    import xgrammar  # noqa: F401  # pyright: ignore[reportUnusedImport]  # while the rank makes the first frame

    frames = Frames()
    while (hello := frames.take(Hello)) is None:
        data = os.read(requests, _READ_BYTES)
        if not data:
            return
        frames.push(data)
    _Worker(hello, requests, replies).run(frames)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main())
