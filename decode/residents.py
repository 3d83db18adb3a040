"""The requests that have joined a decode rank, running or paused, and what each holds.

joined --> running <----- resumed ------.
             |  `-- paused: moved to host memory, or dropped and recomputed --^
             `--> ended (finished, failed, cancelled); its room goes back when no step in flight writes to it
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..model.cache import Cache
from ..transfer.errors import CorruptBlockError, IntegrityError
from .admission import blocks_needed
from .events import Tokens
from .host_store import HostStore, Parcel
from .lane import Lane, Outcome
from .pause_meter import PauseMeter
from .planner import cached_tokens, max_drafts
from .pressure import Decision, Memory, PausedView, RunningView
from .rooms import Room, Rooms
from .stops import StopChecker

PAUSED_NEWS_S = 5.0
"""How often a paused request is reported, with no tokens, so that nobody takes it for lost."""


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """A request as the planner knows it. Paused ones have no ``room``.

    ``num_known`` tokens of the answer were handled, steps in flight may add ``in_flight`` more. ``num_replayed`` rows
    of a dropped cache are computed again; ``late_from`` is the next row of its tail that the decoder layers have to
    run. Each is None where there is nothing to do.
    """

    lane: Lane
    age: int
    limit: int
    stops: StopChecker
    admitted: float
    room: Room | None
    parcel: Parcel | None = None
    num_known: int = 0
    in_flight: int = 0
    num_replayed: int | None = None
    late_from: int | None = None
    num_verified: int = 0
    num_accepted: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    last_event: float = 0.0
    ended: bool = False

    @property
    def request_id(self) -> str:
        """Its request's id."""
        return self.lane.request.request_id

    @property
    def left(self) -> int:
        """Tokens that its limit allows beyond those known and those that steps in flight may add at most."""
        return self.limit - self.num_known - self.in_flight

    @property
    def num_context(self) -> int:
        """Tokens of prompt and answer that are known."""
        return len(self.lane.request.prompt_ids) + self.num_known

    @property
    def is_whole(self) -> bool:
        """Whether its caches hold all that the next token needs."""
        return self.num_replayed is None and self.late_from is None

    def event(self, outcome: Outcome, count: int, reason: str | None) -> Tokens:
        """What is reported of the first ``count`` ids of ``outcome``."""
        return Tokens(
            request_id=self.request_id,
            ids=outcome.ids[:count],
            logprobs=outcome.logprobs[:count],
            top_logprobs=outcome.top_logprobs[:count],
            finish_reason=reason,
            admitted=self.admitted,
            first_token=self.first_token,
            last_token=self.last_token,
            num_verified=self.num_verified,
            num_accepted=self.num_accepted,
        )


class Residents:
    """All of them, oldest first, and the memory they hold."""

    def __init__(self, cache: Cache, rooms: Rooms, store: HostStore) -> None:
        self._cache = cache
        self._rooms = rooms
        self._store = store
        self._block_tokens = cache.layout.block_tokens
        self._all: dict[str, Resident] = {}
        self._leaving: list[tuple[int, Room]] = []
        self._num_joined = 0
        self.num_pauses = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    @property
    def all(self) -> Collection[Resident]:
        """Running and paused, oldest first."""
        return self._all.values()

    @property
    def running(self) -> list[Resident]:
        """Those with a room, oldest first."""
        return [resident for resident in self._all.values() if resident.room is not None]

    @property
    def paused(self) -> list[Resident]:
        """Those without, oldest first."""
        return [resident for resident in self._all.values() if resident.room is None]

    @property
    def num_growing(self) -> int:
        """How many that run may need more blocks."""
        return sum(self._can_grow(resident) for resident in self.running)

    def next_age(self) -> int:
        """The age of who joins next."""
        self._num_joined += 1
        return self._num_joined

    def join(self, resident: Resident) -> None:
        """One more, the youngest."""
        self._all[resident.request_id] = resident

    def end(self, request_id: str, in_flight: int) -> Resident | None:
        """Forget a request; its room goes back when step ``in_flight``, the last that may write to it, is over."""
        resident = self._all.pop(request_id, None)
        if resident is None:
            return None
        resident.ended = True
        self._store.drop(request_id)
        if resident.room is not None:
            self._leaving.append((in_flight, resident.room))
        return resident

    def give_tail(self, resident: Resident) -> None:
        """Its tail has run."""
        if resident.room is not None and resident.room.tail is not None:
            resident.room = self._rooms.give_tail(resident.room)

    def settle(self, done: int) -> None:
        """Step ``done`` and all before it are over: rooms that only they wrote to go back."""
        for last, room in self._leaving:
            if last <= done:
                self._rooms.give(room)
        self._leaving = [(last, room) for last, room in self._leaving if last > done]

    def try_grow(self, num_drafts: int) -> bool:
        """Give everybody the blocks of the next step; False and no change if too few are free or somebody is paused."""
        growth: list[tuple[Resident, int]] = []
        total = 0
        for resident in self._all.values():
            room = resident.room
            if room is None:
                return False
            more = self._need_blocks(resident, num_drafts) - len(room.blocks)
            if more > 0:
                growth.append((resident, more))
                total += more
        if total > self._rooms.free_blocks:
            return False
        for resident, more in growth:
            assert resident.room is not None
            resident.room = self._taken(self._rooms.grow(resident.room, more), resident.request_id)
        return True

    def views(self, num_drafts: int) -> tuple[list[RunningView], list[PausedView]]:
        """What ``pressure.decide`` sees, if the next step may verify ``num_drafts``."""
        running: list[RunningView] = []
        paused: list[PausedView] = []
        for resident in self._all.values():
            need = self._need_blocks(resident, num_drafts)
            grow = self._can_grow(resident)
            room = resident.room
            if room is None:
                paused.append(
                    PausedView(
                        request_id=resident.request_id,
                        age=resident.age,
                        need_blocks=need,
                        can_grow=grow,
                    )
                )
            else:
                running.append(
                    RunningView(
                        request_id=resident.request_id,
                        age=resident.age,
                        num_tokens=resident.num_context,
                        num_blocks=len(room.blocks),
                        need_blocks=max(need, len(room.blocks)),
                        can_grow=grow,
                        movable=resident.is_whole,
                    )
                )
        return running, paused

    def memory(self, *, free_places: int, arriving_growing: int, wanted_blocks: int) -> Memory:
        """What is free."""
        layout = self._cache.layout
        return Memory(
            free_blocks=self._rooms.free_blocks,
            free_slots=self._rooms.free_slots,
            free_places=free_places,
            free_host_bytes=self._store.free_bytes,
            block_bytes=layout.block_bytes,
            slot_bytes=layout.slot_bytes,
            arriving_growing=arriving_growing,
            wanted_blocks=wanted_blocks,
        )

    def apply(self, decision: Decision, meter: PauseMeter) -> None:
        """Carry a decision out. No step in flight may contain who is paused."""
        for pause in decision.pauses:
            self._pause(self._all[pause.request_id], pause.means == "move", meter)
        for request_id, num_blocks in decision.growth.items():
            resident = self._all[request_id]
            assert resident.room is not None
            resident.room = self._taken(self._rooms.grow(resident.room, num_blocks), request_id)
        for request_id, num_blocks in decision.resumptions.items():
            self._resume(self._all[request_id], num_blocks)

    def paused_news(self, now: float) -> list[Tokens]:
        """Whoever waits for tokens of a paused request hears now and then that it is still here."""
        news: list[Tokens] = []
        for resident in self.paused:
            if now - resident.last_event >= PAUSED_NEWS_S:
                resident.last_event = now
                news.append(resident.event(Outcome(lane=resident.lane), 0, None))
        return news

    def check_integrity(self, arriving: Iterable[Room]) -> None:
        """Raise IntegrityError unless rooms and host memory are what is owned; ``arriving`` are others' rooms."""
        own = [resident.room for resident in self._all.values() if resident.room is not None]
        self._rooms.check_integrity([*arriving, *own, *(room for _, room in self._leaving)])
        self._store.check_integrity(
            {name for name, resident in self._all.items() if resident.parcel is not None}
        )

    def _pause(self, resident: Resident, move: bool, meter: PauseMeter) -> None:
        room = resident.room
        assert room is not None and resident.in_flight == 0
        if move:
            began = time.perf_counter()
            resident.parcel = self._store.open(resident.request_id, len(room.blocks))
            resident.parcel.save(self._cache, room)
            meter.moved(resident.parcel.num_bytes, time.perf_counter() - began)
        else:
            resident.num_replayed, resident.late_from = 0, None
        resident.room = None
        self.num_pauses += 1
        self._rooms.give(room)

    def _resume(self, resident: Resident, num_blocks: int) -> None:
        room = self._taken(self._rooms.try_take(num_blocks), resident.request_id)
        parcel, resident.parcel = resident.parcel, None
        self._store.drop(resident.request_id)
        if parcel is not None:
            try:
                parcel.load(self._cache, room)
            except CorruptBlockError:  # host memory forgot it: its tokens did not
                resident.num_replayed = 0
        if resident.num_replayed is not None:
            self._cache.clear_slot(room.slot)
        resident.room = room
        resident.lane.slot = room.slot

    def _taken(self, room: Room | None, request_id: str) -> Room:
        if room is None:
            raise IntegrityError(f"memory for {request_id!r} was decided on and is not there")
        return room

    def _need_blocks(self, resident: Resident, num_drafts: int) -> int:
        drafts = max_drafts(resident.left, num_drafts)
        tokens = cached_tokens(
            resident.num_context, resident.in_flight, -1 if drafts is None else drafts
        )
        return -(-tokens // self._block_tokens)

    def _can_grow(self, resident: Resident) -> bool:
        most = blocks_needed(
            len(resident.lane.request.prompt_ids), resident.limit, self._block_tokens
        )
        return resident.room is None or len(resident.room.blocks) < most
