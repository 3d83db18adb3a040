"""One decode rank: takes in what the inbox has checked, plans steps, and delivers what they give.

A step is two launches on the rank's stream, and the two loops differ only in when its results are handled:

    plain       forward N | sampling N | handle N | plan N+1 | forward N+1 | ...
    overlapped  forward N | sampling N | forward N+1 ...........| sampling N+1
                           plan N+1 ^     ^ handle N, while forward N+1 runs

Both give the same tokens: what a step computes depends on the lanes alone, which the stream keeps in order.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.expert_flip import Flip
from ..transfer.backend import TransferBackend
from ..transfer.errors import HeadraceError, InvalidRequestError
from ..transfer.messages import Handoff
from ..transfer.request import Request
from .admission import blocks_needed, check_fits, output_limit
from .arrival import room_of
from .config import DecodeConfig
from .counters import Counters, StepRecord
from .entrance import Entrance, Entrant, check_sampling
from .events import DecodeEvent, DecodeFailed
from .executor import Executor, Network, Pass, Sampled
from .grammar_compiler import GrammarCompiler
from .host_store import HostStore
from .inbox import Inbox
from .keeper import Keeper
from .lane import Lane, Outcome, StepPlan
from .pause_meter import PauseMeter
from .pressure import decide
from .proposers import make_proposer
from .residents import Resident, Residents
from .rooms import Rooms
from .speculation import Speculation
from .step_cost import StepCost
from .stops import StopChecker
from .stream import InlineStream, Launched, Stream, ThreadStream, launch_window
from .turns import plan_step, wants_pass


@dataclass(slots=True, kw_only=True)
class Step:
    """A step on its way: number ``number``, planned in ``plan_s`` seconds, and what was launched of it."""

    number: int
    plan: StepPlan
    plan_s: float
    residents: dict[Lane, Resident]
    forward: Launched[Pass]
    sampling: Launched[Sampled] | None = None


class DecodeRank:
    """All methods from the loop's thread. ``clock`` stamps timelines, ``timer`` measures deadlines.

    ``pieces`` are the bytes of every token id, for stop strings; ``grammars`` compiles what requests ask for;
    ``cost`` is what steps cost, for choosing how many drafts to verify; ``rank`` is our place in the instance;
    ``keeper`` gets every answer that is over.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        backend: TransferBackend,
        config: DecodeConfig,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        *,
        pieces: Sequence[bytes] = (),
        grammars: GrammarCompiler | None = None,
        cost: StepCost | None = None,
        rank: int = 0,
        keeper: Keeper | None = None,
    ) -> None:
        self.name = name
        self._network = network
        self._config = config
        self._clock = clock
        self._timer = timer
        self._layout = network.cache.layout
        self._pieces = pieces
        self._has_grammars = grammars is not None
        self._keeper = keeper or Keeper(None, network.cache, "off")
        self._rooms = Rooms(network.cache)
        self._entrance = Entrance(self._rooms, grammars)
        self._inbox = Inbox(backend, network.cache, self._rooms, config)
        store = HostStore(self._layout, config.host_cache_mib << 20)
        self._residents = Residents(network.cache, self._rooms, store)
        proposer = make_proposer(network.drafter, config.speculation, network.config.eos_token_id)
        self._speculation = Speculation(
            config.speculation, proposer.num_drafts, cost, free=proposer.is_free, rank=rank
        )
        self._executor = Executor(name, network, proposer, time.perf_counter)
        self._stream: Stream = ThreadStream(name) if config.overlap else InlineStream()
        self._current: Step | None = None
        self._num_launched = self._num_done = 0
        self._outlook_s = 0.0
        self._meter = PauseMeter()
        self._events: list[DecodeEvent] = []
        self._counters = Counters(proposer.num_drafts)

    def submit(self, request: Request, handoff: Handoff) -> None:
        """Queue a handoff. Raises PromptTooLongError or InvalidRequestError, and then keeps nothing of it.

        What is wrong with the handoff or the grammar comes as DecodeFailed.
        """
        if self._knows(request.request_id):
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
        check_sampling(
            request,
            self._network.config,
            has_text=bool(self._pieces),
            has_grammars=self._has_grammars,
        )
        limit = self._limit(request)
        at_first = blocks_needed(length, min(limit, 1), block_tokens)
        most = blocks_needed(length, limit, block_tokens)
        self._inbox.add(request, handoff, at_first, most > at_first, self._timer())
        self._entrance.expect(request)

    def cancel(self, request_id: str) -> None:
        """Free everything of a request, in whatever state it is; no event follows. Unknown ids are fine.

        Memory that a step in flight may write to is freed when that step is over.
        """
        self._inbox.cancel(request_id)
        self._leave(request_id)
        self._events = [event for event in self._events if event.request_id != request_id]

    @property
    def outlook(self) -> list[float]:
        """What the other ranks are told before a turn: whether there is work, then the load of the next step."""
        began = time.perf_counter()
        running = self._residents.running
        load = self._speculation.load(
            len(running), sum(resident.num_context for resident in running)
        )
        wants = wants_pass(running) or len(running) < len(self._residents)
        has_work = bool(self._events or self._current or wants)
        told = [float(has_work), float(wants), *load]
        self._outlook_s = time.perf_counter() - began
        return told

    def pump(self) -> None:
        """Move arrivals, and take those that are ready into the batch. Never blocks."""
        self._inbox.poll(
            self._timer(),
            self._max_requests() - len(self._residents) - len(self._entrance),
            self._residents.num_growing,
            len(self._residents.paused),
        )
        for ready in self._inbox.take_ready():
            self._entrance.arrive(ready)
        for entrant in self._entrance.take():
            self._join(entrant)
        self._events += self._residents.paused_news(self._timer())
        for failure in (*self._inbox.take_failures(), *self._entrance.take_failures()):
            self._entrance.forget(failure.request_id)
            self._fail(failure.request_id, failure.error)

    def step(
        self, outlooks: Sequence[Sequence[float]] = (), flips: Sequence[Flip] = ()
    ) -> list[DecodeEvent]:
        """One turn of the instance: one forward pass if any of its ranks wants one, of zero spans if we do not.

        ``flips`` run directly before that pass, which there is then in any case.
        """
        outlooks = outlooks or [self.outlook]
        launched = None
        if flips or any(outlook[1] for outlook in outlooks):
            began = time.perf_counter()
            budget = self._speculation.budget([outlook[2:] for outlook in outlooks])
            stalled = self._relieve(budget.max_drafts)
            plan, residents = plan_step(self._residents.running, budget, stalled, self._config)
            plan_s = self._outlook_s + time.perf_counter() - began
            launched = self._launch(plan, residents, plan_s, flips)
        self._finish_current()
        if launched is not None:
            self._launch_sampling(launched)
            self._current = launched
            if not self._config.overlap:
                self._finish_current()
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block and slot is free or owned exactly once."""
        arriving = [room for state in self._inbox.states if (room := room_of(state)) is not None]
        self._residents.check_integrity([*arriving, *self._entrance.rooms])

    def stats(self) -> dict[str, Any]:
        """Counts for the router and the operator."""
        running = self._residents.running
        return {
            **self._inbox.stats(),
            "compiling": len(self._entrance),
            "running": len(running),
            "paused": len(self._residents.paused),
            "pauses": self._residents.num_pauses,
            "context_tokens": sum(resident.num_context for resident in running),
            "free_blocks": self._rooms.free_blocks,
            "free_slots": self._rooms.free_slots,
            **self._counters.stats(),
        }

    def close(self) -> None:
        """End the rank's threads and the process that compiles grammars."""
        self._stream.close()
        self._executor.close()
        self._entrance.close()
        self._keeper.close()

    def _knows(self, request_id: str) -> bool:
        return any(request_id in part for part in (self._residents, self._inbox, self._entrance))

    def _limit(self, request: Request) -> int:
        return output_limit(
            len(request.prompt_ids),
            request.sampling.max_tokens,
            self._network.config.max_position_embeddings,
        )

    def _max_requests(self) -> int:
        running = self._residents.running
        context = sum(resident.num_context for resident in running) // max(1, len(running))
        return self._speculation.max_requests(self._config.max_batch, context)

    def _join(self, entrant: Entrant) -> None:
        request = entrant.request
        lane = Lane(
            request=request,
            slot=entrant.room.slot,
            tail_start=entrant.tail_start,
            tail=entrant.room.tail or 0,
            grammar=entrant.grammar,
        )
        self._executor.enter(lane)
        limit = self._limit(request)
        stops = StopChecker(
            request.sampling, self._network.config.eos_token_id, limit, self._pieces
        )
        self._residents.join(
            Resident(
                lane=lane,
                age=self._residents.next_age(),
                limit=limit,
                stops=stops,
                admitted=self._clock(),
                last_event=self._timer(),
                room=entrant.room,
                late_from=entrant.late_from,
            )
        )

    def _relieve(self, num_drafts: int) -> str | None:
        """Make room for the next step: growth, pauses, resumptions. Returns who has to wait a step, if anybody."""
        wanted = self._inbox.wanted_blocks(self._timer())
        if not wanted and self._residents.try_grow(num_drafts):
            return None  # nothing to decide
        while True:
            running, paused = self._residents.views(num_drafts)
            memory = self._residents.memory(
                free_places=self._config.max_batch
                - len(running)
                - len(self._entrance)
                - self._inbox.num_arriving,
                arriving_growing=self._inbox.num_growing + len(self._entrance),
                wanted_blocks=wanted,
            )
            decision = decide(running, paused, memory, self._meter.costs)
            if not (decision.pauses and self._current):
                break
            self._finish_current()  # whoever is paused must not be in flight; afterwards memory looks different
        self._residents.apply(decision, self._meter)
        return decision.stalled

    def _launch(
        self,
        plan: StepPlan,
        residents: dict[Lane, Resident],
        plan_s: float,
        flips: Sequence[Flip],
    ) -> Step:
        for turn in plan.turns:
            residents[turn.lane].in_flight += 1 + turn.max_drafts
        self._num_launched += 1
        with launch_window():
            forward = self._stream.launch(lambda: self._executor.forward(plan, flips))
        return Step(
            number=self._num_launched,
            plan=plan,
            plan_s=plan_s,
            residents=residents,
            forward=forward,
        )

    def _launch_sampling(self, step: Step) -> None:
        over = frozenset(lane for lane, resident in step.residents.items() if resident.ended)
        with launch_window():
            step.sampling = self._stream.launch(
                lambda: self._executor.sample(step.forward.result(), over)
            )

    def _finish_current(self) -> None:
        """Wait for the step in flight, if there is one, and deliver what it gave."""
        step, self._current = self._current, None
        if step is None:
            return
        assert step.sampling is not None
        sampled = step.sampling.result()
        self._num_done = step.number
        self._residents.settle(self._num_done)
        for turn in step.plan.turns:
            step.residents[turn.lane].in_flight -= 1 + turn.max_drafts
        now = self._clock()
        num_tokens = 0
        for outcome in sampled.outcomes:
            resident = step.residents[outcome.lane]
            if not resident.ended:
                num_tokens += self._deliver(resident, outcome, now)
        self._observe(step, sampled, num_tokens)

    def _deliver(self, resident: Resident, outcome: Outcome, now: float) -> int:
        """Report new tokens, up to the one that ends the answer; returns how many."""
        request_id = resident.request_id
        if outcome.error is not None:
            self._leave(request_id)
            self._fail(request_id, outcome.error)
            return 0
        self._residents.give_tail(resident)
        count, reason = resident.stops.push(outcome.ids)
        resident.num_known += count
        resident.num_verified += outcome.num_verified
        resident.num_accepted += len(outcome.ids) - 1
        resident.first_token = resident.first_token or now
        resident.last_token, resident.last_event = now, self._timer()
        if reason is not None:
            self._counters.num_finished += 1
            ids = resident.lane.output_ids[: resident.num_known]
            self._keeper.keep(resident.lane.request, ids, resident.room)
            self._leave(request_id)
        self._events.append(resident.event(outcome, count, reason))
        return count

    def _observe(self, step: Step, sampled: Sampled, num_tokens: int) -> None:
        done = step.forward.result()
        assert step.sampling is not None
        record = StepRecord(
            num_requests=len(step.plan.turns),
            num_rows=sum(done.num_drafts) + len(done.num_drafts),
            num_replayed=sum(replay.count for replay in step.plan.replays),
            num_tokens=num_tokens,
            plan_s=step.plan_s,
            forward_s=step.forward.seconds,
            sample_s=step.sampling.seconds - sampled.draft_s,
            draft_s=sampled.draft_s,
        )
        outcomes = [outcome for outcome in sampled.outcomes if outcome.ids]
        self._counters.step(record, [(o.num_verified, len(o.ids) - 1) for o in outcomes])
        if any(replay.late for replay in step.plan.replays):
            return  # such rows run half of the layers: neither figure is for them
        if record.num_replayed > record.num_rows:
            self._meter.recomputed(record.num_replayed + record.num_rows, record.forward_s)
        elif record.num_rows and not record.num_replayed:
            context = sum(resident.num_context for resident in step.residents.values())
            confidences = sampled.confidences if step.plan.draft else None
            self._speculation.observe(record, context, outcomes, confidences)

    def _leave(self, request_id: str) -> None:
        """Take a request out of the rank, once its bytes are here."""
        self._entrance.forget(request_id)
        self._residents.end(request_id, self._num_launched)
        self._residents.settle(self._num_done)

    def _fail(self, request_id: str, error: HeadraceError) -> None:
        self._counters.num_failed += 1
        self._events.append(DecodeFailed(request_id=request_id, error=error))
