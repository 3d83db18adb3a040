"""A reader and its holders: what is checked before a read, and the few words spoken after it."""

from collections.abc import Mapping
from contextlib import suppress

from ..transfer.backend import TransferBackend
from ..transfer.codec import decode, encode
from ..transfer.errors import LayoutMismatchError, MessageError, PeerLostError, TransferError
from ..transfer.layout import CacheLayout
from ..transfer.messages import ConfirmLease, Handoff, LeaseAlive, LeaseGone, ReleaseLease
from ..transfer.request import Request


def check_handoff(
    request: Request,
    handoff: Handoff,
    layout: CacheLayout,
    fingerprint: str,
    peers: Mapping[str, str],
) -> None:
    """Raise unless ``handoff`` belongs to ``request``, our layout and a connected incarnation (``peers``: name to it).

    LayoutMismatchError, PeerLostError, or TransferError for a handoff of something else.
    """
    if handoff.layout_fingerprint != fingerprint:
        raise LayoutMismatchError(
            f"{handoff.holder} offers layout {handoff.layout_fingerprint[:12]}, ours is {fingerprint[:12]}: "
            "serve the same checkpoint and the same cache settings in both pools"
        )
    if peers.get(handoff.holder) != handoff.incarnation:
        raise PeerLostError(
            f"{handoff.holder} incarnation {handoff.incarnation} is not connected: "
            "it was restarted, or never paired with this rank"
        )
    num_tokens = len(request.prompt_ids) - 1
    if (handoff.request_id, handoff.num_tokens) != (request.request_id, num_tokens):
        raise TransferError(
            f"handoff is for request {handoff.request_id!r} with {handoff.num_tokens} cached tokens; "
            f"the request is {request.request_id!r} with {num_tokens}"
        )
    first = min(request.tail_start(layout.keep), num_tokens)
    if not first <= handoff.tail_start <= num_tokens:
        raise TransferError(
            f"handoff of {handoff.request_id!r} begins the decoder layers at token {handoff.tail_start}; with keep = "
            f"{layout.keep} that is {first} to {num_tokens}"
        )


class Holders:
    """Talks to the ranks that hold what we read."""

    def __init__(self, backend: TransferBackend) -> None:
        self._backend = backend
        self.bad_messages = 0

    def confirm(self, handoff: Handoff, nonce: int) -> None:
        """Ask whether the lease is alive; ``nonce`` ties the answer to this question. Raises PeerLostError."""
        question = ConfirmLease(
            lease_id=handoff.lease_id,
            incarnation=handoff.incarnation,
            request_id=handoff.request_id,
            generation=handoff.generation,
            nonce=nonce,
        )
        self._backend.send(handoff.holder, encode(question))

    def release(self, handoff: Handoff) -> None:
        """Say that we have what we need, or want it no more. A holder that is gone has no lease to end."""
        message = ReleaseLease(
            lease_id=handoff.lease_id,
            incarnation=handoff.incarnation,
            request_id=handoff.request_id,
            generation=handoff.generation,
        )
        with suppress(PeerLostError):
            self._backend.send(handoff.holder, encode(message))

    def answers(self) -> list[tuple[str, LeaseAlive | LeaseGone]]:
        """Answers that have come in, with the name of the peer; everything else is counted and dropped."""
        answers: list[tuple[str, LeaseAlive | LeaseGone]] = []
        for peer, data in self._backend.receive():
            try:
                message = decode(data)
            except MessageError:
                self.bad_messages += 1
                continue
            if isinstance(message, LeaseAlive | LeaseGone):
                answers.append((peer, message))
            else:
                self.bad_messages += 1
        return answers
