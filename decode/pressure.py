"""What a decode rank does when its memory is short: whom it pauses, by which means, and who goes on. Pure.

The policy, by age (the order in which requests joined the batch, kept through pauses):

1. Whoever runs is older than whoever is paused. So victims are the youngest, those paused resume oldest first, and the
   oldest request is never paused. It makes progress in every step, hence every request becomes the oldest, and ends.
2. Somebody is paused only if the growth of those who stay does not fit, if an overdue arrival cannot land (see
   ``admission``), or by rule 1, when an arrival joined that was being read while older ones were paused.
3. A request resumes only if it leaves the headroom that admission asks for, one free block for everyone who may still
   grow, and never in a step in which memory was short. So a pause costs at least ``block_tokens`` new tokens of some
   request since the last one: there is no thrashing. When nobody runs, the oldest resumes if it fits at all.
4. The cheaper means is taken: its cache is *moved* to host memory (its bytes, out and in again), or dropped and
   *recomputed* from its tokens. What the host budget does not hold, or is not whole yet, is recomputed.

A paused request keeps everything but its room: its place in the order, its tokens, its grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Means = Literal["move", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningView:
    """A request that holds a room of ``num_blocks`` blocks and needs ``need_blocks`` in all for its next step.

    ``num_tokens`` have KV. ``can_grow``: its longest answer needs more than ``need_blocks``. ``movable``: its cache is
    whole, which it is not while it is being recomputed.
    """

    request_id: str
    age: int
    num_tokens: int
    num_blocks: int
    need_blocks: int
    can_grow: bool
    movable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedView:
    """A request without a room, which needs ``need_blocks`` to resume."""

    request_id: str
    age: int
    need_blocks: int
    can_grow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is free before anything is decided.

    ``arriving_growing``: arrivals that hold a room but have not joined, and may grow. ``wanted_blocks``: what an
    overdue arrival needs to land, 0 if there is none.
    """

    free_blocks: int
    free_slots: int
    free_places: int
    free_host_bytes: int
    block_bytes: int
    slot_bytes: int
    arriving_growing: int = 0
    wanted_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseCosts:
    """Measured: ``byte_s`` seconds per byte between cache and host, one way; ``row_s`` seconds per recomputed row."""

    byte_s: float
    row_s: float

    def cheaper(self, num_bytes: int, num_tokens: int) -> Means:
        """The means for a request of ``num_tokens`` whose room has ``num_bytes``."""
        return "move" if 2 * num_bytes * self.byte_s <= num_tokens * self.row_s else "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """``request_id`` gives its room back. ``move``: after a copy of it was made."""

    request_id: str
    means: Means


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """To be done in this order: pauses, growth (blocks to add, by request), resumptions (blocks to take, by request).

    ``stalled`` is the oldest request when even it has to wait a step, because arrivals hold the blocks.
    """

    pauses: tuple[Pause, ...] = ()
    growth: dict[str, int] = field(default_factory=dict[str, int])
    resumptions: dict[str, int] = field(default_factory=dict[str, int])
    stalled: str | None = None


def decide(
    running: Sequence[RunningView],
    paused: Sequence[PausedView],
    memory: Memory,
    costs: PauseCosts,
) -> Decision:
    """What to do before the next step. Both sequences are in order of age, oldest first."""
    stay = list(running)
    victims: list[RunningView] = []
    free = memory.free_blocks - sum(view.need_blocks - view.num_blocks for view in stay)

    def pause_youngest() -> None:
        nonlocal free
        victims.append(stay.pop())
        free += victims[-1].need_blocks  # its room comes back, and its growth is not needed

    while stay and paused and stay[-1].age > paused[0].age:
        pause_youngest()
    num_before = len(victims)
    while len(stay) > 1 and free < 0:
        pause_youngest()
    if memory.wanted_blocks <= free + sum(view.need_blocks for view in stay[1:]):
        while free < memory.wanted_blocks:
            pause_youngest()
    short = free < 0 or len(victims) > num_before
    stalled = stay[0].request_id if free < 0 else None
    resumptions = {} if short else _resumptions(stay, paused, len(victims), free, memory)
    return Decision(
        pauses=_pauses(victims, memory, costs),
        growth={
            view.request_id: view.need_blocks - view.num_blocks
            for view in stay
            if view.need_blocks > view.num_blocks and view.request_id != stalled
        },
        resumptions=resumptions,
        stalled=stalled,
    )


def _resumptions(
    stay: Sequence[RunningView],
    paused: Sequence[PausedView],
    num_victims: int,
    free: int,
    memory: Memory,
) -> dict[str, int]:
    """Blocks of those paused who go on now: the oldest of them, as far as memory, slots and places reach."""
    growing = memory.arriving_growing + sum(view.can_grow for view in stay)
    places = min(memory.free_slots, memory.free_places) + num_victims
    alone = not stay
    chosen: dict[str, int] = {}
    for view in paused[: max(0, places)]:
        headroom = 0 if alone else growing + view.can_grow
        if view.need_blocks + headroom > free:
            break
        chosen[view.request_id] = view.need_blocks
        free -= view.need_blocks
        growing += view.can_grow
        alone = False
    return chosen


def _pauses(victims: Sequence[RunningView], memory: Memory, costs: PauseCosts) -> tuple[Pause, ...]:
    """How each victim is paused: the older ones, which come back first, have the first claim on host memory."""
    host = memory.free_host_bytes
    pauses: list[Pause] = []
    for view in reversed(victims):
        num_bytes = view.num_blocks * memory.block_bytes + memory.slot_bytes
        means = costs.cheaper(num_bytes, view.num_tokens) if view.movable else "recompute"
        if num_bytes > host:
            means = "recompute"
        if means == "move":
            host -= num_bytes
        pauses.append(Pause(request_id=view.request_id, means=means))
    return tuple(pauses)
