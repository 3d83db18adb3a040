"""Requests whose bytes are here: each joins the batch as soon as its grammar, if it has one, is compiled."""

from dataclasses import dataclass

from ..model.config import ModelConfig
from ..transfer.errors import GrammarError, InvalidRequestError
from ..transfer.request import Request
from .arrival import Failure, Ready
from .grammar import GrammarState
from .grammar_compiler import Compiling, GrammarCompiler
from .rooms import Room, Rooms


@dataclass(frozen=True, slots=True)
class Entrant:
    """May join the batch, which owns ``room`` from then on; ``tail_start`` is its first row in the decoder layers."""

    request: Request
    room: Room
    tail_start: int
    grammar: GrammarState | None

    @property
    def late_from(self) -> int | None:
        """The first row that the decoder layers have to run before its first token; None if there is none."""
        is_late = self.room.tail is not None and self.tail_start < len(self.request.prompt_ids) - 1
        return self.tail_start if is_late else None


class Entrance:
    """Owns the rooms of those who wait for their grammar. ``grammars`` None refuses requests that have one."""

    def __init__(self, rooms: Rooms, grammars: GrammarCompiler | None) -> None:
        self._rooms = rooms
        self._grammars = grammars
        self._compiling: dict[str, Compiling] = {}
        self._ready: dict[str, Ready] = {}
        self._failures: list[Failure] = []

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ready

    @property
    def rooms(self) -> list[Room]:
        """Of those who wait."""
        return [ready.room for ready in self._ready.values()]

    def expect(self, request: Request) -> None:
        """A request is on its way: begin to compile what it needs."""
        grammar = request.sampling.grammar
        if grammar is not None and self._grammars is not None:
            self._compiling[request.request_id] = self._grammars.submit(grammar)

    def arrive(self, ready: Ready) -> None:
        """Its bytes are here."""
        self._ready[ready.arrival.request.request_id] = ready

    def forget(self, request_id: str) -> None:
        """It comes no more. Unknown ids are fine."""
        self._compiling.pop(request_id, None)
        ready = self._ready.pop(request_id, None)
        if ready is not None:
            self._rooms.give(ready.room)

    def take(self) -> list[Entrant]:
        """Those who may join now, in the order of their arrival; nobody waits for another's grammar."""
        entrants: list[Entrant] = []
        for request_id, ready in list(self._ready.items()):
            compiling = self._compiling.get(request_id)
            try:
                language = compiling.poll() if compiling is not None else None
            except GrammarError as error:
                self.forget(request_id)
                self._failures.append(Failure(request_id=request_id, error=error))
                continue
            if compiling is not None and language is None:
                continue
            grammar = GrammarState(language) if language is not None else None
            tail_start = ready.arrival.handoff.tail_start
            entrants.append(Entrant(ready.arrival.request, ready.room, tail_start, grammar))
            self._compiling.pop(request_id, None)
            del self._ready[request_id]
        return entrants

    def take_failures(self) -> list[Failure]:
        """Whose grammar was refused since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """End the compiler."""
        if self._grammars is not None:
            self._grammars.close()


def check_sampling(
    request: Request, config: ModelConfig, *, has_text: bool, has_grammars: bool
) -> None:
    """Raise InvalidRequestError for sampling parameters that a rank cannot serve."""
    params = request.sampling
    if params.stop and not has_text:
        raise InvalidRequestError(f"stop = {params.stop!r} needs a tokenizer, this rank has none")
    if params.grammar is not None and not has_grammars:
        raise InvalidRequestError(
            f"grammar kind = {params.grammar.kind!r} needs a grammar compiler, this rank has none"
        )
    params.check_vocabulary(config.vocab_size)
