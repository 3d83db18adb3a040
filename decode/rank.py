"""One decode rank: takes in what the inbox has checked, runs one row of every request per step, and samples."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..model.batch import Logits, Span
from ..model.cache import Cache
from ..model.config import ModelConfig
from ..transfer.backend import TransferBackend
from ..transfer.errors import HeadraceError, InvalidRequestError, RankError
from ..transfer.messages import Handoff
from ..transfer.request import Request
from .admission import blocks_needed, check_fits, output_limit
from .arrival import room_of
from .config import DecodeConfig
from .events import DecodeEvent, DecodeFailed, Tokens
from .inbox import Inbox
from .rooms import Room, Rooms
from .sampler import sample, top_logprobs
from .scheduler import finish_reason, next_row


class Network(Protocol):
    """What a rank needs of the model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def cache(self) -> Cache: ...
    def forward(self, spans: Sequence[Span]) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class Running:
    """A request in the batch. Owns ``room``; ``output_ids`` grows by one a step."""

    request: Request
    room: Room
    limit: int
    admitted: float
    first_token: float = 0.0
    output_ids: list[int] = field(default_factory=list[int])


class DecodeRank:
    """All methods from the loop's thread. ``clock`` stamps timelines, ``timer`` measures deadlines."""

    def __init__(
        self,
        name: str,
        network: Network,
        backend: TransferBackend,
        config: DecodeConfig,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._network = network
        self._config = config
        self._clock = clock
        self._timer = timer
        self._layout = network.cache.layout
        self._rooms = Rooms(network.cache)
        self._inbox = Inbox(backend, network.cache, self._rooms, config)
        self._running: dict[str, Running] = {}
        self._failures: list[DecodeEvent] = []
        self._num_steps = self._num_tokens = self._num_finished = self._num_failed = 0

    def submit(self, request: Request, handoff: Handoff) -> None:
        """Queue a handoff. Raises PromptTooLongError or InvalidRequestError, and then keeps nothing of it.

        What is wrong with the handoff comes as DecodeFailed.
        """
        if request.request_id in self._running or request.request_id in self._inbox:
            raise InvalidRequestError(
                f"request_id = {request.request_id!r} is not allowed: this rank already works on a request of that "
                "id; give every request an id of its own"
            )
        length, block_tokens = len(request.prompt_ids), self._layout.block_tokens
        check_fits(
            length,
            request.sampling.max_tokens,
            context=self._network.config.max_position_embeddings,
            block_tokens=block_tokens,
            num_blocks=self._rooms.num_blocks,
        )
        num_blocks = blocks_needed(length, self._limit(request), block_tokens)
        self._inbox.add(request, handoff, num_blocks, self._timer())

    def cancel(self, request_id: str) -> None:
        """Free everything of a request, in whatever state it is; no event follows. Unknown ids are fine."""
        self._inbox.cancel(request_id)
        running = self._running.pop(request_id, None)
        if running is not None:
            self._rooms.give(running.room)
        self._failures = [event for event in self._failures if event.request_id != request_id]

    @property
    def has_work(self) -> bool:
        """Whether a step would run a row or report anything. Arrivals move in ``pump`` and are no work."""
        return bool(self._running or self._failures)

    def pump(self) -> None:
        """Move arrivals, and take those that are ready into the batch. Never blocks."""
        self._inbox.poll(self._timer(), self._config.max_batch - len(self._running))
        for ready in self._inbox.take_ready():
            request = ready.arrival.request
            self._running[request.request_id] = Running(
                request=request,
                room=ready.room,
                limit=self._limit(request),
                admitted=self._clock(),
            )
        for failure in self._inbox.take_failures():
            self._fail(failure.request_id, failure.error)

    def step(self) -> list[DecodeEvent]:
        """Run one row of every request in the batch: exactly one forward pass, of zero spans when there is none."""
        batch = list(self._running.values())
        logits = self._network.forward([self._span(running) for running in batch])
        self._num_steps += 1
        events = self._sample(batch, logits) if batch else []
        failures, self._failures = self._failures, []
        return events + failures

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block and slot is free or owned exactly once."""
        arriving = [room for state in self._inbox.states if (room := room_of(state)) is not None]
        running = [running.room for running in self._running.values()]
        self._rooms.check_integrity(arriving + running)

    def stats(self) -> dict[str, int]:
        """Counts for the router and the operator."""
        return {
            **self._inbox.stats(),
            "running": len(self._running),
            "context_tokens": sum(
                len(r.request.prompt_ids) + len(r.output_ids) for r in self._running.values()
            ),
            "free_blocks": self._rooms.free_blocks,
            "free_slots": self._rooms.free_slots,
            "steps": self._num_steps,
            "tokens": self._num_tokens,
            "finished": self._num_finished,
            "failed": self._num_failed,
        }

    def _limit(self, request: Request) -> int:
        return output_limit(
            len(request.prompt_ids),
            request.sampling.max_tokens,
            self._network.config.max_position_embeddings,
        )

    def _span(self, running: Running) -> Span:
        prompt_ids = running.request.prompt_ids
        row = next_row(prompt_ids, running.output_ids)
        return Span(
            token_ids=(row.token_id,),
            start=row.position,
            history=row.history,
            slot=running.room.slot,
            blocks=running.room.blocks,
            tail_start=max(0, len(prompt_ids) - self._layout.keep),
            logits=Logits.LAST,
        )

    def _sample(self, batch: Sequence[Running], logits: Tensor) -> list[DecodeEvent]:
        params = [running.request.sampling for running in batch]
        positions = [len(r.request.prompt_ids) + len(r.output_ids) for r in batch]
        finite = logits.amax(dim=-1).isfinite().tolist()
        good = [row for row in range(len(batch)) if finite[row]]
        chosen = logits if len(good) == len(batch) else logits[good]
        tokens = sample(chosen, [params[r] for r in good], [positions[r] for r in good])
        for row, running in enumerate(batch):
            if not finite[row]:
                error = RankError(f"{self.name}: logits at {positions[row] - 1} are not finite")
                self.cancel(running.request.request_id)
                self._fail(running.request.request_id, error)
        now = self._clock()
        return [
            self._emit(batch[row], token, logits[row : row + 1], now)
            for row, token in zip(good, tokens, strict=True)
        ]

    def _emit(self, running: Running, token: int, logits: Tensor, now: float) -> Tokens:
        request = running.request
        running.output_ids.append(token)
        running.first_token = running.first_token or now
        self._num_tokens += 1
        reason = finish_reason(
            token,
            len(running.output_ids),
            running.limit,
            request.sampling,
            self._network.config.eos_token_id,
        )
        if reason is not None:
            self._num_finished += 1
            self.cancel(request.request_id)
        count = request.sampling.top_logprobs
        return Tokens(
            request_id=request.request_id,
            ids=(token,),
            top_logprobs=tuple(top_logprobs(logits, count)) if count else (),
            finish_reason=reason,
            admitted=running.admitted,
            first_token=running.first_token,
            last_token=now,
        )

    def _fail(self, request_id: str, error: HeadraceError) -> None:
        self._num_failed += 1
        self._failures.append(DecodeFailed(request_id=request_id, error=error))
