"""The prompts of a prefill rank from submission to offer. States and transitions; no device, no transport.

submit --> Queued --admit(slot)--> Running --extend, advance*--> Running with no row left --take--> outbox
             |                                |
             `----------- cancel -------------'   gives back what the state owns
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..transfer.errors import IntegrityError, InvalidRequestError
from ..transfer.request import PromptLogprob, Request
from .hits import Hit


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Waits for its first row; owns nothing. ``keys`` name its whole blocks."""

    request: Request
    since: float
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Owns ``blocks`` and ``slot``; ``num_done`` rows are cached. ``started`` is an instant of the timeline.

    Its rows began at ``floor``, and ``num_hit`` tokens came from the cache. ``logprobs`` of the tokens that follow
    these rows, if they were asked for.
    """

    request: Request
    since: float
    blocks: tuple[int, ...]
    slot: int
    started: float
    keys: tuple[bytes, ...] = ()
    floor: int = 0
    num_hit: int = 0
    num_done: int = 0
    logprobs: tuple[PromptLogprob, ...] = ()

    @property
    def finished(self) -> bool:
        """All rows that prefill runs are cached."""
        return self.num_done == num_rows(self.request)


PromptState = Queued | Running


def num_rows(request: Request) -> int:
    """Rows that prefill runs: all but the last, which is decode's first."""
    return len(request.prompt_ids) - 1


class PromptQueue:
    """All prompts not yet offered, in order of arrival. Raises IntegrityError for a transition that does not exist."""

    def __init__(self) -> None:
        self._states: dict[str, PromptState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    @property
    def queued(self) -> list[Queued]:
        """Prompts without resources."""
        return [state for state in self._states.values() if isinstance(state, Queued)]

    @property
    def running(self) -> list[Running]:
        """Prompts that own blocks and a slot."""
        return [state for state in self._states.values() if isinstance(state, Running)]

    def add(self, request: Request, keys: tuple[bytes, ...], now: float) -> None:
        """Nothing -> Queued. Raises InvalidRequestError for an id that is here already."""
        if request.request_id in self._states:
            raise InvalidRequestError(
                f"request_id = {request.request_id!r} is not allowed: this rank already works on a request of that "
                "id; give every request an id of its own"
            )
        self._states[request.request_id] = Queued(request=request, since=now, keys=keys)

    def admit(self, request_id: str, hit: Hit, slot: int, started: float) -> None:
        """Queued -> Running, which takes over the blocks of ``hit`` and ``slot``."""
        state = self.get_queued(request_id)
        self._states[request_id] = Running(
            request=state.request,
            since=state.since,
            keys=state.keys,
            blocks=hit.blocks,
            slot=slot,
            started=started,
            floor=hit.floor,
            num_hit=hit.num_tokens,
            num_done=hit.floor,
        )

    def extend(self, request_id: str, blocks: Iterable[int]) -> None:
        """Running -> Running, which takes over ``blocks`` behind its own."""
        state = self.get_running(request_id)
        self._states[request_id] = replace(state, blocks=(*state.blocks, *blocks))

    def get_queued(self, request_id: str) -> Queued:
        """The Queued state of a prompt."""
        state = self._states.get(request_id)
        if not isinstance(state, Queued):
            raise IntegrityError(f"prompt {request_id!r} cannot be admitted in state {state}")
        return state

    def get_running(self, request_id: str) -> Running:
        """The Running state of a prompt."""
        state = self._states.get(request_id)
        if not isinstance(state, Running):
            raise IntegrityError(f"prompt {request_id!r} cannot run rows in state {state}")
        return state

    def advance(
        self, request_id: str, start: int, count: int, logprobs: tuple[PromptLogprob, ...] = ()
    ) -> None:
        """Running -> Running with ``count`` more rows, the next ones, and what they gave."""
        state = self.get_running(request_id)
        if start != state.num_done or start + count > num_rows(state.request):
            raise IntegrityError(f"rows {start}..{start + count - 1} do not follow in {state}")
        self._states[request_id] = replace(
            state, num_done=start + count, logprobs=state.logprobs + logprobs
        )

    def take_finished(self) -> list[Running]:
        """Remove the prompts whose rows are all done; the caller owns their blocks and slots."""
        finished = [state for state in self.running if state.finished]
        for state in finished:
            del self._states[state.request.request_id]
        return finished

    @property
    def all(self) -> list[PromptState]:
        """Every prompt not yet offered, in order of arrival."""
        return list(self._states.values())

    def drop(self, request_id: str) -> PromptState | None:
        """Remove a prompt in any state; the caller frees what the returned state owns. Unknown ids give None."""
        return self._states.pop(request_id, None)
