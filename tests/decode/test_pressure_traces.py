"""The deciders of admission and pressure together, on random traces through a model of a rank's memory."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decode.admission import Demand, Supply, blocks_needed, count_admissible
from headrace.decode.pressure import Memory, PauseCosts, PausedView, RunningView, decide

BLOCK_TOKENS, DRAFTS = 4, 2
COSTS = PauseCosts(byte_s=1e-5, row_s=1e-4)  # long answers are moved, short ones recomputed


@dataclass(kw_only=True)
class Job:
    """A request of the model: it arrives, is read for ``read_steps``, joins, and then runs."""

    overdue: bool
    prompt: int
    limit: int
    read_steps: int
    age: int = 0
    output: int = 0
    blocks: int = 0
    parcel_bytes: int = 0
    num_pauses: int = 0
    paused: bool = False

    @property
    def most(self) -> int:
        return blocks_needed(self.prompt, self.limit, BLOCK_TOKENS)

    @property
    def need(self) -> int:
        ahead = min(self.limit, self.output + 1 + DRAFTS)
        return max(self.blocks, blocks_needed(self.prompt, ahead, BLOCK_TOKENS))


@dataclass(kw_only=True)
class World:
    """A rank's memory, driven by the deciders alone; every promise of the policy is checked in every step."""

    jobs: list[Job]
    num_blocks: int
    places: int
    host_bytes: int
    accept: Callable[[], int]
    reading: list[Job] = field(default_factory=list[Job])
    inside: list[Job] = field(default_factory=list[Job])
    num_joined: int = 0
    num_tokens: int = 0
    num_pauses: int = 0

    def free(self) -> int:
        return self.num_blocks - sum(job.blocks for job in self.reading + self.inside)

    def free_host(self) -> int:
        return self.host_bytes - sum(job.parcel_bytes for job in self.inside)

    def admit(self, waiting: list[Job]) -> None:
        held = [job for job in self.inside if not job.paused] + self.reading
        supply = Supply(
            num_blocks=self.num_blocks,
            free_blocks=self.free(),
            free_slots=self.places - len(held),
            free_places=self.places - len(held),
            num_growing=sum(job.blocks < job.most for job in held),
            num_paused=sum(job.paused for job in self.inside),
        )
        demands = [
            Demand(
                num_blocks=job.need,
                can_grow=job.need < job.most,
                overdue=job.overdue,
            )
            for job in waiting
        ]
        for job in waiting[: count_admissible(demands, supply)]:
            job.blocks = job.need
            self.reading.append(job)
        del waiting[: count_admissible(demands, supply)]

    def relieve(self, waiting: list[Job]) -> str | None:
        running = [job for job in self.inside if not job.paused]
        oldest = self.inside[0] if self.inside else None
        decision = decide(
            [
                RunningView(
                    request_id=str(job.age),
                    age=job.age,
                    num_tokens=job.prompt + job.output,
                    num_blocks=job.blocks,
                    need_blocks=job.need,
                    can_grow=job.need < job.most,
                )
                for job in running
            ],
            [
                PausedView(
                    request_id=str(job.age),
                    age=job.age,
                    need_blocks=job.need,
                    can_grow=job.need < job.most,
                )
                for job in self.inside
                if job.paused
            ],
            Memory(
                free_blocks=self.free(),
                free_slots=self.places - len(running) - len(self.reading),
                free_places=self.places - len(running) - len(self.reading),
                free_host_bytes=self.free_host(),
                block_bytes=10,
                slot_bytes=5,
                arriving_growing=sum(job.blocks < job.most for job in self.reading),
                wanted_blocks=waiting[0].need if waiting and waiting[0].overdue else 0,
            ),
            COSTS,
        )
        by_name = {str(job.age): job for job in self.inside}
        for pause in decision.pauses:
            job = by_name[pause.request_id]
            assert job is not oldest and not job.paused
            job.parcel_bytes = job.blocks * 10 + 5 if pause.means == "move" else 0
            job.paused, job.blocks = True, 0
            job.num_pauses += 1
            self.num_pauses += 1
        for name, count in decision.growth.items():
            by_name[name].blocks += count
        for name, count in decision.resumptions.items():
            by_name[name].paused, by_name[name].blocks = False, count
            by_name[name].parcel_bytes = 0
        assert self.free() >= 0 and self.free_host() >= 0
        ages = [job.age for job in self.inside if not job.paused]
        assert all(job.age > max(ages, default=0) for job in self.inside if job.paused)
        assert decision.stalled in (None, str(oldest.age) if oldest else None)
        return decision.stalled

    def step(self, waiting: list[Job]) -> None:
        self.admit(waiting)
        for job in self.reading:
            if job.read_steps == 0:
                self.num_joined += 1
                job.age = self.num_joined
                self.inside.append(job)
        self.reading = [job for job in self.reading if job.read_steps]
        for job in self.reading:
            job.read_steps -= 1
        stalled = self.relieve(waiting)
        for job in self.inside:
            if not job.paused and str(job.age) != stalled:
                assert job.blocks >= job.need
                count = min(1 + self.accept(), job.limit - job.output)
                job.output += count
                self.num_tokens += count
        self.inside = [job for job in self.inside if job.output < job.limit]

    def run(self) -> None:
        waiting = list(self.jobs)
        total = sum(job.limit + job.read_steps + 2 for job in self.jobs)
        for _ in range(total):  # at worst one after the other
            if not (waiting or self.reading or self.inside):
                return
            self.step(waiting)
        raise AssertionError("requests are left that never end")


def worlds(read_steps: int, overdue: bool) -> st.SearchStrategy[World]:
    @st.composite
    def draw_world(draw: st.DrawFn) -> World:
        shapes = draw(
            st.lists(
                st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(0, read_steps)),
                min_size=1,
                max_size=12,
            )
        )
        rng = draw(st.randoms(use_true_random=False))
        jobs = [
            Job(
                overdue=overdue and rng.random() < 0.5,
                prompt=prompt,
                limit=limit,
                read_steps=steps,
            )
            for prompt, limit, steps in shapes
        ]
        most = max(job.most for job in jobs)
        return World(
            jobs=jobs,
            num_blocks=draw(st.integers(most, 2 * most)),
            places=draw(st.integers(1, 8)),
            host_bytes=draw(st.integers(0, 400)),
            accept=lambda: rng.randint(0, DRAFTS),
        )

    return draw_world()


@settings(max_examples=300, deadline=None)
@given(world=worlds(read_steps=0, overdue=False))
def test_everybody_ends_and_nobody_thrashes(world: World) -> None:
    world.run()
    # after an entry some request gets a block's worth of tokens before memory is short again
    shortages = 1 + world.num_tokens // BLOCK_TOKENS
    assert world.num_pauses <= (world.places - 1) * shortages
    assert world.jobs[0].num_pauses == 0


@settings(max_examples=300, deadline=None)
@given(world=worlds(read_steps=5, overdue=True))
def test_everybody_ends_with_slow_reads_and_overdue_arrivals(world: World) -> None:
    world.run()


@settings(max_examples=100, deadline=None)
@given(world=worlds(read_steps=3, overdue=False))
def test_whose_longest_answers_fit_together_are_never_paused(world: World) -> None:
    world.num_blocks = sum(job.most for job in world.jobs)
    world.run()
    assert world.num_pauses == 0
