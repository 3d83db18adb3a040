"""Compiles grammars off the step loop: tried out in another process first, then compiled here, kept and shared.

    submit -> queue -> [service thread] -> worker process: compile and walk in a child with limits
                                 verdict <-'
    poll   <- cache <- [loader threads, at a low priority]: compile the same, known to be harmless

A compiled grammar is not sent over: its serialised form can be a hundred times its size (600 MB for a schema of 1,000
optional properties), and compiling again costs no more than reading it. XGrammar compiles without the interpreter's
lock, so the step loop goes on.
"""

import contextlib
import os
import queue
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ..model.tokenizer import Tokenizer
from ..transfer.errors import GrammarError
from ..transfer.request import Grammar
from .grammar import MASK_S, CompiledLanguage
from .grammar_build import Vocabularies, build, open_vocabularies, readable
from .grammar_limits import GrammarLimits
from .grammar_process import WorkerGone, WorkerProcess
from .grammar_trigger import Trigger
from .grammar_wire import Hello, Job, Verdict

_NICENESS: Final = 10
_STACK_BYTES: Final = 32 << 20
_REFUSAL_BYTES: Final = 1024
_RETRY_S: Final = 60.0
_GRACE_S: Final = 30.0


class Compiling:
    """A grammar that is being compiled, or was."""

    def __init__(
        self, grammar: Grammar, future: "Future[CompiledLanguage]", deadline: float
    ) -> None:
        self._grammar = grammar
        self._future = future
        self._deadline = deadline

    def poll(self) -> CompiledLanguage | None:
        """The compiled language, None while it is not ready; never waits. Raises GrammarError if it is refused."""
        if not self._future.done():
            if time.monotonic() > self._deadline:
                raise self._error("the compiler does not answer; see the rank's log")
            return None
        error = self._future.exception()
        if error is not None:
            raise self._error(str(error))
        return self._future.result()

    def wait(self, timeout_s: float) -> CompiledLanguage:
        """Like `poll`, but wait for it. Raises GrammarError also when the time is over."""
        with contextlib.suppress(TimeoutError, GrammarError):
            self._future.result(timeout_s)
        if (language := self.poll()) is None:
            raise self._error(f"not compiled within {timeout_s:g} s")
        return language

    def _error(self, reason: str) -> GrammarError:
        shown = (
            self._grammar.text if len(self._grammar.text) <= 60 else self._grammar.text[:57] + "..."
        )
        return GrammarError(f"grammar {self._grammar.kind} {shown!r} is refused: {reason}")


@dataclass(slots=True, kw_only=True)
class _Kept:
    future: "Future[CompiledLanguage]"
    num_bytes: int = 0
    retry_at: float | None = None


class GrammarCompiler:
    """Compiles for one vocabulary. `submit`, `warm` and `close` may be called from any thread and never wait."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_logits: int | None = None,
        limits: GrammarLimits | None = None,
    ) -> None:
        """num_logits: width of a row of logits, if it is wider than the vocabulary; the rest is never allowed.

        Nothing is started before the first grammar, or `warm`.
        """
        self._tokenizer = tokenizer
        self._stop_ids = (tokenizer.eos_token_id,)
        self._vocab_size = tokenizer.vocab_size if num_logits is None else num_logits
        self._limits = limits or GrammarLimits()
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._asked: queue.SimpleQueue[Grammar | Verdict | WorkerGone | None] = queue.SimpleQueue()
        self._service: threading.Thread | None = None
        self._is_closed = False
        # the service thread's own
        self._worker: WorkerProcess | None = None
        self._trials: dict[int, Grammar] = {}
        self._num_jobs = 0
        self._vocabularies: Vocabularies | None = None
        self._loaders = ThreadPoolExecutor(
            self._limits.workers, thread_name_prefix="grammar", initializer=_be_nice
        )

    def warm(self) -> None:
        """Start what the first grammar needs, which takes about two seconds."""
        with self._lock:
            self._start()

    def submit(self, grammar: Grammar) -> Compiling:
        """Have a grammar compiled, unless it already is or is under way. Raises GrammarError after `close`."""
        limits, now = self._limits, time.monotonic()
        with self._lock:
            if self._is_closed:
                raise GrammarError("grammar: this rank is closing; ask another one")
            kept = self._kept.get(grammar)
            if kept is None or (kept.retry_at is not None and now > kept.retry_at):
                kept = self._kept[grammar] = _Kept(future=Future())
                self._start()
                self._asked.put(grammar)
            self._kept.move_to_end(grammar)
        most_s = limits.queue_timeout_s + 2 * limits.compile_timeout_s + _GRACE_S
        return Compiling(grammar, kept.future, now + most_s)

    def close(self) -> None:
        """End the threads and the worker; what is being compiled is refused."""
        with self._lock:
            self._is_closed = True
            if self._service is None:
                return
        self._asked.put(None)

    def _start(self) -> None:
        if self._service is None and not self._is_closed:
            self._service = threading.Thread(target=self._serve, name="grammars", daemon=True)
            self._service.start()

    def _serve(self) -> None:
        """The service thread: one message after the other, none of which takes long once all is warm."""
        try:
            self._open_worker()
            while (asked := self._asked.get()) is not None:
                match asked:
                    case Grammar():
                        self._try_out(asked)
                    case Verdict():
                        self._judge(asked)
                    case WorkerGone():
                        self._lose(asked)
        except Exception as error:  # noqa: BLE001 - told to every request, whatever it is
            self._fail_all(f"the grammar compiler cannot start: {error}")
        finally:
            self._shut_down()

    def _try_out(self, grammar: Grammar) -> None:
        worker = self._open_worker()
        self._num_jobs += 1
        self._trials[self._num_jobs] = grammar
        worker.send(Job(self._num_jobs, grammar.kind, grammar.text))

    def _judge(self, verdict: Verdict) -> None:
        grammar = self._trials.pop(verdict.number, None)
        if grammar is None:
            return
        if verdict.reason is None:
            before = threading.stack_size(_STACK_BYTES)  # of the loader that may start now
            self._loaders.submit(self._load, grammar)
            threading.stack_size(before)
        else:
            self._settle(grammar, verdict.reason, may_retry=verdict.timed_out)

    def _lose(self, gone: WorkerGone) -> None:
        if gone.worker is self._worker:
            self._worker = None
            trials, self._trials = self._trials, {}
            for grammar in trials.values():
                self._settle(grammar, f"the compiler ended ({gone.exit_code})", may_retry=True)

    def _load(self, grammar: Grammar) -> None:
        """On a loader thread: compile what was found harmless."""
        vocabularies = self._vocabularies
        assert vocabularies is not None
        try:
            compiled = build(vocabularies, grammar.kind, grammar.text)
            trigger = None
            if grammar.trigger:
                # a place in the language is enough: whether what follows can be completed is not asked
                from xgrammar import GrammarMatcher

                trigger = Trigger(
                    grammar.trigger,
                    self._tokenizer.token_bytes,
                    lambda rest: GrammarMatcher(compiled).accept_string(rest),
                )
        except Exception as error:  # noqa: BLE001 - one grammar fails, whatever it did
            self._settle(grammar, readable(error))
            return
        language = CompiledLanguage(
            compiled=compiled,
            trigger=trigger,
            stop_ids=self._stop_ids,
            vocab_size=self._vocab_size,
            num_bytes=compiled.memory_size_bytes + len(grammar.text),
        )
        self._settle(grammar, language)

    def _settle(
        self, grammar: Grammar, outcome: CompiledLanguage | str, *, may_retry: bool = False
    ) -> None:
        """Answer everyone who waits for a grammar, and make room for it."""
        with self._lock:
            kept = self._kept[grammar]
            if isinstance(outcome, str):
                kept.num_bytes = _REFUSAL_BYTES + len(grammar.text)
                kept.retry_at = time.monotonic() + _RETRY_S if may_retry else None
            else:
                kept.num_bytes = outcome.num_bytes
            most = self._limits.cache_mib << 20
            done = [key for key, value in self._kept.items() if value.num_bytes]
            held = sum(value.num_bytes for value in self._kept.values())
            while held > most and done:
                held -= self._kept.pop(done.pop(0)).num_bytes
        if isinstance(outcome, str):
            kept.future.set_exception(GrammarError(outcome))
        else:
            kept.future.set_result(outcome)

    def _open_worker(self) -> WorkerProcess:
        """The worker, started if there is none."""
        if self._worker is None or self._vocabularies is None:
            worker = self._worker = WorkerProcess(self._asked.put)
            size, own = self._vocab_size, self._tokenizer.token_bytes
            special = self._tokenizer.special_ids
            pieces = [b"" if token in special else own[token] for token in range(len(own))][:size]
            pieces += [b""] * (size - len(pieces))
            self._vocabularies = open_vocabularies(pieces, self._stop_ids)
            limits = self._limits
            worker.send(
                Hello(
                    pieces=pieces,
                    stop_ids=list(self._stop_ids),
                    compile_timeout_s=limits.compile_timeout_s,
                    queue_timeout_s=limits.queue_timeout_s,
                    memory_bytes=limits.memory_mib << 20,
                    mask_s=MASK_S,
                    workers=limits.workers,
                )
            )
        return self._worker

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            waiting = [grammar for grammar, kept in self._kept.items() if not kept.future.done()]
        for grammar in waiting:
            self._settle(grammar, reason, may_retry=True)

    def _shut_down(self) -> None:
        with self._lock:
            self._is_closed = True
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._fail_all("this rank is closing; ask another one")
        if self._worker is not None:
            self._worker.close()


def _be_nice() -> None:
    """Linux counts threads one by one here: the step loop keeps its priority."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
