"""The driver of a batch: a bounded number of requests in flight, each outcome written as it comes.

source -> prepare (own thread) -> [slot of `concurrency`] -> generate, retried -> all choices -> output line -> totals
                                       |
                                       no free slot: the input is not read on
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ...transfer.errors import HeadraceError, PromptTooLongError, RequestError
from ...transfer.request import Completion, Request
from .answers import response_body
from .codec import TextCodec
from .lines import BadLine
from .output import OutputFile
from .preparation import TOO_LONG, Prepared
from .records import Outcome, PromptDetails, Usage, answer_record, error_record, timing_of
from .report import Totals

SYNC_INTERVAL_S = 1.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0


class Generator(Protocol):
    """Who answers: the cluster, or a fake of it."""

    async def generate(self, request: Request) -> Completion:
        """The whole answer. Raises RequestError if the request is at fault, another HeadraceError otherwise."""
        ...


class BatchStoppedError(HeadraceError):
    """The cluster answers nothing any more; what is done is kept and the same command goes on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How hard the driver pushes, and when it gives up."""

    concurrency: int
    """Requests in flight."""
    model: str
    """Name that answers carry."""
    attempts: int = 3
    """Tries of one request, beyond what the cluster itself repeats, while other requests succeed."""
    give_up_s: float = 30.0
    """How long requests may fail without a single success before the run stops."""


class Runner:
    """One run over the lines that are left. ``whole`` counts every run of the job, ``run_totals`` this one."""

    def __init__(
        self,
        config: RunnerConfig,
        generator: Generator,
        codec: TextCodec,
        output: OutputFile,
        *,
        job_id: str,
        whole: Totals,
    ) -> None:
        self._config = config
        self._generator = generator
        self._codec = codec
        self._output = output
        self._job_id = job_id
        self.whole = whole
        self.run_totals = Totals()
        self.in_flight = 0
        self.run_s = 0.0
        self._input_ended = False

    async def run(self, lines: Iterator[Prepared | BadLine]) -> None:
        """Answers every line. Raises BatchStoppedError when the cluster has died; the output then is a good prefix."""
        slots = asyncio.Semaphore(self._config.concurrency)
        begun = time.monotonic()
        syncing = asyncio.create_task(self._sync_regularly())
        try:
            async with asyncio.TaskGroup() as group:
                with ThreadPoolExecutor(1, thread_name_prefix="batch-input") as thread:
                    await self._feed(lines, slots, group, thread)
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            syncing.cancel()
            self.run_s = time.monotonic() - begun

    async def _feed(
        self,
        lines: Iterator[Prepared | BadLine],
        slots: asyncio.Semaphore,
        group: asyncio.TaskGroup,
        thread: ThreadPoolExecutor,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await slots.acquire()
            line = await loop.run_in_executor(thread, next, lines, None)
            if line is None:
                self._input_ended = True
                return
            if isinstance(line, BadLine):
                self._write(*error_record(self._job_id, line))
                slots.release()
                continue
            self.in_flight += 1
            choices = [group.create_task(self._choice(line, line.requests[0], slots))]
            for request in line.requests[1:]:
                await slots.acquire()
                choices.append(group.create_task(self._choice(line, request, slots)))
            group.create_task(self._answer(line, choices))

    async def _choice(
        self, prepared: Prepared, request: Request, slots: asyncio.Semaphore
    ) -> Completion | BadLine:
        try:
            return await self._generate(prepared, request)
        finally:
            slots.release()

    async def _answer(
        self, prepared: Prepared, choices: Sequence[asyncio.Task[Completion | BadLine]]
    ) -> None:
        """Write the line: all choices, or the error of one."""
        try:
            results = await asyncio.gather(*choices)
            completions = [result for result in results if isinstance(result, Completion)]
            errors = [result for result in results if isinstance(result, BadLine)]
            if errors:
                self._write(*error_record(self._job_id, errors[0]))
            else:
                self._write(*self._record(prepared, completions))
        finally:
            self.in_flight -= 1

    async def _generate(self, prepared: Prepared, request: Request) -> Completion | BadLine:
        """Tries until there is an answer, the request is to blame, or the cluster is."""
        failed_since = 0.0
        answered_then = 0
        for attempt in itertools.count(1):
            try:
                return await self._generator.generate(request)
            except RequestError as error:
                code = TOO_LONG if isinstance(error, PromptTooLongError) else "invalid_request"
                return _failed(prepared, code, str(error))
            except Exception as error:  # one request's failure must not end the others
                if attempt == 1:
                    failed_since, answered_then = time.monotonic(), self.run_totals.answered
                is_last = self._input_ended and self.in_flight == 1
                others_succeed = self.run_totals.answered > answered_then
                if attempt >= self._config.attempts and (others_succeed or is_last):
                    return _failed(
                        prepared,
                        "cluster_error",
                        f"{type(error).__name__}: {error} ({attempt} attempts)",
                    )
                if time.monotonic() - failed_since > self._config.give_up_s:
                    raise BatchStoppedError(
                        f"no request has succeeded for {self._config.give_up_s:g} s; the last failure was "
                        f"{type(error).__name__}: {error}"
                    ) from error
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)))
        raise AssertionError("unreachable")

    def _record(
        self, prepared: Prepared, completions: Sequence[Completion]
    ) -> tuple[Outcome, bytes]:
        num_prompt = len(prepared.requests[0].prompt_ids)
        num_output = sum(len(completion.ids) for completion in completions)
        return answer_record(
            job_id=self._job_id,
            line=prepared.line.line,
            custom_id=prepared.line.custom_id,
            body=response_body(
                prepared,
                completions,
                self._codec,
                job_id=self._job_id,
                model=self._config.model,
            ),
            usage=Usage(
                num_prompt,
                num_output,
                num_prompt + num_output,
                PromptDetails(max(completion.num_cached for completion in completions)),
            ),
            timing=timing_of(completions),
        )

    def _write(self, outcome: Outcome, data: bytes) -> None:
        self._output.append(data)
        self.whole.add(outcome)
        self.run_totals.add(outcome)

    async def _sync_regularly(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            await asyncio.to_thread(self._output.sync)


def _failed(prepared: Prepared, code: str, reason: str) -> BadLine:
    return BadLine(
        line=prepared.line.line, custom_id=prepared.line.custom_id, code=code, reason=reason
    )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
