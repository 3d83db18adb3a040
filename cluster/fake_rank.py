"""Ranks without a model, for tests and for trying out the control plane: real loops, events and failures, no weights.

A request's answer is ``fake_answer``: every token depends on the prompt and its position. Faults are chosen by
request id or rank name, so that a test says in its builder what will go wrong.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decode.events import DecodeEvent, DecodeFailed, Tokens
from ..model.expert_flip import Flip
from ..prefill.events import Offered, PrefillEvent
from ..transfer.errors import CheckpointError, IntegrityError, TransferError
from ..transfer.messages import Handoff
from ..transfer.request import Request
from .config import ClusterConfig
from .rank_host import BuiltRank, Joined, RankId


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong. ``bad_checkpoint``: rank names whose check fails; the others by request id.

    ``lost_transfers``: how many handoffs of a request each decode rank fails to read. ``broken_steps`` raise in a
    decode step, ``exits`` end the decode process, ``silent`` are never answered by decode.
    """

    bad_checkpoint: frozenset[str] = frozenset()
    lost_transfers: Mapping[str, int] = field(default_factory=dict[str, int])
    broken_steps: frozenset[str] = frozenset()
    exits: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()


def fake_answer(request: Request) -> tuple[int, ...]:
    """What the fake ranks answer."""
    seed = sum(request.prompt_ids)
    return tuple((seed + 7 * position) % 1000 for position in range(request.sampling.max_tokens))


class FakePrefillRank:
    """Offers every prompt one step after it came."""

    def __init__(self, who: RankId) -> None:
        self._who = who
        self._queue: dict[str, Request] = {}
        self._num_offered = 0

    @property
    def outlook(self) -> tuple[float]:
        """Whether a prompt waits."""
        return (float(bool(self._queue)),)

    def submit(self, request: Request) -> None:
        """Queue a prompt."""
        self._queue[request.request_id] = request

    def cancel(self, request_id: str) -> None:
        """Forget a prompt."""
        self._queue.pop(request_id, None)

    def pump(self) -> None:
        """Nothing to answer."""

    def step(
        self,
        outlooks: Sequence[Sequence[float]] = (),
        flips: Sequence[Flip] = (),
    ) -> Sequence[PrefillEvent]:
        """Offer everything that waits."""
        del outlooks, flips
        requests, self._queue = self._queue, {}
        self._num_offered += len(requests)
        return [self._offer(request) for request in requests.values()]

    def close(self) -> None:
        """Nothing was started."""

    def check_integrity(self) -> None:
        """Nothing may be left."""
        if self._queue:
            raise IntegrityError(f"{self._who.name} still holds {sorted(self._queue)}")

    def stats(self) -> Mapping[str, Any]:
        """How much was offered, and where."""
        return {"offered": self._num_offered, "pid": os.getpid()}

    def _offer(self, request: Request) -> Offered:
        handoff = Handoff(
            request_id=request.request_id,
            generation=self._num_offered,
            holder=self._who.name,
            incarnation="fake",
            lease_id=request.request_id,
            lease_s=1.0,
            layout_fingerprint="fake",
            num_tokens=len(request.prompt_ids) - 1,
            blocks=(),
            slot=1,
            block_checksums=(),
            slot_checksum=0,
        )
        now = time.time()
        return Offered(
            request_id=request.request_id, handoff=handoff, prefill_started=now, offered=now
        )


class FakeDecodeRank:
    """Gives every request one token a step."""

    def __init__(self, who: RankId, faults: Faults) -> None:
        self._who = who
        self._faults = faults
        self._running: dict[str, tuple[Request, int]] = {}
        self._lost: dict[str, int] = {}
        self._num_tokens = 0

    @property
    def outlook(self) -> tuple[float]:
        """Whether a request runs."""
        return (float(bool(self._running.keys() - self._faults.silent)),)

    def submit(self, request: Request, handoff: Handoff) -> None:
        """Take a request into the batch."""
        assert handoff.request_id == request.request_id
        self._running[request.request_id] = (request, 0)

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        self._running.pop(request_id, None)

    def pump(self) -> None:
        """Nothing to answer."""

    def step(
        self,
        outlooks: Sequence[Sequence[float]] = (),
        flips: Sequence[Flip] = (),
    ) -> Sequence[DecodeEvent]:
        """One token for each request, or what its fault says."""
        del outlooks, flips
        wanted = [
            request_id for request_id in self._running if request_id not in self._faults.silent
        ]
        return [self._event(request_id) for request_id in wanted]

    def close(self) -> None:
        """Nothing was started."""

    def check_integrity(self) -> None:
        """Nothing may be left."""
        if self._running:
            raise IntegrityError(f"{self._who.name} still holds {sorted(self._running)}")

    def stats(self) -> Mapping[str, Any]:
        """How many tokens were sampled, and where."""
        return {"tokens": self._num_tokens, "pid": os.getpid(), "running": len(self._running)}

    def _event(self, request_id: str) -> DecodeEvent:
        request, position = self._running[request_id]
        if request_id in self._faults.broken_steps:
            raise RuntimeError(f"the step of {request_id} is broken")
        if request_id in self._faults.exits:
            os._exit(13)
        lost = self._lost.get(request_id, 0)
        if lost < self._faults.lost_transfers.get(request_id, 0):
            self._lost[request_id] = lost + 1
            self.cancel(request_id)
            return DecodeFailed(request_id=request_id, error=TransferError("the read was lost"))
        answer = fake_answer(request)
        last = position + 1 == len(answer)
        self._running[request_id] = (request, position + 1)
        self._num_tokens += 1
        if last:
            self.cancel(request_id)
        now = time.time()
        return Tokens(
            request_id=request_id,
            ids=(answer[position],),
            top_logprobs=(),
            finish_reason="length" if last else None,
            admitted=now,
            first_token=now,
            last_token=now,
        )


class FakeExchange:
    """Every rank is on its own."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Nobody else is asked."""
        return [list(values)]

    def close(self) -> None:
        """Nothing to leave."""


class FakePeering:
    """Nothing is transferred."""

    def pairing(self) -> bytes:
        """Nobody needs it."""
        return b"fake"

    def connect(self, pairing: bytes) -> None:
        """Nobody is reached."""

    def close(self) -> None:
        """Nothing to drop."""


@dataclass(frozen=True, slots=True)
class FakeBuilder:
    """Builds fake ranks with the given faults."""

    faults: Faults = field(default_factory=Faults)

    def check(self, who: RankId, config: ClusterConfig) -> None:
        """Fails where it is asked to."""
        if who.name in self.faults.bad_checkpoint:
            raise CheckpointError(f"{config.model.checkpoint}/model.safetensors is truncated")

    def join(self, who: RankId, config: ClusterConfig, address: str) -> Joined:
        """Nobody is met."""
        del who, config, address
        return FakeExchange()

    def load(self, who: RankId, config: ClusterConfig, exchange: Joined) -> BuiltRank:
        """Nothing is loaded."""
        del config, exchange
        rank = FakePrefillRank(who) if who.kind == "prefill" else FakeDecodeRank(who, self.faults)
        return BuiltRank(rank=rank, peering=FakePeering(), context_tokens=4096)
