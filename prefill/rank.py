"""One prefill rank: applies the scheduler's plans to the network, and hands finished prompts to the outbox."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..model.batch import Logits, Span
from ..model.cache import Cache, IdPool
from ..model.config import ModelConfig
from ..model.expert_flip import Flip
from ..transfer.backend import TransferBackend
from ..transfer.errors import (
    DeadlineError,
    IntegrityError,
    InvalidRequestError,
    PromptTooLongError,
)
from ..transfer.request import PromptLogprob, Request
from ..transfer.tiers.stack import TierStack
from .config import PrefillConfig
from .events import Offered, PrefillEvent, PrefillFailed
from .hits import Prefixes
from .logprobs import prompt_logprobs
from .outbox import Outbox
from .prefix import PrefixPool
from .prompts import PromptQueue, PromptState, Queued, Running, num_rows
from .scheduler import Chunk, Prompt, StepPlan, Supply, blocks_for, plan_step
from .tier_loads import TierLoads

HISTORY_TOKENS = 3  # ids before a span that n-gram layers look at


class Network(Protocol):
    """What a rank needs of the model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def cache(self) -> Cache: ...
    def forward(self, spans: Sequence[Span]) -> Tensor: ...


class PrefillRank:
    """All methods from the loop's thread. ``clock`` stamps timelines, ``timer`` measures leases and deadlines.

    ``tiers`` keep blocks that no longer fit here.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        backend: TransferBackend,
        config: PrefillConfig,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        tiers: TierStack | None = None,
    ) -> None:
        self.name = name
        self._network = network
        self._config = config
        self._clock = clock
        self._timer = timer
        cache = network.cache
        self._layout = cache.layout
        self._block_pool = PrefixPool(cache.blocks.shape[0], "prefill block")
        self._loads = TierLoads(tiers, cache, self._block_pool)
        self._slot_pool = IdPool(cache.slots.shape[0], "prefill slot")
        self._prefixes = Prefixes(config.prefix_cache, network.config, cache.layout)
        self._prompts = PromptQueue()
        self._outbox = Outbox(backend, cache, self._block_pool, self._slot_pool, config.lease_s)
        self._events: list[PrefillEvent] = []
        self._num_steps = self._num_rows = self._num_failed = 0
        self._num_asked = self._num_hit = self._num_replayed = 0

    def submit(self, request: Request) -> None:
        """Queue a prompt. Raises PromptTooLongError or InvalidRequestError, and then keeps nothing of it."""
        model = self._network.config
        wrong = [token for token in request.prompt_ids if not 0 <= token < model.vocab_size]
        if wrong:
            raise InvalidRequestError(
                f"prompt_ids hold {wrong[0]}, which is not allowed: an id from 0 to {model.vocab_size - 1}"
            )
        request.sampling.check_vocabulary(model.vocab_size)
        if request.is_exact and self._layout.tail_row_bytes:
            raise InvalidRequestError(
                f"prompt_logprobs = {request.sampling.prompt_logprobs}, exact = {request.exact} is not allowed with"
                " split = 'seam': all rows would have to run the decoder layers, which prefill has not; serve with"
                " split = 'classic'"
            )
        length, context = len(request.prompt_ids), model.max_position_embeddings
        if length >= context:
            raise PromptTooLongError(
                f"prompt of {length} tokens leaves no room for an answer in a context of {context} tokens: "
                f"shorten it to at most {context - 1}"
            )
        needed = blocks_for(num_rows(request), self._layout.block_tokens)
        if needed > self._block_pool.capacity:
            raise PromptTooLongError(
                f"prompt of {length} tokens needs {needed} blocks of {self._layout.block_tokens} tokens, but the "
                f"prefill cache has {self._block_pool.capacity}: shorten it, or raise num_blocks of the prefill pool"
            )
        self._prompts.add(request, self._prefixes.keys(request), self._timer())

    def cancel(self, request_id: str) -> None:
        """Free everything of a request, in whatever state it is; no event follows. Unknown ids are fine."""
        self._free(self._prompts.drop(request_id))
        self._loads.forget(request_id)
        self._outbox.cancel(request_id)
        self._events = [event for event in self._events if event.request_id != request_id]

    @property
    def has_work(self) -> bool:
        """Whether a step would run, admit or report anything. A queue that only waits for memory is no work."""
        plan = self._plan()
        return bool(self._events or plan.admitted or plan.chunks)

    @property
    def outlook(self) -> tuple[float]:
        """What the other ranks are told before a turn: only whether there is work here."""
        return (float(self.has_work),)

    def pump(self) -> None:
        """Answer readers, expire leases, give up prompts that waited too long. Never blocks."""
        now = self._timer()
        self._outbox.poll(now)
        self._loads.poll()
        for prompt in self._prompts.all:
            if isinstance(prompt, Queued):
                self._loads.look_up(prompt.request.request_id, prompt.keys)
            waited = now - prompt.since
            if isinstance(prompt, Queued) and waited > self._config.queue_timeout_s:
                self._give_up(
                    prompt,
                    f"phase prefill queue: waited {waited:.1f} s, queue_timeout_s = "
                    f"{self._config.queue_timeout_s}; add prefill ranks or send less",
                )
            elif waited > (prompt.request.deadline_s or math.inf):
                self._give_up(
                    prompt,
                    f"phase prefill: {waited:.1f} s after its arrival, deadline_s = {prompt.request.deadline_s:g} of "
                    "the request is over; add prefill ranks, send less, or give it more time",
                )

    def step(
        self,
        outlooks: Sequence[Sequence[float]] = (),
        flips: Sequence[Flip] = (),
    ) -> list[PrefillEvent]:
        """Run one plan: exactly one forward pass, after ``flips``; of zero spans when there is nothing to run."""
        del outlooks  # every rank plans for itself
        for flip in flips:
            flip()
        plan = self._plan()
        for request_id in plan.admitted:
            self._admit(request_id)
        for chunk in plan.chunks:
            self._extend(chunk)
        spans, began = [self._span(chunk) for chunk in plan.chunks], time.perf_counter()
        logits = self._network.forward(spans)
        num_rows_run = sum(chunk.count for chunk in plan.chunks)
        self._loads.computed(num_rows_run, time.perf_counter() - began)
        first = 0
        for chunk in plan.chunks:
            self._publish(chunk)
            logprobs: tuple[PromptLogprob, ...] = ()
            request = self._prompts.get_running(chunk.request_id).request
            if (k := request.sampling.prompt_logprobs) is not None:
                after = request.prompt_ids[chunk.start + 1 : chunk.start + chunk.count + 1]
                logprobs = prompt_logprobs(logits[first : first + chunk.count], after, k)
                first += chunk.count
            self._prompts.advance(chunk.request_id, chunk.start, chunk.count, logprobs)
        self._num_steps += 1
        self._num_rows += num_rows_run
        self._events += [self._offer(prompt) for prompt in self._prompts.take_finished()]
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close the tiers."""
        self._loads.close()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block and slot is free or owned exactly once."""
        self._outbox.check_integrity()
        owners = [*self._prompts.running, *self._outbox.held]
        owned = [block for owner in owners for block in owner.blocks]
        self._block_pool.check_owned([*owned, *self._loads.blocks])
        self._slot_pool.check_owned([owner.slot for owner in owners])

    def stats(self) -> dict[str, int]:
        """Counts for the router and the operator."""
        running = self._prompts.running
        queued = self._prompts.queued
        return {
            "queued": len(queued),
            "queued_tokens": sum(len(prompt.request.prompt_ids) for prompt in queued),
            "running": len(running),
            "free_blocks": self._block_pool.free,
            "free_slots": self._slot_pool.free,
            "cached_blocks": self._block_pool.num_cached,
            "evicted_blocks": self._block_pool.num_evicted,
            "prompt_tokens": self._num_asked,
            "hit_tokens": self._num_hit,
            "replayed_rows": self._num_replayed,
            "loaded_blocks": self._loads.num_loaded,
            "steps": self._num_steps,
            "rows": self._num_rows,
            "failed": self._num_failed,
            **self._outbox.stats(),
        }

    def _plan(self) -> StepPlan:
        held = [block for prompt in self._prompts.running for block in prompt.blocks]
        shared = self._block_pool.shared(held)
        supply = Supply(
            num_blocks=self._block_pool.capacity - len(shared),
            free_blocks=self._block_pool.free,
            free_slots=self._slot_pool.free,
        )
        return plan_step(
            self._view(shared),
            supply,
            chunk_tokens=self._config.chunk_tokens,
            chunk_pairs=self._config.chunk_pairs,
            block_tokens=self._layout.block_tokens,
        )

    def _view(self, shared: set[int]) -> list[Prompt]:
        """The queue as the scheduler sees it.

        A prompt whose next block another one computes is not in it: it finds that block soon, or computes it itself
        when the other is gone. Of identical prompts one runs.
        """
        view: list[Prompt] = []
        size = self._layout.block_tokens
        coming = {
            key
            for prompt in self._prompts.running
            for key in prompt.keys[max(prompt.num_done, prompt.num_hit) // size :]
        } | self._loads.keys
        for state in self._prompts.all:
            request, blocks, done, keys = state.request, (), 0, state.keys
            if isinstance(state, Running):
                blocks, done = state.blocks, state.num_done
            else:
                hit = self._prefixes.hit(request, keys, self._block_pool)
                blocks, done = hit.blocks, hit.floor
                is_coming = len(blocks) < len(keys) and keys[len(blocks)] in coming
                if is_coming or self._loads.is_loading(request.request_id):
                    continue
                coming.update(keys[len(blocks) :])
            running = isinstance(state, Running)
            view.append(
                Prompt(
                    request_id=request.request_id,
                    num_rows=num_rows(request),
                    num_done=done,
                    num_blocks=len(blocks),
                    num_shared=len(shared.intersection(blocks)) if running else 0,
                    num_unowned=0 if running else self._block_pool.num_unowned(blocks),
                    admitted=running,
                    priority=request.priority,
                )
            )
        return view

    def _admit(self, request_id: str) -> None:
        prompt = self._prompts.get_queued(request_id)
        hit = self._prefixes.hit(prompt.request, prompt.keys, self._block_pool)
        slot = self._slot_pool.try_take(1)
        if slot is None:
            raise IntegrityError(f"{self.name}: the plan admits {request_id!r} without room for it")
        self._network.cache.clear_slot(slot[0])
        self._block_pool.own(hit.blocks)
        self._loads.forget(request_id)
        self._prompts.admit(request_id, hit, slot[0], self._clock())
        self._num_asked += len(prompt.request.prompt_ids)
        self._num_hit += hit.num_tokens
        self._num_replayed += hit.num_tokens - hit.floor

    def _extend(self, chunk: Chunk) -> None:
        blocks = self._block_pool.try_take(chunk.num_blocks)
        if blocks is None:
            raise IntegrityError(f"{self.name}: the plan has no blocks for {chunk}")
        self._prompts.extend(chunk.request_id, blocks)

    def _publish(self, chunk: Chunk) -> None:
        """Blocks that the rows of ``chunk`` filled may be found from now on."""
        prompt, size = self._prompts.get_running(chunk.request_id), self._layout.block_tokens
        first = max(chunk.start, prompt.num_hit) // size
        filled = min((chunk.start + chunk.count) // size, len(prompt.keys))
        for index in range(first, filled):
            self._block_pool.publish(prompt.blocks[index], prompt.keys[index])

    def _give_up(self, prompt: PromptState, reason: str) -> None:
        request_id = prompt.request.request_id
        self._free(self._prompts.drop(request_id))
        self._loads.forget(request_id)
        self._num_failed += 1
        self._events.append(PrefillFailed(request_id=request_id, error=DeadlineError(reason)))

    def _span(self, chunk: Chunk) -> Span:
        prompt = self._prompts.get_running(chunk.request_id)
        request = prompt.request
        ids = request.prompt_ids
        return Span(
            token_ids=ids[chunk.start : chunk.start + chunk.count],
            start=chunk.start,
            history=ids[max(0, chunk.start - HISTORY_TOKENS) : chunk.start],
            slot=prompt.slot,
            blocks=prompt.blocks,
            tail_start=request.tail_start(self._layout.keep),
            floor=prompt.floor,
            known=prompt.num_hit,
            tail=prompt.slot,
            logits=Logits.NONE if request.sampling.prompt_logprobs is None else Logits.ALL,
        )

    def _offer(self, prompt: Running) -> Offered:
        request_id = prompt.request.request_id
        self._loads.keep(prompt.blocks, prompt.keys, prompt.num_hit // self._layout.block_tokens)
        tail_start = max(prompt.request.tail_start(self._layout.keep), prompt.floor)
        tail_start = min(tail_start, prompt.num_done)
        handoff = self._outbox.offer(
            request_id, prompt.num_done, prompt.blocks, prompt.slot, tail_start, self._timer()
        )
        return Offered(
            request_id=request_id,
            handoff=handoff,
            prefill_started=prompt.started,
            offered=self._clock(),
            prompt_logprobs=prompt.logprobs,
            num_cached=prompt.num_hit,
        )

    def _free(self, state: Queued | Running | None) -> None:
        if isinstance(state, Running):
            self._block_pool.give(state.blocks)
            self._slot_pool.give([state.slot])
